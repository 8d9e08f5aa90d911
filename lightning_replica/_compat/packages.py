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
import tokenize
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from lightning_replica._compat.versions import LIGHTNING_VERSIONS, supports
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
        try:
            spec = importlib.util.find_spec(self.name)
        except ValueError:  # something without a spec stands in for it in `sys.modules`
            return False
        return spec is not None and spec.origin is not None  # any folder of that name has a spec without an origin

    def is_supported(self) -> bool:
        """Return whether the package is installed in a version that this package works with."""
        try:
            return self.is_installed() and supports(LIGHTNING_VERSIONS, self.version())
        except metadata.PackageNotFoundError:
            return True  # imported from its source


LIGHTNING: Final = Package("lightning", "lightning.pytorch", "lightning.fabric", "lightning")
PYTORCH_LIGHTNING: Final = Package("pytorch_lightning", "pytorch_lightning", "lightning_fabric", "pytorch-lightning")
PACKAGES: Final = (LIGHTNING, PYTORCH_LIGHTNING)

_chosen: Package | None = None


def chosen() -> Package:
    """Return the package that this process uses. The first call decides, for the life of the process.

    It is the package that `VARIABLE` names, or else the one that alone is installed in a supported version, or else the
    one that is imported already (of two, the first), or else the one that the script imports further below.

    Raises:
        ConfigurationError: If `VARIABLE` names something else.
    """
    global _chosen
    if _chosen is None:
        _chosen = _named() or _usable()
    return _chosen


def is_of_lightning(module: str) -> bool:
    """Return whether a module, given by its name, belongs to one of Lightning's packages."""
    return any(package.has(module) for package in PACKAGES)


def within_lightning(module: str) -> str:
    """Return the name of a module within ``pytorch`` or ``fabric`` of Lightning; empty for any other module."""
    names = [name for package in PACKAGES for name in (package.pytorch, package.fabric)]
    return next((module.removeprefix(f"{name}.") for name in names if module.startswith(f"{name}.")), "")


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
        for package in PACKAGES:
            if module in (package.pytorch, package.fabric) and package.is_installed():
                yield package


def _usable() -> Package:
    usable = [package for package in PACKAGES if package.is_supported()]
    # If none is, the one that is there is refused by its version.
    usable = usable or [package for package in PACKAGES if package.is_installed()] or [LIGHTNING]
    if len(usable) > 1:
        usable = [package for package in (*_imported(), *_in_script()) if package in usable] or usable
    return usable[0]


def _in_script() -> Iterator[Package]:
    """Yield the packages that the script itself imports: tools sort our import before ``pytorch_lightning``."""
    # A process that multiprocessing starts imports the script under the first name.
    main = sys.modules.get("__mp_main__") or sys.modules.get("__main__")
    try:
        with tokenize.open(getattr(main, "__file__", None) or os.devnull) as script:
            nodes: deque[ast.AST] = deque([ast.parse(script.read())])
    except (OSError, SyntaxError, ValueError):
        return
    while nodes:  # what is imported at the top comes before what functions import
        node = nodes.popleft()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        yield from (package for name in names for package in PACKAGES if package.has(name))
        nodes.extend(ast.iter_child_nodes(node))


class _Watch(MetaPathFinder):
    """Sees that one of Lightning's packages is imported, without importing it itself."""

    def __init__(self, call: Callable[[Package], None]) -> None:
        self._call = call
        self._reported: set[Package] = set()

    def begin(self) -> None:
        """Watch, in place of a watch that has begun before: `importlib.reload` begins another."""
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if not isinstance(finder, _Watch))]
        for package in [*_imported()]:
            self._tell(package)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = next((package for package in PACKAGES if fullname in (package.pytorch, package.fabric)), None)
        if found is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            package = found
            spec.loader = _TellingLoader(spec.loader, lambda: self._loaded(package, fullname))
        return spec

    def _loaded(self, package: Package, module: str) -> None:
        # Each package imports its Fabric first, when its Trainer cannot be imported yet.
        if package.is_installed() and (module == package.pytorch or not is_being_imported(package.name)):
            self._tell(package)

    def _tell(self, package: Package) -> None:
        if package not in self._reported:
            self._call(package)
            self._reported.add(package)


class _TellingLoader(Loader):
    """Loads a module as its own loader does, and then calls back."""

    def __init__(self, loader: Any, loaded: Callable[[], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def __getattr__(self, name: str) -> Any:
        """Return what the module's own loader has besides, as ``get_source``."""
        return getattr(self._loader, name)

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
