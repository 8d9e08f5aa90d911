"""Packages that projects import and these trainings do not use. Every module and class of them is there, and empty.

torchvision's wheels need the CUDA build of torch. Imported after Lightning, which would use what it finds.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import MutableSequence
from types import ModuleType
from typing import Any

import lightning.pytorch  # noqa: F401

NAMES = ("torchvision", "descriptastorus", "huggingface_hub", "cuik_molmaker")


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)


def _class(name: str) -> type:
    return _Meta(name, (), {"__init__": lambda self, *args, **kwargs: None, "__module__": __name__})


class _Module(ModuleType):
    __path__: MutableSequence[str] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _class(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
