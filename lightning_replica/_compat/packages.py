"""Which of Lightning's two packages this process uses.

Lightning is published twice with the same code: as ``lightning`` (``lightning.pytorch`` and ``lightning.fabric``), and
as ``pytorch_lightning`` with ``lightning_fabric``. The classes of one are not those of the other, so a process trains
with one of them, and this package uses the same. All other modules get Lightning's names from `lightning_names`, which
imports them from the package that is chosen here.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from lightning_replica.errors import ConfigurationError

VARIABLE: Final = "LIGHTNING_REPLICA_LIGHTNING"  # names the package, where the script does not show it


@dataclass(frozen=True)
class Package:
    """One of Lightning's two packages.

    Attributes:
        name: The name under which it is installed and imported.
        pytorch: The module that has ``Trainer``.
        fabric: The module that has ``Fabric``.
        distribution: The name under which an index has it.
    """

    name: str
    pytorch: str
    fabric: str
    distribution: str

    def has(self, module: str) -> bool:
        """Return whether a module is the package, or in it."""
        roots = self.pytorch.partition(".")[0], self.fabric.partition(".")[0]
        return module.partition(".")[0] in roots

    def version(self) -> str:
        """Return the installed version."""
        return metadata.version(self.distribution)

    def is_installed(self) -> bool:
        """Return whether the package can be imported; it is not imported for that."""
        return importlib.util.find_spec(self.name) is not None


LIGHTNING: Final = Package("lightning", "lightning.pytorch", "lightning.fabric", "lightning")
PYTORCH_LIGHTNING: Final = Package("pytorch_lightning", "pytorch_lightning", "lightning_fabric", "pytorch-lightning")
PACKAGES: Final = (LIGHTNING, PYTORCH_LIGHTNING)

_chosen: Package | None = None


def chosen() -> Package:
    """Return the package that this process uses. The first call decides, for the life of the process.

    It is the package that `VARIABLE` names, or else the one that is imported already (of two, the first), or else the
    one that alone is installed, or else the one that the script imports further below.

    Raises:
        ConfigurationError: If `VARIABLE` names something else.
    """
    global _chosen
    if _chosen is None:
        _chosen = _named() or next(_imported(), None) or _alone() or _in_script() or LIGHTNING
    return _chosen


def is_of_lightning(module: str) -> bool:
    """Return whether a module, given by its name, belongs to one of Lightning's packages."""
    return any(package.has(module) for package in PACKAGES)


def describe(item: object) -> str:
    """Return what is shown of an object of a class that belongs to the chosen package."""
    other = next((package for package in _imported() if package is not chosen()), None)
    hint = "" if other is None else f", not for {other.pytorch} (unless {VARIABLE}={other.name} is set)"
    return f"<{type(item).__name__} for {chosen().pytorch}{hint}>"


def on_import(call: Callable[[Package], None]) -> None:
    """Call ``call`` with each of Lightning's packages as soon as it is imported; at once for one that is already."""
    _Watch(call).begin()


def is_being_imported(name: str) -> bool:
    """Return whether a module is only half way imported."""
    module = sys.modules.get(name)
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _named() -> Package | None:
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    for package in PACKAGES:
        if package.name == name:
            return package
    names = " or ".join(package.name for package in PACKAGES)
    raise ConfigurationError(f"{VARIABLE}={name!r} names no package of Lightning. Set it to {names}, or remove it.")


def _imported() -> Iterator[Package]:
    """Yield the packages that this process has imported, in that order."""
    for module in list(sys.modules):
        yield from (package for package in PACKAGES if module in (package.pytorch, package.fabric))


def _alone() -> Package | None:
    installed = [package for package in PACKAGES if package.is_installed()]
    return installed[0] if len(installed) == 1 else None


def _in_script() -> Package | None:
    """Return the package that the script itself imports first: tools sort our import before ``pytorch_lightning``."""
    try:
        with open(getattr(sys.modules["__main__"], "__file__", None) or os.devnull, encoding="utf-8") as script:
            tree = ast.parse(script.read())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for package in PACKAGES:
            if any(package.has(name) for name in names):
                return package
    return None


class _Watch(MetaPathFinder):
    """Sees that one of Lightning's packages is imported, without importing it itself."""

    def __init__(self, call: Callable[[Package], None]) -> None:
        self._call = call
        self._told: set[Package] = set()
        self._looking = False

    def begin(self) -> None:
        sys.meta_path.insert(0, self)
        for package in [*_imported()]:
            self._tell(package)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = [package for package in PACKAGES if fullname in (package.pytorch, package.fabric)]
        if not found or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, lambda: self._loaded(found[0], fullname))
        return spec

    def _loaded(self, package: Package, module: str) -> None:
        # Each package imports its Fabric first, when its Trainer cannot be imported yet.
        if package.is_installed() and (module == package.pytorch or not is_being_imported(package.name)):
            self._tell(package)

    def _tell(self, package: Package) -> None:
        if package not in self._told:
            self._call(package)
            self._told.add(package)


class _TellingLoader(Loader):
    """Loads a module as its own loader does, and then calls back."""

    def __init__(self, loader: Any, loaded: Callable[[], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # From here on, the module is as if nobody had watched: its data files are found through its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded()
