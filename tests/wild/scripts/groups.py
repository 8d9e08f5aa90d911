"""Groups and collectives of the user's own, wherever Lightning lets one, and a thread that uses one of them."""

import os
import threading

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_replica  # noqa: F401


class Own(Callback):
    def setup(self, trainer, pl_module, stage):
        self.group = dist.new_group([0, 1])
        self.alone = [dist.new_group([rank]) for rank in range(2)]
        names = [None, None]
        dist.all_gather_object(names, f"rank {trainer.global_rank}")
        assert names == ["rank 0", "rank 1"]

    def on_fit_start(self, trainer, pl_module):
        self.late = dist.new_group(backend="gloo")
        ready = torch.ones(1)
        dist.all_reduce(ready, group=self.late)
        assert ready.item() == 2
        dist.barrier(group=self.group)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        losses = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(losses, outputs["loss"].detach().clone(), group=self.group)
        self.log("worst", max(losses), rank_zero_only=True, sync_dist=False)  # type: ignore[attr-defined]

    def on_train_epoch_end(self, trainer, pl_module):
        """A thread of its own talks to the other rank."""
        total = torch.tensor([float(trainer.global_rank + 1)])
        thread = threading.Thread(target=dist.all_reduce, args=(total,), kwargs={"group": self.late})
        thread.start()
        thread.join()
        assert total.item() == 3, total
        dist.all_reduce(torch.ones(1), group=self.alone[trainer.global_rank])


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        mean = self.all_gather(loss.detach()).mean()  # type: ignore[union-attr]
        self.log("mean", mean, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        loss = self.step(batch)
        dist.all_reduce(loss)
        self.log("sum", loss)


L.seed_everything(15)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    callbacks=[Own()],
    log_every_n_steps=2,
)
trainer.fit(Model())
