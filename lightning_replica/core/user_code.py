"""Which code is the user's: neither this package's, nor installed, nor Python's own. And what that code names."""

import csv
import dis
import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from lightning_replica._compat.packages import is_of_lightning

_OTHERS: Final = tuple(
    f"{place}{os.sep}" for place in (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "platstdlib")))
)
CACHE: Final[Any] = type(functools.lru_cache(len))
"""The class of functions that `functools.lru_cache` wraps."""
_WRAPPERS: Final = (types.FunctionType, CACHE)
_READ: Final = ("LOAD_ATTR", "LOAD_METHOD")
_OF_MODULE: Final = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM")
_FRAMEWORK: Final = (__name__.partition(".")[0], "lightning_utilities", "torch")
_ENDS: Final = ("STORE", "POP", "RETURN")  # instructions at the end of an expression
_NEAR: Final = 10  # instructions between the name of an object and what is read of it
_MANY: Final = 1000  # items of a table of functions that are looked at
_APPENDS: Final = re.compile("a[bt+]{0,2}")
_STORES: Final = frozenset((dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_ATTR"]))
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))  # in an environment, of a user, of Debian


def is_users(file: str) -> bool:
    """Return whether code that was compiled from ``file`` is the user's."""
    no_file = file.startswith("<")  # <frozen importlib._bootstrap>, <string>
    return not (no_file or file.startswith(_OTHERS) or is_installed(file))


def is_users_file(file: Any) -> bool:
    """Return whether something, as the ``__file__`` of a module, names a file of the user's."""
    return isinstance(file, str) and is_users(file)


def is_installed(file: str) -> bool:
    """Return whether ``file`` belongs to an installed package; ``pip install --target`` takes any folder for that."""
    if _INSTALLED.intersection(Path(file).parts):
        return True
    for folder in (f"{each.rstrip(os.sep)}{os.sep}" for each in sys.path if each and isinstance(each, str)):
        if file.startswith(folder) and file[len(folder) :].partition(os.sep)[0] in _installed_in(folder):
            return True
    return False


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the names of what pip has put into a folder, as it has noted itself."""
    found = set[str]()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError, UnicodeDecodeError, csv.Error), record.open(encoding="utf-8", newline="") as file:
            found.update(row[0].partition("/")[0] for row in csv.reader(file) if row)
    return frozenset(found - {"", ".", ".."})


class UserCode:
    """The code that runs for the user's objects, as far as it is the user's.

    It begins with the methods of the objects' classes, and goes on with the functions and classes that these name. The
    modules that define the classes count as the user's, wherever they are installed.

    Args:
        objects: The user's objects. Of an object whose class is Lightning's, torch's or this package's, only what the
            class is derived from counts.
        classes: Further classes.
        functions: Further functions.
        modules: Modules of Python of which all variables count.
        without: Classes that are not followed, nor those derived from them.
        without_methods: Names of methods that are not followed.

    Attributes:
        appending: Names of functions that open a file to append to it, with the lines where they stand.
        problem: Why some code could not be followed; empty if all could.
    """

    def __init__(
        self,
        objects: Iterable[Any],
        classes: Iterable[type] = (),
        functions: Iterable[Any] = (),
        modules: Iterable[types.ModuleType] = (),
        without: tuple[type, ...] = (),
        without_methods: Collection[str] = (),
    ) -> None:
        self._without, self._without_methods = without, without_methods
        of_objects = dict.fromkeys(map(type, objects))
        self._followed = {module_of(cls): not is_of_framework(module_of(cls)) for cls in of_objects}
        self._classes: dict[type, None] = {}
        # Code of two modules may be equal, so the `id` of their variables is a part of the key.
        self._functions: dict[tuple[types.CodeType, int], frozenset[str]] = {}
        self._names: dict[str, set[str]] = {}
        self._modules: dict[str, Any] = {}
        self._written = set[str]()
        self.appending = list[str]()
        self._ahead: list[Callable[[], None]] = []
        for module in modules:
            names = tuple(name for name in vars(module) if not name.startswith("__"))
            self._ahead.append(partial(self._add_value, module, names))
        self._ahead += [partial(self._add_functions_of, function) for function in functions]
        self._ahead += [partial(self._add_class, cls) for cls in (*of_objects, *classes)][::-1]
        self.problem = ""
        while self._ahead:  # no recursion: functions may call each other in long chains
            try:
                self._ahead.pop()()
            except Exception as error:  # classes and variables are of any kind, and may run code when they are asked
                self.problem = f"some code cannot be followed ({type(error).__name__}: {error})"

    @property
    def classes(self) -> Collection[type]:
        """The user's classes, in the order in which they are met."""
        return self._classes.keys()

    @property
    def names(self) -> Mapping[str, Collection[str]]:
        """By name of a module of Python, the names that code uses there: of variables, functions, attributes."""
        return self._names

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of Python that `names` has, by the same names; for one that is not imported, a stand-in."""
        return self._modules

    @property
    def written(self) -> Set[str]:
        """The names of variables of modules that code writes to, of whichever module."""
        return self._written

    def reader_of(self, attribute: str, not_of: Collection[str] = ()) -> str | None:
        """Return the name of a function that reads an attribute; None if none does.

        Args:
            attribute: The name of the attribute.
            not_of: Names of owners of which it does not count.
        """
        using = (code for (code, _), names in self._functions.items() if names & {attribute, "getattr"})
        return next((code.co_name for code in using if _reads(code, attribute, not_of)), None)

    def reader_from(self, attribute: str, owner: re.Pattern[str]) -> str | None:
        """Return the name of a function that reads an attribute of what names like ``owner`` lead to, or None.

        A variable that is set right after such a name counts as one.
        """
        using = (code for (code, _), names in self._functions.items() if attribute in names)
        return next((code.co_name for code in using if _reads_from(code, attribute, owner)), None)

    def caller_of(self, functions: Collection[str]) -> str | None:
        """Return the name of a function that names one of ``functions``; None if none does.

        An attribute of that name which is only read, as ``strategy.grad_norm``, is a value and no function.
        """
        using = (code for (code, _), names in self._functions.items() if names.intersection(functions))
        return next((code.co_name for code in using if _names_function(code, functions)), None)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base in self._classes or issubclass(base, self._without) or not self._follows_class(base):
                continue
            self._classes[base] = None
            for name, value in vars(base).items():
                if name not in self._without_methods:
                    self._add_item(value)

    def _add_item(self, value: Any) -> None:
        """Add what a class or a container holds: another class, or functions."""
        if issubclass(type(value), type):
            self._ahead.append(partial(self._add_class, value))
        else:
            self._add_functions_of(value)

    def _add_functions_of(self, value: Any) -> None:
        self._ahead += [partial(self._add_function, function) for function in _functions_in(value)]

    def _follows_class(self, cls: type) -> bool:
        name = module_of(cls)
        return self._follows(name) if name in self._followed or name in sys.modules else is_users_class(cls)

    def _follows(self, module: Any) -> bool:
        if not isinstance(module, str):  # of a class that was made by hand
            return False
        if module not in self._followed:
            self._followed[module] = is_users_file(getattr(sys.modules.get(module), "__file__", None))
        return self._followed[module]

    def _add_function(self, function: types.FunctionType) -> None:
        key = function.__code__, id(function.__globals__)
        if key in self._functions:
            return
        names = self._functions[key] = frozenset()
        for content in _enclosed_in(function):
            self._add_held(content)
        name = function.__globals__.get("__name__", "")
        module: Any = sys.modules.get(name)
        if getattr(module, "__dict__", None) is not function.__globals__:
            if not is_users(function.__code__.co_filename):
                return
            module = _unimported.setdefault(id(function.__globals__), _Unimported(function.__globals__))
        elif not self._follows(name):
            return
        names = self._functions[key] = frozenset(_names_in(function.__code__))
        self._written.update(_written_in(function.__code__))
        self.appending += _appending_in(function.__code__)
        self._add_names(module, names)

    def _add_names(self, module: Any, names: Collection[str]) -> None:
        title = self._title_of(module)
        known = self._names.setdefault(title, set())
        new = sorted(set(names) - known)  # in the same order in every process
        known.update(new)
        for name in new:
            now = vars(module)
            value = now[name] if name in now else _imported_as(name, module)
            self._ahead.append(partial(self._add_value, value, names))

    def _title_of(self, module: Any) -> str:
        """Return the name by which a module of Python is known; there may be several of one name."""
        name = str(vars(module).get("__name__", ""))
        if isinstance(module, _Unimported):
            name = f"{name} ({os.path.basename(str(vars(module).get('__file__', 'no file')))})"
        title, number = name, 1
        while vars(self._modules.setdefault(title, module)) is not vars(module):
            number += 1
            title = f"{name} ({number})"
        return title

    def _add_value(self, value: Any, names: Collection[str]) -> None:
        cls = type(value)  # not by `isinstance`, which asks a proxy for what it stands for
        if issubclass(cls, types.ModuleType):  # the code may use a variable of that one
            if self._follows(str(vars(value).get("__name__", ""))):
                self._add_names(value, names)
        elif issubclass(cls, type):
            self._add_class(value)
        else:
            self._add_held(value)

    def _add_held(self, value: Any) -> None:
        """Add functions that a value holds: a table of them, or an object that stands for one, as decorators make."""
        cls = type(value)
        base: Any = next((base for base in (list, tuple, dict) if issubclass(cls, base)), None)
        if base is not None:  # by its own methods: those of a class of the user's may change it
            items = dict.values(value) if base is dict else base.__iter__(value)
            for item in islice(items, _MANY):
                self._add_item(item)
            return
        self._add_class(cls)
        self._add_functions_of(value)
        if cls in self._classes:
            with suppress(AttributeError):
                for item in islice(object.__getattribute__(value, "__dict__").values(), _MANY):
                    self._add_item(item)


class _Unimported:
    """Stands for a module of Python that `sys.modules` does not have, as one that code has loaded from a path.

    Args:
        variables: Its variables.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self.__dict__ = variables


_unimported: Final[dict[int, _Unimported]] = {}  # by the ``id`` of the variables: one object each, as modules are


def _imported_as(name: str, module: types.ModuleType) -> Any:
    """Return the module that code of ``module`` imports by a name where it uses it, also a relative one; or None."""
    if name in sys.modules:
        return sys.modules[name]
    package = vars(module).get("__package__") or ""
    parents = [".".join(package.split(".")[:n]) for n in range(package.count(".") + 1, 0, -1)] if package else []
    return next((found for each in parents if (found := sys.modules.get(f"{each}.{name}")) is not None), None)


def is_users_class(cls: type) -> bool:
    """Return whether the user's code defines a class."""
    return is_users_file(_file_of(cls))


def _file_of(cls: type) -> Any:
    """Return the file of the module that defines a class, also if that is not imported; None if nothing shows it."""
    module = sys.modules.get(module_of(cls))
    if module is not None:
        return getattr(module, "__file__", None)
    functions = (each for value in vars(cls).values() for each in _functions_in(value))
    return next((each.__code__.co_filename for each in functions), None)


def module_of(cls: type) -> str:
    """Return the name of the module that defines a class; empty if the class does not say."""
    name = getattr(cls, "__module__", "")
    return name if isinstance(name, str) else ""


def is_of_framework(module: str) -> bool:
    """Return whether a module belongs to Lightning, torch or this package."""
    return is_of_lightning(module) or module.partition(".")[0] in _FRAMEWORK


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that an attribute of a class or a variable of a module calls."""
    cls = type(value)
    if issubclass(cls, property):
        found: list[Any] = [value.fget, value.fset, value.fdel]
    elif issubclass(cls, (functools.cached_property, functools.partial, functools.partialmethod)):
        found = [value.func]
    elif issubclass(cls, (staticmethod, classmethod, types.MethodType)):
        found = [value.__func__]
    else:
        found = [value]
    for each in found:
        while issubclass(type(each), _WRAPPERS):
            if issubclass(type(each), types.FunctionType):
                yield each
            each = getattr(each, "__wrapped__", None)


def _enclosed_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield what is in the closure of a function, as the function that a decorator has got."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _reads(code: types.CodeType, attribute: str, not_of: Collection[str]) -> bool:
    if attribute in code.co_consts and "getattr" in code.co_names:
        return True
    owner: Any = None
    for instruction in dis.get_instructions(code):
        is_read = instruction.opname in _READ and instruction.argval == attribute
        if is_read and owner not in not_of:
            return True
        owner = instruction.argval
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(_reads(each, attribute, not_of) for each in inner)


def _reads_from(code: types.CodeType, attribute: str, owner: re.Pattern[str]) -> bool:
    before, variables = list[str](), set[str]()  # what the last instructions name, and what was set to an owner
    is_loaded = False  # by the last instruction alone, as `opt` in `opt.state`; not so in `get_opt(0).state`
    for instruction in dis.get_instructions(code):
        operation, argument = instruction.opname, instruction.argval
        names = [*map(str, argument)] if isinstance(argument, tuple) else [str(argument)]  # two, from Python 3.13 on
        is_owner = any(owner.search(each) or each in variables for each in (before[-1:] if is_loaded else before))
        if is_owner and operation in _READ and argument == attribute:
            return True
        if is_owner and operation.startswith("STORE_FAST"):
            variables.update(names)
        before = names[1:] if operation.startswith(_ENDS) else [*before[-_NEAR:], *names]
        is_loaded = operation.startswith("LOAD") or len(names) > 1
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(_reads_from(each, attribute, owner) for each in inner)


def _names_function(code: types.CodeType, functions: Collection[str]) -> bool:
    is_in_module = False
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation in _READ:
            is_called = operation == "LOAD_METHOD" or "NULL" in instruction.argrepr  # the latter from Python 3.12 on
            if name in functions and (is_called or is_in_module):
                return True
        else:
            is_in_module = operation in _OF_MODULE
            if is_in_module and name in functions:
                return True
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(_names_function(each, functions) for each in inner)


def _written_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of global variables that code writes to, also by ``conf.name = 1`` or ``globals()["name"]``.

    What it sets of its first argument, which is ``self`` most often, are no variables of a module.
    """
    if not _STORES.isdisjoint(code.co_code[::2]):
        owner: Any = None
        for each in dis.get_instructions(code):
            if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_ATTR" and owner not in code.co_varnames[:1]):
                yield each.argval
            owner = each.argval[-1] if "FAST" in each.opname and isinstance(each.argval, tuple) else each.argval
    yield from _given_to_globals(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _written_in(constant)


def _appending_in(code: types.CodeType) -> Iterator[str]:
    """Yield the name of code that opens a file to append to it, as far as it names that mode."""
    opens = "open" in code.co_names or any(type(each) is tuple and "mode" in each for each in code.co_consts)
    if opens and any(isinstance(each, str) and _APPENDS.fullmatch(each) for each in code.co_consts):
        yield f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _appending_in(constant)


def _given_to_globals(code: types.CodeType) -> Iterator[str]:
    """Yield what may be names in code that uses ``globals()``."""
    if "globals" in code.co_names:
        yield from (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from _given_to_globals(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
