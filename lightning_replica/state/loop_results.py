"""The result of a training loop, for a replacement that joins a later loop of the same script.

A script may train several times: two fits, or a search for a learning rate and a fit. A replacement of a rank that is
lost in a later loop runs the script from the top, and makes no step of the earlier loops. It takes their results: the
weights, and all that a snapshot holds (loops, callbacks, metrics, random numbers). The state of the optimizers is not
kept, because the next fit has optimizers of its own.

When a loop ends, every rank keeps its share of the weights in the host's memory: of N ranks that have the same part of
the model, each keeps the N-th part of each parameter. The ranks write these shares to files, which a replacement can
read, only when another loop begins. So a script with one fit writes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of
from lightning_replica.control.blobs import Blobs
from lightning_replica.errors import RecoveryError
from lightning_replica.state.structure import Original, Outline, follow


@dataclass(frozen=True)
class LoopResult:
    """One rank's part of the result of a loop.

    Attributes:
        replicated: The part of the snapshot that is the same on all ranks.
        private: The part that belongs to this rank.
        outline: What the model consists of; see `structure.Outline`.
        shares: By name, this rank's part of the flat values of every parameter, in the host's memory.
        buffers: By name, the forms of all buffers, on the device "meta".
        problem: Why the two parts and ``outline`` are missing; empty if they are not.
    """

    replicated: bytes | None  # not empty: pickle writes empty bytes as a call, which is not read
    private: bytes | None
    outline: dict[str, Any]
    shares: dict[str, Tensor]
    buffers: dict[str, Tensor]
    problem: str = ""


class LoopResults:
    """Keeps the results of training loops, and reads those of earlier processes.

    Args:
        blobs: Where every process that may replace a rank finds them; None if no rank can be replaced.
        rank: This rank.
        same_part: The ranks that have the same part of the model, itself included.
    """

    def __init__(self, blobs: Blobs | None, rank: int, same_part: Sequence[int]) -> None:
        self._blobs, self._rank, self._same_part, self._place = blobs, rank, tuple(same_part), same_part.index(rank)
        self._kept: tuple[int, LoopResult] | None = None

    def keep(self, loop: int, module: nn.Module, take: Callable[[], tuple[Outline, bytes, bytes]]) -> None:
        """Keep the result of loop number ``loop``.

        Args:
            loop: The number of the loop.
            module: The module that the loop has trained.
            take: Returns the outline of the module, and the replicated and the private part of a snapshot.
        """
        if self._blobs is None:
            return
        outline, problem = dict[str, Any](), ""
        replicated: bytes | None = None
        private: bytes | None = None
        try:
            taken, replicated, private = take()
            outline = asdict(taken)
        except RecoveryError as error:
            problem = str(error)
        shares = {name: self._share(parameter).cpu().clone() for name, parameter in module.named_parameters()}
        buffers = {name: torch.empty_like(local_of(each), device="meta") for name, each in module.named_buffers()}
        self._kept = loop, LoopResult(replicated, private, outline, shares, buffers, problem)

    def _share(self, parameter: Tensor) -> Tensor:
        flat = local_of(parameter).detach().reshape(-1)
        ranks = len(self._same_part)
        return flat[_start(flat, self._place, ranks) : _start(flat, self._place + 1, ranks)]

    def write(self) -> str:
        """Write the result that is kept, because another loop is about to begin.

        Every rank does this before any rank can be replaced.

        Returns:
            Why no replacement could take the result; empty if one can.
        """
        if self._kept is None or self._blobs is None:
            return ""
        (loop, result), self._kept = self._kept, None
        try:
            self._blobs.write(_name(loop, self._rank), lambda file: torch.save(vars(result), file), self._rank)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch raises an error of its own
            if not isinstance(cause, OSError):
                raise
            return f"Its result could not be written: {cause}. Set TMPDIR to a directory that has room."
        return result.problem

    def read(self, loop: int, module: nn.Module) -> tuple[bytes, bytes]:
        """Give ``module`` the weights at the end of loop number ``loop``.

        Returns:
            The replicated part of the snapshot, and this rank's private part.

        Raises:
            RecoveryError: If there is no such result, or if it does not fit ``module``.
        """
        results = [self._read(loop, rank) for rank in self._same_part]
        follow(module, Outline(**results[0].outline), results[0].buffers, Original(module))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                shares = [result.shares[name] for result in results if name in result.shares]
                if len(shares) != len(results) or sum(map(Tensor.numel, shares)) != local_of(parameter).numel():
                    raise RecoveryError(
                        f"Parameter {name!r} of training loop {loop} has a different shape here than in the process"
                        " that this one replaces. The script must build the same model on every start."
                    )
                values = local_of(parameter)
                values.copy_(torch.cat(shares).view(values.shape))
        replicated, private = results[0].replicated, results[self._place].private
        if replicated is None or private is None:
            raise RecoveryError(f"The result of training loop {loop} of this script is not complete.")
        return replicated, private

    def _read(self, loop: int, rank: int) -> LoopResult:
        try:
            if self._blobs is None:
                raise RecoveryError("no results are kept")
            with self._blobs.open(_name(loop, rank)) as file:
                saved: dict[str, Any] = torch.load(file, weights_only=True)
        except RecoveryError as error:
            raise RecoveryError(
                f"The result of training loop {loop} of this script cannot be read: {error}."
            ) from error
        result = LoopResult(**saved)
        if result.problem:
            raise RecoveryError(result.problem)
        return result


def _name(loop: int, rank: int) -> str:
    return f"loop-{loop}-rank-{rank}.pt"


def _start(flat: Tensor, place: int, ranks: int) -> int:
    return flat.numel() * place // ranks
