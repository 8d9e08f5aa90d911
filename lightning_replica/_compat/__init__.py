"""Every private name of Lightning and torch that the package uses, and nothing else does.

Two files, because the layers below the strategy know torch only. `tests/test_compat.py` imports all of it and
watches the places of Lightning whose course is followed line by line, so that an upgrade that moves one fails
there and not in a recovery.
"""
