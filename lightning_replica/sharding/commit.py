"""What ranks agree on in a step, and how far a rank has come in the step."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepPhase(enum.Enum):
    """How far this rank is in step t -> t+1. Each phase leads to the next; recovery leads back to IDLE."""

    IDLE = enum.auto()  # nothing durable has changed
    ENTERED = enum.auto()  # the shard's gradient is complete, the commit has begun
    COMMITTED = enum.auto()  # the commit vector is known: the step can no longer be undone
    UPDATING = enum.auto()  # the shard is changing: after a fault it is not intact


@dataclass(frozen=True)
class Commit:
    """What the world agreed on in the commit of one step.

    Attributes:
        grad_norm_sq: Squared 2-norm of the averaged gradient of all parameters, each element counted once. The
            gradient is still multiplied by the loss scale.
        non_finite: Number of ranks whose gradient holds an infinity or a NaN. Counted only under a loss scaler.
        stop: Number of ranks that were asked to stop (SIGTERM).
        save: Number of ranks that were asked to save (SIGUSR2).
        last: Number of ranks whose epoch ends with this step.
        used: Which parameters have a gradient on any rank, as the sum of what `usage.pack` returns on each rank.
        zeros: Number of elements of the averaged gradient that are zero; None if they are not counted.
    """

    grad_norm_sq: float
    non_finite: float = 0.0
    stop: float = 0.0
    save: float = 0.0
    last: float = 0.0
    used: tuple[float, ...] = ()
    zeros: float | None = None

    @property
    def vector(self) -> tuple[float, ...]:
        """The plain numbers, as they are sent."""
        counted = () if self.zeros is None else (self.zeros,)
        return (self.grad_norm_sq, self.non_finite, self.stop, self.save, self.last, *self.used, *counted)

    @classmethod
    def of(cls, vector: Sequence[float], counts_zeros: bool = False) -> "Commit":
        """Return the commit whose `vector` has these numbers.

        Args:
            vector: The numbers.
            counts_zeros: Whether they include the number of zeros.
        """
        *rest, last = vector
        numbers, zeros = (rest, last) if counts_zeros else (vector, None)
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], tuple(numbers[5:]), zeros)


class Flags(NamedTuple):
    """What one rank says in the commit.

    Attributes:
        stop: Whether it was asked to stop.
        save: Whether it was asked to save.
        last: Whether its epoch ends with this step.
    """

    stop: bool = False
    save: bool = False
    last: bool = False


@dataclass(frozen=True)
class Request:
    """How the gradient is scaled and clipped before the update.

    Attributes:
        scale: Loss scale to divide by; None if the loss is not scaled.
        clip_norm: Largest global 2-norm; None is no limit.
        clip_value: Largest absolute value of an element; None is no limit.
    """

    scale: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None

    def prepare(self, gradients: Sequence[Tensor], grad_norm_sq: float) -> None:
        """Scale and clip in place, as ``GradScaler.unscale_`` and ``torch.nn.utils.clip_grad_norm_`` do.

        Args:
            gradients: The gradients that the update uses.
            grad_norm_sq: See `Commit`.
        """
        inverse = 1.0 / (self.scale or 1.0)
        coefficient = 1.0
        if self.clip_norm is not None:
            coefficient = clip_coefficient(self.clip_norm, math.sqrt(grad_norm_sq) * inverse)
        for gradient in gradients:
            if inverse != 1.0:
                gradient.mul_(inverse)
            if self.clip_value is not None:
                gradient.clamp_(-self.clip_value, self.clip_value)
            if coefficient != 1.0:
                gradient.mul_(coefficient)


def clip_coefficient(limit: float, norm: float) -> float:
    """Return the factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies a gradient of 2-norm ``norm``.

    A norm that is NaN makes all of the gradient NaN, as there.
    """
    coefficient = limit / (norm + 1e-6)
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0


def part_of_commit(
    own: Sequence[Tensor],
    request: Request,
    used: tuple[float, ...],
    flags: Flags = Flags(),  # noqa: B008
    numel: int | None = None,
) -> Commit:
    """Return what one rank contributes to the commit.

    Args:
        own: The rank's own pieces of the averaged gradient.
        request: How the gradient is scaled and clipped before the update.
        used: See `Commit`.
        flags: What the rank says.
        numel: Number of elements in ``own`` that are a parameter's, and not a gap between two; None if zeros are not
            counted. Gaps hold zeros.
    """
    norm_sq = sum((float(torch.linalg.vector_norm(part)) ** 2 for part in own if part.numel()), 0.0)
    non_finite = request.scale is not None and not all(bool(torch.isfinite(part).all()) for part in own)
    zeros = None if numel is None else float(numel - sum(int(part.count_nonzero()) for part in own))
    return Commit(0.0 if non_finite else norm_sq, non_finite, *flags, used, zeros)
