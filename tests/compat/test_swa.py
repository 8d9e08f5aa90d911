"""The state of the scheduler for averaged weights is plain data with each torch."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR

from lightning_replica._compat.swa import leave_functions_out_of_states
from lightning_replica.core import plain


def test_its_state_can_be_sent() -> None:
    leave_functions_out_of_states()
    schedulers = [SWALR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), swa_lr=0.5) for _ in range(2)]
    for _ in range(3):
        schedulers[0].optimizer.step()
        schedulers[0].step()
    schedulers[1].load_state_dict(plain.unpack(plain.pack(schedulers[0].state_dict())))
    assert schedulers[1].last_epoch == 3
    assert schedulers[1].anneal_func(0.5) == schedulers[0].anneal_func(0.5)
