"""Finds out whether a replacement is built as its predecessor was.

Nobody can ask the predecessor. Its peers are built like it, but for what a script makes on some ranks only
(``if trainer.is_global_zero: self.rows = []``). So the peers tell each other their signatures when a fit begins, and
each rank leaves the differences to its replacement.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from lightning_replica.state.objects.signature import Signature, differences

Differing: TypeAlias = dict[str, str]
"""The digests of one rank, by name, where peers had different ones when the fit began; "" for what the rank lacks."""


def differing(signature: Signature, of_peers: Iterable[Signature]) -> Differing:
    """Return the digests of a rank with ``signature`` that differ from those of any of its peers."""
    names = dict.fromkeys(name for other in of_peers for name in differences(signature, other))
    return {name: signature.get(name, "") for name in names}


def expected(of_peer: Signature, differing_there: Mapping[str, str], differing_here: Mapping[str, str]) -> Signature:
    """Return the signature that a replacement has if it is built as its predecessor was.

    Args:
        of_peer: The signature of a peer now.
        differing_there: What `differing` has returned on that peer.
        differing_here: What it has returned on the predecessor.
    """
    as_begun = {
        name: digest
        for name, digest in differing_here.items()
        if of_peer.get(name, "") == differing_there.get(name, "")
    }
    return {name: digest for name, digest in {**of_peer, **as_begun}.items() if digest}
