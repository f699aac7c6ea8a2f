"""A contrastive step whose loss is over the whole batch, against the same gathered by hand, in the same processes.

``python bench/coupled_loss.py [--rounds N]``. Two towers, symmetric InfoNCE over the global batch. Under ``dp=4`` the
peers are DistributedDataParallel with ``torch.distributed.nn.all_gather`` and with a gather of one's own that sends
nothing in backward; under ``fsdp=2 micro=4`` it is ``fully_shard`` with cached outputs and a second forward (GradCache;
Gao et al. 2021). Sides take steps in turn, all ranks beginning together. The bar: at most 1.1 times what a peer takes;
and the first steps of all sides have the loss of one device, to 1e-5.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from compare import rounds_from_command_line
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.launch.local import launch
from phalanx.train.assembly import build

BAR, SAME, WARM_UP, STEPS = 1.1, 1e-5, 3, 40
BATCH, INPUT, WIDTH, SHARED = 256, 256, 512, 128

Step = Callable[[list[dict[str, Tensor]]], float]
"""From the micro-batches of this rank to the loss of the global batch."""


class Towers(nn.Module):
    """Two towers and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (INPUT, WIDTH, WIDTH, WIDTH, SHARED)
        self.image, self.text = (nn.Sequential(*map(_block, sizes[:-1], sizes[1:])) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_uniform_(parameter, generator=generator)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


def _block(inputs: int, outputs: int) -> nn.Module:
    block = nn.Sequential(nn.Linear(inputs, outputs), nn.GELU())
    nn.init.zeros_(block[0].bias)
    return block


def contrastive(output: tuple[Tensor, Tensor, Tensor], batch: Any = None) -> Tensor:
    image, text, scale = output
    logits = scale * image @ text.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def data() -> px.Table:
    generator = torch.Generator().manual_seed(1)
    return px.Table(**{name: torch.randn(4 * BATCH, INPUT, generator=generator) for name in ("image", "text")})


def job() -> px.Job:
    return px.Job(
        model=Towers, data=data, loss=contrastive, loss_over="batch", optimizer=sgd, batch=BATCH, steps=10_000
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class OwnRows(torch.autograd.Function):
    """All ranks' rows; in backward this rank's own, and nothing is sent: every rank has the loss of all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.first, ctx.size = dist.get_rank() * len(rows), len(rows)
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(every, rows)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[ctx.first : ctx.first + ctx.size] * dist.get_world_size()


def with_ddp(gather: Callable[[Tensor], Tensor]) -> Step:
    model = DistributedDataParallel(Towers(), gradient_as_bucket_view=True)
    optimizer = sgd(model.parameters())

    def step(micros: list[dict[str, Tensor]]) -> float:
        optimizer.zero_grad()
        image, text, scale = model(**micros[0])
        loss = contrastive((gather(image), gather(text), scale))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def gathered_by_torch(rows: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return torch.cat(torch.distributed.nn.functional.all_gather(rows))


def with_fully_shard() -> Step:
    model = Towers()
    for tower in (model.image, model.text):
        for block in tower:
            fully_shard(block)
    fully_shard(model)
    optimizer = sgd(model.parameters())

    def step(micros: list[dict[str, Tensor]]) -> float:
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = [model(**micro) for micro in micros]
        images, texts = (torch.cat([one[at] for one in outputs]).requires_grad_() for at in (0, 1))
        scale = outputs[0][2].requires_grad_()
        loss = contrastive((OwnRows.apply(images), OwnRows.apply(texts), scale))
        loss.backward()
        size = len(micros[0]["image"])
        for micro, image, text in zip(micros, images.grad.split(size), texts.grad.split(size), strict=True):
            torch.autograd.backward(model(**micro), (image, text, scale.grad / len(micros)))
        optimizer.step()
        return loss.item()

    return step


def with_phalanx(plan: str, place: Place) -> tuple[Any, Callable[[Any], float]]:
    assembly = build(job(), Plan.parse(plan), place, torch.device("cpu"))
    return iter(assembly.loader), lambda batch: assembly.step(batch).loss


SIDES: dict[str, dict[str, Callable[[], Step]]] = {
    "dp=4": {
        "DDP, torch.distributed.nn.all_gather": lambda: with_ddp(gathered_by_torch),
        "DDP, a gather of one's own": lambda: with_ddp(OwnRows.apply),
    },
    "fsdp=2 micro=32": {"fully_shard, outputs cached by hand": with_fully_shard},
}


def in_turn(plan: str) -> Callable[[Place, Any], list[list[float]]]:
    """A worker's work: of each side the losses of its first steps, and the seconds of its later ones."""

    def work(place: Place, report: Any) -> list[list[float]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            batches, own = with_phalanx(plan, place)
            peers = [make() for make in SIDES[plan].values()]
            losses: list[list[float]] = [[] for _ in (own, *peers)]
            seconds: list[list[float]] = [[] for _ in (own, *peers)]
            for at in range(WARM_UP + STEPS):
                batch = next(batches)
                micros = [micro.batch for micro in batch.parts[0]]
                for turn in range(len(losses)):
                    side = (turn + at) % len(losses)
                    dist.barrier()
                    began = time.perf_counter()
                    loss = peers[side - 1](micros) if side else own(batch)
                    seconds[side].append(time.perf_counter() - began)
                    losses[side].append(loss)
            return [*(one[:WARM_UP] for one in losses), *(one[WARM_UP:] for one in seconds)]

    return work


def on_one_device() -> list[float]:
    """The losses of the first steps of a plain loop."""
    return launch(in_turn_alone, 1)[0]


def in_turn_alone(place: Place, report: Any) -> list[float]:
    model = Towers()
    optimizer, losses = sgd(model.parameters()), []
    batches, _ = with_phalanx("single", place)
    for _ in range(WARM_UP):
        batch = next(batches).parts[0][0].batch
        optimizer.zero_grad()
        loss = contrastive(model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    rounds, met, expected = rounds_from_command_line(5), True, on_one_device()
    for plan, peers in SIDES.items():
        found = [launch(in_turn(plan), Plan.parse(plan).world_size)[0] for _ in range(rounds)]
        sides = len(peers) + 1
        for losses in (row for one in found for row in one[:sides]):
            off = max(abs(given / loss - 1) for given, loss in zip(losses, expected, strict=True))
            met = met and off <= SAME
            if off > SAME:
                print(f"{plan}: a loss is off by {off:.1e}")
        medians = [[statistics.median(row) for row in one[sides:]] for one in found]
        own = statistics.median(row[0] for row in medians)
        print(f"{plan:18} {own * 1e3:8.1f} ms  phalanx")
        for at, name in enumerate(peers, 1):
            ratios = [row[0] / row[at] for row in medians]
            times = statistics.median(ratios)
            met = met and times <= BAR
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            verdict = "met" if times <= BAR else "MISSED"
            taken = statistics.median(row[at] for row in medians)
            print(f"{'':18} {taken * 1e3:8.1f} ms  {name}: {times:.3f} times ({spread}), bar {BAR}: {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
