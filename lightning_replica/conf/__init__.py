"""Hydra groups, for ``hydra.searchpath: [pkg://lightning_replica.conf]``.

| group | option | what |
|---|---|---|
| strategy | replica_zero | the strategy with all its arguments, checked when the configuration is composed |
| strategy | replica_zero_megatron | the same of ``MegatronReplicaStrategy`` |
| trainer | default | a Trainer that uses ``strategy``; your own ``trainer/default.yaml`` has precedence |
| trainer | replica_zero | ``trainer/default`` with ``strategy/replica_zero`` |

Importing this package stores the schemas that the groups are checked against. Hydra imports it when it reads the
search path. May import everything but the command line.
"""

from typing import Any

from lightning_replica._compat.lightning_names import pl
from lightning_replica.conf.schema import MegatronStrategyConf, StrategyConf, register

__all__ = ["MegatronStrategyConf", "StrategyConf", "make_trainer", "register"]


def make_trainer(**options: Any) -> pl.Trainer:
    """Return a Trainer of the package of Lightning that this process uses: ``lightning`` or ``pytorch_lightning``."""
    return pl.Trainer(**options)


register()
