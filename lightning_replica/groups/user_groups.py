"""The handles of this rank, by the names that all ranks use for them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_replica._compat.groups import NewGroup
from lightning_replica.control.journal import Journal
from lightning_replica.groups.handles import Handle
from lightning_replica.groups.names import Held, Name

DEFAULT = "default"
_HOOKS = "hooks"


class UserGroups:
    """Makes handles, and puts new real groups behind them.

    Args:
        rank: This rank.
        journal: The journal of collectives, which is written while a script is set up.
        timeout: Time-out of groups that only other ranks have asked for so far.
        open_behind: Opens a real group under a key. All members call it.
        close_behind: Destroys a real group.
        ended: Called when user code has destroyed the default group, and with it all others.
    """

    def __init__(
        self,
        rank: int,
        journal: Journal,
        timeout: timedelta,
        open_behind: Callable[[str, NewGroup], dist.ProcessGroup],
        close_behind: Callable[[dist.ProcessGroup], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._journal, self._timeout = rank, journal, timeout
        self._open_behind, self._close_behind, self._ended = open_behind, close_behind, ended
        self._handles: dict[str, Handle] = {}
        self._unclaimed: dict[str, Handle] = {}  # of groups that this rank's own script has not asked for yet
        self._gone: list[str] = []
        self._numbers: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        self._hooks = ""
        self._connected = False
        self.default: Handle | None = None

    def answer(self, wanted: NewGroup) -> dist.ProcessGroup:
        """Return a handle for a group that user code, or torch itself, asks for."""
        if wanted.is_default:
            self.default = Handle(DEFAULT, wanted, self._journal, self._destroyed)
            return self.default
        place = wanted.ranks, wanted.backend, self._hooks or self._journal.place
        waiting = [key for key in self._unclaimed if Name.of(key).counted_with == place]
        if waiting:
            key = min(waiting, key=lambda key: Name.of(key).number)
            self._handles[key] = self._unclaimed.pop(key)
            return self._handles[key]
        name = Name(*place, self._numbers[place])
        handle = Handle(name.key, wanted, self._journal, self._destroyed)
        if self._connected:
            handle.stand_before(self._open_behind(name.key, wanted))
        self._numbers[place] += 1
        self._handles[name.key] = handle
        return handle

    def held(self) -> Held:
        """Return the keys of this rank's groups, and of those that its user code has destroyed."""
        return Held((*self._handles, *self._unclaimed), tuple(self._gone))

    def disconnect(self) -> None:
        """Remove the real groups from behind all handles."""
        self._connected = False
        for handle in self._all():
            handle.stand_before(None)

    def connect(self, generation: int, default: dist.ProcessGroup, everyone: Mapping[int, Held]) -> None:
        """Give every handle a real group again. All ranks call it, with the same ``everyone``.

        Args:
            generation: The generation of the groups.
            default: The real default group.
            everyone: The handles of each rank.
        """
        if self.default is not None:
            self.default.stand_before(default)
        for key in sorted({key for held in everyone.values() for key in held.alive}):
            name = Name.of(key)
            if self._rank in name.ranks:
                self._reopen(key, name, [everyone[rank] for rank in name.ranks if rank in everyone])
        for key in (key for held in everyone.values() for key in (*held.alive, *held.gone)):
            name = Name.of(key)
            self._numbers[name.counted_with] = max(self._numbers[name.counted_with], name.number + 1)
        self._connected, self._hooks = True, f"{_HOOKS} {generation}" if generation else ""

    def hooks_are_through(self) -> None:
        """Note that all recovery hooks have run: groups made from now on count as made while training."""
        self._hooks = ""

    def _reopen(self, key: str, name: Name, members: Sequence[Held]) -> None:
        own = self._handles.get(key) or self._unclaimed.get(key)
        lacking = any(key not in held.alive for held in members)
        if any(key in held.gone for held in members) or (name.origin.startswith(_HOOKS) and lacking):
            if own is not None:
                own.close(
                    "another member no longer has it, so a recovery could not open it again. Create a new one in"
                    " `RecoveryCallback.on_recovery_regroup`."
                )
            return
        if own is None:
            wanted = NewGroup(name.ranks, name.ranks.index(self._rank), name.backend, self._timeout)
            own = self._unclaimed[key] = Handle(key, wanted, self._journal, self._destroyed)
        own.stand_before(self._open_behind(key, own.wanted))

    def _destroyed(self, handle: Handle) -> None:
        behind = handle.behind
        handle.close("it has been destroyed.")
        if behind is not None:
            self._close_behind(behind)
        if self._handles.pop(handle.key, None) is not None:
            self._gone.append(handle.key)
        if handle is self.default:
            self.default = None
            self._ended()

    def _all(self) -> list[Handle]:
        found = [*self._handles.values(), *self._unclaimed.values()]
        return found if self.default is None else [self.default, *found]
