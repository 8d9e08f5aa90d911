"""The numbers of training batches that ranks have in an epoch, which must be the same unless ranks join."""

import json
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_replica._compat.lightning import length_of
from lightning_replica._compat.lightning_names import CombinedLoader, Strategy, pl, sized_len
from lightning_replica.core.exchange import all_gather_bytes
from lightning_replica.core.pending_work import Check
from lightning_replica.errors import ConfigurationError

UNSIZED = -1
"""Stands for the length of data that has none."""

_ADVICE = (
    "Let Lightning put in its DistributedSampler (`use_distributed_sampler=True`), limit all ranks to the same number"
    ' (`limit_train_batches`), or let ranks without inputs go on beside the others: `uneven_inputs="join"`.'
)


def check(lengths: Sequence[int]) -> None:
    """Check that all ranks have the same number of training batches in an epoch.

    Args:
        lengths: What `lengths_of` has returned.

    Raises:
        ConfigurationError: If they differ.
    """
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            f"Ranks have different numbers of training batches ({describe(lengths)}), but every step needs all ranks."
            f" {_ADVICE}"
        )


def is_last(trainer: pl.Trainer) -> bool:
    """Return whether the epoch of this rank ends with the batch under way."""
    loop: Any = trainer.fit_loop.epoch_loop
    return bool(loop._num_ready_batches_reached())


def ends(trainer: pl.Trainer, group: dist.ProcessGroup, stop_waiting: Check) -> str:
    """Return which ranks' epochs end with the batch under way, where a commit says that some do. Collective."""
    number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    own = json.dumps([is_last(trainer), number]).encode()
    found = [json.loads(each) for each in all_gather_bytes(own, group, stop_waiting)]
    ended = [rank for rank, (last, _) in enumerate(found) if last]
    return (
        f"The training data of {named(ended)} ended after {found[ended[0]][1]} batches of the epoch, but other ranks"
        f" have more, and every step needs all ranks. {_ADVICE}"
    )


def describe(lengths: Sequence[int]) -> str:
    """Return which ranks have which number of batches, for messages."""
    ranks: dict[int, list[int]] = {}
    for rank, length in enumerate(lengths):
        ranks.setdefault(length, []).append(rank)
    return "; ".join(
        f"{named(of_length)}: {'no length' if length == UNSIZED else length}"
        for length, of_length in sorted(ranks.items())
    )


def named(ranks: Sequence[int]) -> str:
    """Return the name of some ranks, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def lengths_of(trainer: pl.Trainer) -> list[int]:
    """Return the number of training batches of each rank in an epoch, or `UNSIZED`. Collective."""
    own = length_of(cast("CombinedLoader", trainer.fit_loop._combined_loader))
    return gather(trainer.strategy, UNSIZED if own is None else own)


def check_sized(loader: object, strategy: Strategy) -> None:
    """Check that data has a length on all ranks, or on none. Collective.

    Lightning asks only the ranks with a length for their sum, so they would wait for the others for ever.

    Raises:
        ConfigurationError: If it has a length on some ranks only.
    """
    sized = gather(strategy, sized_len(loader) is not None)
    if len(set(sized)) > 1:
        ranks = range(len(sized))
        raise ConfigurationError(
            f"Data has a length (`__len__`) on {named([rank for rank in ranks if sized[rank]])}, but not on"
            f" {named([rank for rank in ranks if not sized[rank]])}. On this rank it is a {type(loader).__name__}. Give"
            " the data a length on all ranks, or on none."
        )


def gather(strategy: Strategy, number: int) -> list[int]:
    """Return each rank's number. Collective, unless the strategy is told to ask no other rank."""
    found = strategy.all_gather(torch.tensor([number], device=strategy.root_device))
    return [int(each) for each in found.flatten()]
