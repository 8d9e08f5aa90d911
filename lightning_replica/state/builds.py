"""Finds out whether a replacement is built as its predecessor was.

Nobody can ask the predecessor. Its peers are built like it, but for what a script makes on some ranks only
(``if trainer.is_global_zero: self.rows = []``). So the peers tell each other their signatures when a fit begins. Each
rank leaves to its replacement what it has otherwise than they have.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from lightning_replica.state.objects.signature import Signature, differences

Own: TypeAlias = dict[str, str]
"""A rank's digests, by name, of what its peers have otherwise; "" for what this rank lacks."""


def own_of(signature: Signature, of_peers: Iterable[Signature]) -> Own:
    """Return what a rank with ``signature`` has otherwise than any of its peers."""
    names = dict.fromkeys(name for other in of_peers for name in differences(signature, other))
    return {name: signature.get(name, "") for name in names}


def expected(of_peer: Signature, peers_own: Mapping[str, str], own: Mapping[str, str]) -> Signature:
    """Return the signature that a rank has if it is built as when the fit began.

    Args:
        of_peer: The signature of a peer now.
        peers_own: What that peer has otherwise than its peers.
        own: What the rank has otherwise than its peers.
    """
    as_begun = {name: digest for name, digest in own.items() if of_peer.get(name, "") == peers_own.get(name, "")}
    return {name: digest for name, digest in {**of_peer, **as_begun}.items() if digest}
