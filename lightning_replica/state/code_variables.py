"""What the user's code keeps beside objects: global variables of its modules, attributes of its classes.

``STEPS += 1`` in a hook, a cache in a dict of the module, a counter in a class, a list that is the default of an
argument: a batch that is repeated has to find them as it did the first time. They are found by the code that uses them
(`core.user_code.UserCode`). Of a module, the names in that code count; of a class, all that its body holds. What an
installed package keeps in its modules is not known. Members of enumerations may have attributes, and the environment of
the process has variables that code sets.
"""

import enum
import functools
import os
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from lightning_replica.core.inexact import Report
from lightning_replica.core.user_code import UserCode
from lightning_replica.state.objects.capture import Root
from lightning_replica.state.objects.kinds import OF_CLASSES, is_made_in_python, keeps_something
from lightning_replica.state.objects.records import is_special

GLOBALS: Final = "globals of "
CLASS: Final = "class "
MOST: Final = 5000  # objects that the variables of one module or class may lead to; a dataset in memory has more
_OF_MEMBERS: Final = frozenset(("_name_", "__objclass__", "_sort_order_"))
_ENVIRONMENT: Final = frozenset(("environ", "environb", "putenv", "unsetenv", "chdir", "fchdir"))
_DIRECTORY: Final = "the working directory"  # no variable is called so
# Variables that say which rank a process is, or how ranks find each other.
_OF_RANKS: Final = ("LIGHTNING_REPLICA_", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_")
_OF_RANKS_WHOLE: Final = frozenset(("RANK", "WORLD_SIZE", "NODE_RANK"))


def variables_of(code: UserCode) -> Iterator[Root]:
    """Yield where the walk over variables begins: modules of Python, and classes."""
    for name, names in sorted(code.names.items()):
        module = code.modules[name]
        now = vars(module)
        only = tuple(each for each in sorted(names) if each in code.written or (each in now and _is_state(now[each])))
        yield Root(module, GLOBALS + name, only=only, most=MOST)
    titles = Counter[str]()
    for cls in code.classes:
        title = f"{CLASS}{cls.__module__}.{cls.__qualname__}"
        titles[title] += 1
        if titles[title] > 1:  # a function makes a class each time
            title = f"{title} ({titles[title]})"
        yield Root(cls, title, own=_not_state_of(cls), most=MOST)
        if issubclass(cls, enum.Enum):
            for name, member in sorted(cls.__members__.items()):
                yield Root(member, f"{title}.{name}", _OF_MEMBERS)


def _is_of_ranks(name: str) -> bool:
    return name in _OF_RANKS_WHOLE or name.startswith(_OF_RANKS)


class Environment:
    """The environment of the process as attributes of an object, which other code takes and puts back.

    It has variables and a working directory.

    Only where the user's code names the environment: libraries set variables for themselves. Those that say which rank
    a process is stay as they are.
    """

    def __init__(self) -> None:
        self._attributes = types.SimpleNamespace()
        self._known: Any = None
        self.is_used = False

    def of(self, code: UserCode) -> Iterator[Root]:
        """Yield where the walk over the variables begins; nothing if code does not name them."""
        self.is_used = any(not _ENVIRONMENT.isdisjoint(names) for names in code.names.values())
        if self.is_used:
            self.look()
            yield Root(self._attributes, "os.environ", of_process=True)

    def look(self) -> None:
        """Make the object have the variables that there are now."""
        if not self.is_used:
            return
        variables = getattr(os.environ, "_data", None)
        now = None if variables is None else (dict(variables), _working_directory())
        if now is None or now != self._known:
            self._known = now
            found: dict[str, str | None]
            found = {name: value for name, value in os.environ.items() if not _is_of_ranks(name)}
            found[_DIRECTORY] = _working_directory()
            vars(self._attributes).clear()
            vars(self._attributes).update(found)

    def put(self, report: Report) -> None:
        """Set the variables that the object has, and no others; report a working directory that is gone."""
        if not self.is_used:
            return
        wanted = dict(vars(self._attributes))
        directory = wanted.pop(_DIRECTORY, None)
        if directory is not None and directory != _working_directory():
            try:
                os.chdir(directory)
            except OSError as error:
                report(_DIRECTORY, f"it cannot be {directory} again ({error})", "once")
        for name in [name for name in os.environ if name not in wanted and not _is_of_ranks(name)]:
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        self._known = None


def _working_directory() -> str | None:
    """Return the working directory of the process; None if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _not_state_of(cls: type) -> frozenset[str]:
    """Return the names in the body of a class that are no state; an attribute that comes later counts."""
    is_enumeration = issubclass(cls, enum.Enum)
    members: Iterable[str] = getattr(cls, "__members__", ()) if is_enumeration else ()
    of_class = (
        name
        for name, value in vars(cls).items()
        if is_special(name)
        or _is_method_of_python(name, value)
        or not _is_state(value)
        or (is_enumeration and name.startswith("_") and name.endswith("_"))
    )
    return frozenset((*members, *of_class))


def _is_method_of_python(name: str, value: Any) -> bool:
    """Return whether Python calls a method by itself, as ``__init__``, and it keeps nothing: nobody exchanges it."""
    return (
        name.startswith("__")
        and name.endswith("__")
        and not (type(value) is types.FunctionType and keeps_something(value))
        and callable(value)
    )


def _is_state(value: Any) -> bool:
    """Return whether a value may change, or be replaced by another one, as training goes on."""
    cls = type(value)  # not by `isinstance`, which asks a proxy for what it stands for
    if cls is types.FunctionType:  # another one may take its place
        return True
    if issubclass(cls, OF_CLASSES):
        return True
    is_slot = hasattr(cls, "__get__") and not is_made_in_python(cls)
    return not (is_slot or issubclass(cls, (types.ModuleType, functools.cached_property)))
