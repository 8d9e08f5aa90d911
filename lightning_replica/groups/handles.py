"""The process groups that user code holds: they outlive recoveries.

Each handle stands in front of a real group, which lasts for one generation. Its holder (Lightning, torchmetrics, DDP, a
device mesh, the user) keeps the handle; a recovery exchanges the real group behind it (user_groups.py). While a script
is set up, every collective passes through a handle, so the handles write and read the journal.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.groups import NewGroup, devices_of
from lightning_replica._compat.torch import failure_of
from lightning_replica.control.journal import Call, Journal, describe
from lightning_replica.errors import ClosedGroupError, CollectiveError, ConfigurationError

log = logging.getLogger(__name__)

# All methods that move data and that torch calls on a group, from Python or C++: the names of all versions of torch.
_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "gather_single", "gather_into_tensor", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single", "recv", "recv_anysource"),
)
_FILL_NOTHING = ("barrier", "monitored_barrier", "send")
_MAKE_GROUPS = ("split_group", "merge_remote_group")
# What a caller sets in a group once. A handle sets it in every group that comes behind it.
_SETTINGS = ("set_timeout", "_enable_collectives_timing", "_register_on_completion_hook")
_HOOKS = ("pre_hook", "post_hook", "abort_hook")  # which a caller registers and unregisters under a number
# What concerns the handle itself. A handle passes all other calls on, also those that only a newer torch knows.
_OWN = (
    *("rank", "size", "name", "group_name", "group_desc", "_set_group_name", "_set_group_desc", "_device_types"),
    *("shutdown", "abort", "boxed", "unbox", "_id", "_backend_id", "BackendType", "bound_device_id"),
    *("_register_backend", "_set_default_backend", "use_pg_for_symm_mem_rendezvous"),
)
_OWN_OF_WORK = ("boxed", "unbox")
_BY_PYBIND = "__", "_pybind11"
_NAME = "handle"
# In these functions, the sender keeps its own objects, even if the tensors that it made of them get other content.
_SENT_AS_THEY_ARE = frozenset(("broadcast_object_list",))


class Answered(dist.Work):
    """A collective that a replacement called and that has already ended.

    Args:
        filled: The tensors that the collective has filled.
    """

    def __init__(self, filled: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._filled = list(filled)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return true at once: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return true: the collective has ended."""
        return True

    def is_success(self) -> bool:
        """Return true: the collective has not failed."""
        return True

    def exception(self) -> None:
        """Return None: the collective has not failed."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def result(self) -> list[Tensor]:
        """Return the tensors that the collective has filled."""
        return self._filled

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._filled)
        return future


class Noted(dist.Work):
    """A collective under way that is written to the journal once it is seen to have ended.

    Args:
        work: What the group behind the handle has returned.
        note: Writes the collective to the journal.
    """

    def __init__(self, work: dist.Work, note: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._note = work, note
        self._noted = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the work, then write the collective to the journal."""
        result: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._done()
        return result

    def is_completed(self) -> bool:
        """Return whether the work has ended; write the collective to the journal if it ended without an error."""
        completed: bool = self._work.is_completed()
        if completed and failure_of(self._work) is None:
            self._done()
        return completed

    def get_future(self) -> Any:
        """Wait for the work, then return its future: C++ waits for the future itself and does not call `wait`."""
        self.wait()
        return self._work.get_future()

    def get_future_result(self) -> Any:
        """Wait for the work, then return its future of the result, as `get_future` does."""
        self.wait()
        return self._work.get_future_result()  # type: ignore[attr-defined]

    def _done(self) -> None:
        if not self._noted:
            self._noted = True
            self._note()


def _operation(name: str) -> Callable[..., Any]:
    def call(self: "Handle", *args: Any, **kwargs: Any) -> Any:
        if self.behind is None or self.is_journalled:
            return self.run(name, *args, **kwargs)
        return getattr(self.behind, name)(*args, **kwargs)

    return call


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: "Handle", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.real(), name)(*args, **kwargs)

    return call


def _refused(name: str) -> Callable[..., NoReturn]:
    def call(self: "Handle", *_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            f"`{name}` of a process group makes a group that does not outlive a recovery. Make it with"
            " `torch.distributed.new_group(ranks)`."
        )

    return call


def _passed_on_property(name: str) -> property:
    return property(lambda self: getattr(self.real(), name))


def _of_work(name: str) -> Callable[..., Any]:
    def call(self: Noted, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    return call


def _property_of_work(name: str, settable: bool) -> property:
    def get(self: Noted) -> Any:
        return getattr(self._work, name)

    def put(self: Noted, value: Any) -> None:
        setattr(self._work, name, value)

    return property(get, put if settable else None)


def _setting(name: str) -> Callable[..., None]:
    def call(self: "Handle", *args: Any, **kwargs: Any) -> None:
        self.set(name, name, *args, **kwargs)

    return call


def _registering(name: str) -> Callable[..., None]:
    def call(self: "Handle", hook_id: int, hook: Callable[..., None]) -> None:
        self.set(f"{name} {hook_id}", f"register_{name}", hook_id, hook)

    return call


def _unregistering(name: str) -> Callable[..., None]:
    def call(self: "Handle", hook_id: int) -> None:
        self.unset(f"{name} {hook_id}")
        if self.behind is not None:
            getattr(self.behind, f"unregister_{name}")(hook_id)

    return call


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in the first argument of a process group's method."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class Handle(dist.ProcessGroup):
    """A process group that keeps its identity while the real group behind it is exchanged.

    Args:
        key: The handle's name, the same on every member and in a replacement.
        wanted: The group that the caller asked for.
        journal: The journal of collectives, which is written while a script is set up.
        destroyed: Called when user code destroys the group.

    Attributes:
        key: See above.
        wanted: See above.
        behind: The real group of this generation; None between two generations.
        closed: Why the handle cannot be used any more; empty while it can.
    """

    def __init__(self, key: str, wanted: NewGroup, journal: Journal, destroyed: Callable[["Handle"], None]) -> None:
        super().__init__(wanted.place, len(wanted.ranks))  # type: ignore[call-arg]
        self.key, self.wanted, self.closed = key, wanted, ""
        self._journal, self._destroyed = journal, destroyed
        self.behind: dist.ProcessGroup | None = None
        self._settings: dict[str, Callable[[dist.ProcessGroup], None]] = {}
        self._name = self._desc = ""

    @property
    def is_journalled(self) -> bool:
        """Whether collectives are written to the journal, or answered from it."""
        return self._journal.mode != "closed"

    def stand_before(self, group: dist.ProcessGroup | None) -> None:
        """Put ``group`` behind this handle from now on; None between two generations, when there is no group."""
        self.behind = group
        if group is not None:
            for key, apply in self._settings.items():
                try:
                    apply(group)
                except Exception as error:
                    log.warning(
                        "The process group of ranks %s does without %r, which was set before: %s",
                        list(self.wanted.ranks),
                        key,
                        error,
                    )

    def set(self, key: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the group behind the handle, and of every group that will stand there.

        Args:
            key: What is set; a later call with the same key takes the place of this one.
            method: Name of the method.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            ClosedGroupError: If the handle is closed.
        """
        if self.closed:
            self.real()

        def apply(group: dist.ProcessGroup) -> None:
            getattr(group, method)(*args, **kwargs)

        if self.behind is not None:
            apply(self.behind)
        self._settings[key] = apply

    def unset(self, key: str) -> None:
        """Set something no longer in groups that will stand behind the handle."""
        self._settings.pop(key, None)

    def close(self, why: str) -> None:
        """Close this handle for the reason ``why``: no group will stand behind it any more."""
        self.behind, self.closed = None, why

    def getBackendName(self) -> str:
        """Return a name that C++ has no backend for. Otherwise C++ would look for that backend in the handle."""
        return _NAME

    def name(self) -> str:
        """Return the same name as `getBackendName`; older versions of torch call this method."""
        return _NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch has registered the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that the caller gave the group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        if self.behind is not None:
            return self.behind._device_types
        # In a replacement's set-up, torch asks for them before it calls `monitored_barrier`. Between two generations
        # there are none: whoever asks would look for the backends next.
        return [torch.device(kind) for kind in devices_of(self.wanted.backend)] if self.is_journalled else []

    def shutdown(self) -> None:
        """Destroy the group. Called by ``destroy_process_group``."""
        self._destroyed(self)

    def abort(self) -> None:
        """Abort the group behind the handle, if there is one. Called by ``_abort_process_group``."""
        if self.behind is not None:
            self.behind.abort()

    def run(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Run a collective, and write it to the journal if that is open for writing; or answer it from the journal."""
        journal = self._journal
        if journal.mode == "closed":
            return getattr(self.real(), operation)(*args, **kwargs)
        filled = list(_tensors(args[0] if args else kwargs[next(iter(kwargs))])) if args or kwargs else []
        if operation in _FILL_NOTHING or not filled:
            return Answered() if journal.mode == "reading" else getattr(self.real(), operation)(*args, **kwargs)
        call = describe(operation, filled)
        if journal.mode == "reading":
            return self._answer(call, filled, args)
        group = self.real()
        entry = journal.reserve(self.key)
        try:
            work = getattr(group, operation)(*args, **kwargs)
        except Exception as error:
            journal.write_failure(entry, call, error)
            raise
        if work is None:
            return None
        return Noted(work, lambda: journal.write(entry, call, filled, first=self.wanted.place == 0))

    def real(self) -> dist.ProcessGroup:
        """Return the group behind the handle.

        Raises:
            ClosedGroupError: If the handle is closed.
            CollectiveError: Between two generations, or if this replacement has not joined the others yet.
        """
        if self.behind is not None:
            return self.behind
        if self.closed:
            raise ClosedGroupError(f"Process group of ranks {list(self.wanted.ranks)}: {self.closed}")
        raise CollectiveError("A recovery is under way, or this replacement has not joined the others yet.")

    def _answer(self, call: Call, filled: Sequence[Tensor], args: Sequence[Any]) -> dist.Work:
        sends = call.operation == "broadcast" and args[1].rootRank == self.rank()
        came = self._journal.read(self.key, call, any_shape=sends)
        for tensor, content in zip(filled, came, strict=True):
            same = tensor.shape == content.shape and tensor.dtype == content.dtype
            if sends and call.function in _SENT_AS_THEY_ARE and not (same and torch.equal(tensor.cpu(), content)):
                log.warning(
                    "In this replacement of rank %d, %s broadcast other data than in its predecessor. The other ranks"
                    " keep what they got then. If this matters, make the script compute the same on every start.",
                    self.wanted.ranks[self.wanted.place],
                    call,
                )
            if same:
                with torch.no_grad():
                    tensor.copy_(content)
        return Answered(filled)


def _complete() -> None:
    """Give `Handle` and `Noted` every method that torch's classes have in this version, and no other."""
    for name, member in vars(dist.Work).items():
        if (
            callable(member)
            and name not in vars(Noted)
            and name not in _OWN_OF_WORK
            and not name.startswith(_BY_PYBIND)
        ):
            setattr(Noted, name, _of_work(name))
        elif isinstance(member, property) and name not in vars(Noted):
            setattr(Noted, name, _property_of_work(name, settable=member.fset is not None))
    made: dict[str, Any] = {name: _operation(name) for name in (*_OPERATIONS, *_FILL_NOTHING)}
    made |= {name: _setting(name) for name in _SETTINGS}
    made |= {name: _refused(name) for name in _MAKE_GROUPS}
    made |= {f"register_{name}": _registering(name) for name in _HOOKS}
    made |= {f"unregister_{name}": _unregistering(name) for name in _HOOKS}
    for name, member in vars(dist.ProcessGroup).items():
        if name in vars(Handle) or name in _OWN or name.startswith(_BY_PYBIND):
            continue
        if isinstance(member, property):
            setattr(Handle, name, _passed_on_property(name))
        elif callable(member):
            setattr(Handle, name, made.get(name) or _passed_on(name))


_complete()
