"""What a rank is told by the supervisor that started it.

| variable | meaning |
|---|---|
| LIGHTNING_REPLICA_STORE | ``host:port`` of the supervisor's store |
| LIGHTNING_REPLICA_SUPERVISOR | process id of the supervisor |
| LIGHTNING_REPLICA_GENERATION | generation that the process is born into; above 0 it is a replacement |
| LIGHTNING_REPLICA_BEACONS | where the memory is found that it writes its progress to (beacons.py) |

LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as Lightning's own launcher sets them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_STORE = "LIGHTNING_REPLICA_STORE"
_SUPERVISOR = "LIGHTNING_REPLICA_SUPERVISOR"
_GENERATION = "LIGHTNING_REPLICA_GENERATION"


@dataclass(frozen=True)
class RankEnvironment:
    """What a supervised rank knows of its world.

    Attributes:
        host: Where the store listens.
        port: Its port.
        supervisor: Process id of the supervisor.
        generation: Generation that the process is born into.
    """

    host: str
    port: int
    supervisor: int
    generation: int

    @classmethod
    def current(cls) -> "RankEnvironment | None":
        """This process's; None where no supervisor started it."""
        if _STORE not in os.environ:
            return None
        host, port = os.environ[_STORE].rsplit(":", 1)
        return cls(host, int(port), int(os.environ[_SUPERVISOR]), int(os.environ[_GENERATION]))

    def variables(self, rank: int, world_size: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of the process of ``rank``."""
        return {
            **inherited,
            _STORE: f"{self.host}:{self.port}",
            _SUPERVISOR: str(self.supervisor),
            _GENERATION: str(self.generation),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }
