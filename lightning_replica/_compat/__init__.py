"""Every private name of Lightning and torch that the package uses; no other folder imports any.

`lightning_names` imports Lightning, from the package that `packages` has chosen, and nothing else does. What is done
with torch's names stands apart, because the layers below the strategy use torch only. `versions` refuses a version that
lacks a name, when it is imported. `tests/compat/test_compat.py` imports all names. It also watches the functions of
Lightning that the package follows line by line, so that an upgrade that changes one of them fails in this test and not
in a recovery. May import `errors` only.
"""
