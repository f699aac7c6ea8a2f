"""The same with the Lightning Trainer. Usage: trainer_script.py WORKLOAD STEPS PROCESSES; it starts the processes.

Its logger, progress bar and checkpoints are off, which favours it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import pytorch_lightning as L
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from stopwatch import Stopwatch
from workloads import WORKLOADS, Workload, as_it_is, loss

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(L.LightningModule):
    """The workload's model, loss and optimizer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self.workload = workload.model(), workload

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, target = batch
        return loss(self.model(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.parameters())


class Watching(L.Callback):
    """Marks the steps' begins and ends."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_batch_start(self, *_: Any) -> None:
        self.watch.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.watch.done()


def main(name: str, steps: int, processes: int) -> None:
    L.seed_everything(0, verbose=False)
    workload, watch = WORKLOADS[name], Stopwatch()
    loader = DataLoader(workload.data(), batch_size=workload.batch // processes, shuffle=True, collate_fn=as_it_is)
    ddp = DDPStrategy(gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=ddp if processes > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watching(watch)],
    )
    trainer.fit(Module(workload), loader)
    if trainer.is_global_zero:
        watch.report()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
