"""Which parameters have a gradient, counted over ranks inside the commit vector. Pure functions.

A parameter without a gradient on any rank is left out of the update, as under DDP. A parameter with a gradient on some
rank is updated on all. Counts of up to N ranks are packed into the 53 bits that a float64 adds up exactly.
"""

from collections.abc import Sequence

_EXACT_BITS = 53


def pack(present: Sequence[bool], world_size: int) -> list[float]:
    """Pack one rank's flags so that the packed numbers of all ranks can be added up.

    Args:
        present: For every parameter, whether this rank has a gradient for it.
        world_size: Number of ranks, N; a count takes ``N.bit_length()`` bits.
    """
    bits = world_size.bit_length()
    per_number = _EXACT_BITS // bits
    return [
        float(sum(1 << (bits * place) for place, flag in enumerate(present[start : start + per_number]) if flag))
        for start in range(0, len(present), per_number)
    ]


def unpack(total: Sequence[float], number: int, world_size: int) -> list[bool]:
    """Return whether any rank has a gradient, for each of ``number`` parameters; ``total`` is the sum over ranks."""
    bits = world_size.bit_length()
    per_number = _EXACT_BITS // bits
    mask = (1 << bits) - 1
    return [(int(total[i // per_number]) >> (bits * (i % per_number))) & mask > 0 for i in range(number)]
