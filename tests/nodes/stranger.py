"""A process without the secret, which writes to a store: ``python stranger.py HOST PORT``.

It writes under keys that do not exist yet: those that do, with other numbers in them. And it writes over heartbeats.
"""

import itertools
import random
import re
import sys
import time
from datetime import timedelta

import torch.distributed as dist

BAD = [b"", b"x", b"0", b"\xff" * 40, b"[]", b"null", b'["death", [0], "x", "", ""]']
# Counters have no tags. A stranger who sets them back can keep a run from going on, but cannot mislead it.
COUNTERS = re.compile("/come|/left|/calls|/agree|counted|groups/")


def others(key: str, dice: random.Random) -> str:
    """The same key with other numbers."""
    return re.sub(r"(?<=/)\d+(?=/|$)", lambda found: str(int(found[0]) + dice.randrange(5)), key)


def main(host: str, port: int) -> None:
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    dice = random.Random(0)
    for number in itertools.count():
        keys = set(store.list_keys())
        for key in sorted(keys):
            new = others(key, dice)
            if not COUNTERS.search(new) and (new not in keys or "/beat/" in new):
                store.set(new, dice.choice(BAD))  # type: ignore[arg-type]
        for generation in range(1, 20):
            key = next((key for key in keys if key.endswith("/nodes/first")), "/nodes/first")
            key = key.replace("nodes/first", f"generation/{generation}")
            if key not in keys:
                store.set(key, dice.choice(BAD))  # type: ignore[arg-type]
        print("round", number, flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
