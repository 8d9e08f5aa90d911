"""A script that trains under Fabric in processes that run a function."""

import atexit
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_replica import FabricStrategy


def train(fabric: Fabric, greeting: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    return greeting, fabric.world_size, optimizer.peers


# Registered first, called last.
atexit.register(lambda: print("groups are open" if dist.is_initialized() else "groups are closed", flush=True))

if __name__ == "__main__":
    start_method: Any = sys.argv[1]
    strategy = FabricStrategy(start_method=start_method)
    function: Any = train  # Lightning's annotation leaves out its arguments
    print(Fabric(strategy=strategy, accelerator="cpu", devices=2).launch(function, "hello"))
