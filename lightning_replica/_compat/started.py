"""How this process was started, noted when the package is imported: a script may change it afterwards."""

import os


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return os.environ.get("PWD", "/")


DIRECTORY = _directory()
