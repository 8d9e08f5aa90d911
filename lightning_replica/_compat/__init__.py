"""Every private name of Lightning and torch that the package uses; no other folder imports any.

Lightning has a file of its own, because the layers below the strategy use torch only. `tests/compat/test_compat.py`
imports all names. It also watches the functions of Lightning that the package follows line by line, so that an upgrade
that changes one of them fails in this test and not in a recovery. May import `errors` only.
"""
