"""Parameters that no optimizer trains but user code writes to, such as a teacher or a momentum encoder.

No shard holds them, so a rank that goes back to a snapshot has to restore them itself. Most never change (a frozen
backbone, a model to which adapters are added), and they may be large; `contents` says what is compared and copied. If a
parameter that has no copy turns out to have changed since the snapshot, the run ends with an error, because it would
not be exact.

A replacement gets their values from a peer. Ranks may have written different ones, as codebooks of their own. So peers
keep small values that a rank has written, and of large ones the digest, which shows whether the peer has the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of
from lightning_replica.core import plain
from lightning_replica.core.digests import ordered_digests
from lightning_replica.core.inexact import Report
from lightning_replica.errors import RecoveryError
from lightning_replica.state.objects.contents import Contents, Copy, Held, is_content, plain_of

FrozenValues: TypeAlias = list[tuple[Held, Copy]]
"""Parameters, each with what it held; None for those that are large and have not been seen to change."""

_SENT_BYTES: Final = 2**22  # of values that have been written, which peers keep


class _Sent(NamedTuple):
    """What peers keep of a parameter.

    Attributes:
        copy: What the parameter held.
        is_whole: Whether its content is sent, or a digest.
        data: What is sent.
    """

    copy: Copy
    is_whole: bool
    data: bytes


class FrozenCopies:
    """Copies of parameters that no shard holds, kept from one snapshot to the next.

    Args:
        trained: Returns the parameters that shards hold.
        report: Called with a write that is found late.
    """

    def __init__(self, trained: Callable[[], Sequence[nn.Parameter]], report: Report) -> None:
        self._trained = trained
        self._report = report
        self._contents = Contents(report)
        self._taken: dict[str, Copy] = {}
        self._first: dict[str, Any] = {}  # a parameter that stands where another one stood counts as written
        self._written = set[str]()
        self._sent: dict[str, _Sent] = {}

    def take(self, parameters: dict[str, nn.Parameter], window: bool, whole: bool = False) -> FrozenValues:
        """Return copies of the parameters that change.

        Args:
            parameters: All parameters of the module, by name.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        trained = {id(parameter) for parameter in self._trained()} if parameters else set()
        found = {name: each for name, each in parameters.items() if id(each) not in trained and is_content(each)}
        values = [self._contents.add(each, f"module.{name}") for name, each in found.items()]
        self._contents.keep(map(id, found.values()))
        self._contents.refresh(window, whole)
        self._written |= {
            name
            for name, held in zip(found, values, strict=True)
            if held.changes or self._first.setdefault(name, held.value) is not held.value
        }
        self._taken = {name: held.copy for name, held in zip(found, values, strict=True)}
        return [(each, each.copy) for each in values]

    def packed(self) -> plain.Pieces:
        """Return what peers keep of the values that were taken last; empty if none has been written."""
        written = {name: copy for name, copy in self._taken.items() if name in self._written and copy is not None}
        if not written:
            return plain.Pieces()
        former, self._sent = self._sent, {}
        room, large = _SENT_BYTES, dict[str, Copy]()
        for name, copy in sorted(written.items(), key=lambda each: each[1].nbytes):
            room -= copy.nbytes
            known = former.get(name)
            if known is not None and known.copy is copy and known.is_whole == (room >= 0):
                self._sent[name] = known
            elif room >= 0:
                self._sent[name] = _Sent(copy, True, plain.pack(copy))
            else:
                large[name] = copy
        for name, digest in zip(large, ordered_digests([*large.values()]), strict=True):
            self._sent[name] = _Sent(large[name], False, plain.pack(digest))
        return plain.pack_lists_in_pieces({name: sent.data for name, sent in self._sent.items()})

    def export(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Return what a replacement needs of a peer: all values, by name, and the names of those that it has written.

        Args:
            parameters: All parameters of the module, by name.
        """
        trained = {id(parameter) for parameter in self._trained()}
        frozen = {name: local_of(each).detach() for name, each in parameters.items() if id(each) not in trained}
        return {"values": frozen, "written": sorted(self._written)}

    def adopt(self, parameters: Mapping[str, nn.Parameter], of_peer: Mapping[str, Any], own: bytes) -> None:
        """Write into a replacement's parameters what its predecessor held; where that is unknown, what a peer holds.

        Args:
            parameters: All parameters of the module, by name.
            of_peer: What `export` has returned on a peer.
            own: What `packed` has returned on the predecessor.
        """
        kept: dict[str, Any] = {name: plain.unpack(each) for name, each in plain.unpack(own).items()} if own else {}
        for name, theirs in of_peer["values"].items():
            value = kept.get(name)
            if isinstance(value, str) and value != ordered_digests([plain_of(theirs)])[0]:
                self._report(f"module.{name}", "ranks hold different values, and this large one was lost", "once")
            elif value is None and name in of_peer["written"]:
                self._report(f"module.{name}", "only other ranks have written to it: this one has theirs now", "once")
            self._put(parameters[name], name, value if isinstance(value, Tensor) else theirs)
        self._written = {*kept, *of_peer["written"]}

    def _put(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        if is_content(parameter):
            Held(parameter, f"module.{name}").put_back(value.to(parameter.device))
        else:  # its class knows what it holds
            with torch.no_grad():
                local_of(parameter).copy_(value)

    def renew(self) -> None:
        """Copy all values again the next time."""
        self._contents, self._first, self._sent = Contents(self._report), {}, {}

    def put_back(self, values: FrozenValues) -> None:
        """Restore the values that `take` has copied.

        Raises:
            RecoveryError: If a parameter that was not copied has changed since.
        """
        lost = [held for held, copy in values if copy is None and held.look()]
        if lost:
            raise RecoveryError(
                f"{lost[0].name}, one of {len(lost)} parameters of which that is so, is trained by no optimizer. It has"
                " been written to for the first time since the step began, and its former content is lost. Write to it"
                " from the first step on, or keep it in a buffer."
            )
        for held, copy in values:
            if copy is not None:
                held.put_back(copy)
