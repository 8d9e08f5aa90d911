"""The versions that the package is tested with, and the error of one whose private names do not fit."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_replica.errors import VersionError

# The lowest and the newest version that scripts/matrix has run the tests with: docs/compatibility.md has its table.
TESTED: Final = {
    "python": ("3.10", "3.14"),
    "torch": ("2.9.0", "2.15.0"),
    "lightning": ("2.6.0", "2.6.6"),
    "pytorch-lightning": ("2.6.0", "2.6.6"),
    "numpy": ("1.25.0", "2.5.5"),
}


# The same as in pyproject.toml; for both packages of Lightning. 2.6.2 and 2.6.3 have been withdrawn.
LIGHTNING_VERSIONS: Final = SpecifierSet(">=2.6,<2.7,!=2.6.2,!=2.6.3")
TORCH_VERSIONS: Final = SpecifierSet(">=2.9")


@contextmanager
def private_names_of(package: str) -> Iterator[None]:
    """Turn the error of a name that is missing, while ``package``'s private names are imported, into a `VersionError`.

    A version that has another layout is then refused when it is imported, and not in the first step of a training.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        if isinstance(error, VersionError) or (isinstance(error, ImportError) and not _lacks_a_name(package, error)):
            raise
        raise VersionError(
            f"lightning-replica does not work with {package} {_installed(package)}: {error}. It is tested with"
            f" {package} {' to '.join(TESTED[package])}. Install one of these versions, or report this on the issue"
            " page of lightning-replica, with the output of `pip freeze`."
        ) from error


def check_version(distribution: str, supported: SpecifierSet) -> None:
    """Refuse a version that pip has not chosen for this package, as ``pytorch-lightning``, which it does not require.

    Raises:
        VersionError: If the version that is installed is not supported.
    """
    found = _installed(distribution)
    if found and not supports(supported, found):
        raise VersionError(
            f"{distribution} {found} is installed, and lightning-replica works with {distribution}{supported}."
            f' Install such a version: pip install "{distribution}{supported}"'
        )


def supports(supported: SpecifierSet, version: str) -> bool:
    """Return whether a version is supported. A build between two releases, as 2.8.0a0+nv25.6, counts as the later one.

    Vendors of containers ship such builds, and what the later release has is in them.
    """
    return supported.contains(Version(version).base_version)


def need(owner: Any, *names: str) -> None:
    """Check that ``owner`` has attributes that are used later.

    Raises:
        AttributeError: If it does not have one of them.
    """
    for name in names:
        if not hasattr(owner, name):
            raise AttributeError(f"{getattr(owner, '__name__', owner)} has no `{name}`")


def need_in_instances(owner: type[Any], *names: str) -> None:
    """Check that instances of ``owner`` have attributes, by the code of its methods: there is no instance yet.

    Raises:
        AttributeError: If no method of the class or of its bases mentions one of them.
    """
    mentioned = set[str]()
    for base in owner.__mro__:
        mentioned |= set(vars(base))
        for member in vars(base).values():
            function = getattr(member, "fget", None) or getattr(member, "__wrapped__", member)
            code = getattr(function, "__code__", None)
            mentioned |= set(code.co_names) if code is not None else set()
    for name in names:
        if name not in mentioned:
            raise AttributeError(f"instances of {owner.__qualname__} have no `{name}`")


def need_parameters(function: Callable[..., Any], *names: str) -> None:
    """Check that ``function`` takes parameters of these names.

    Raises:
        AttributeError: If it does not take one of them.
    """
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            raise AttributeError(f"{function.__qualname__} takes no `{name}`")


def is_newer_than_tested(package: str, version: str) -> bool:
    """Return whether ``version`` of a package that `TESTED` names is newer than the newest tested one.

    Of Python, the first two numbers of the version count.
    """
    newest = Version(TESTED[package][1])
    return Version(version).release[: len(newest.release)] > newest.release


def _lacks_a_name(package: str, error: ImportError) -> bool:
    """Return whether ``package`` is there and lacks a name or a module, and nothing else is missing or broken."""
    module = error.name or ""
    roots = {package.replace("-", "_"), *(["lightning_fabric"] if package == "pytorch-lightning" else [])}
    is_there = not isinstance(error, ModuleNotFoundError) or module not in roots
    return is_there and module.partition(".")[0] in roots


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""  # a build from source, which has no metadata
