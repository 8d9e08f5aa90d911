"""Compares how many batches the ranks have. A rank that ran out early would meet the others' later steps."""

from collections.abc import Sequence

from lightning_replica.errors import ConfigurationError

UNSIZED = -1
"""Stands for the length of data that does not tell it."""


def check(batches: Sequence[int]) -> None:
    """Check that all ranks have the same number of training batches in an epoch.

    Args:
        batches: The number of each rank, or `UNSIZED`.

    Raises:
        ConfigurationError: If they differ.
    """
    if len(set(batches)) <= 1:
        return
    holders: dict[int, list[int]] = {}
    for rank, number in enumerate(batches):
        holders.setdefault(number, []).append(rank)
    said = "; ".join(f"{_named(ranks)} {_text(number)}" for number, ranks in sorted(holders.items()))
    shortest = min((number for number in batches if number != UNSIZED), default=0)
    raise ConfigurationError(
        f"Ranks have different numbers of training batches ({said}), but every step needs all ranks. Let Lightning put"
        f" in its DistributedSampler (`use_distributed_sampler=True`), or use `limit_train_batches={shortest}`."
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"


def _text(number: int) -> str:
    return "no length" if number == UNSIZED else f"{number}"
