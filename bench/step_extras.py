"""What surrounds a step, against the same written by hand: averaged weights, groups, clipping; and two networks.

``python bench/step_extras.py [--rounds N]``. One process, one thread; ``px.build``'s step and a plain PyTorch loop take
steps in turn over the same batches. The bar: at most 1.05 times the loop. The losses of both sides' sixth step are the
same to 1e-5: else they did not do the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phalanx as px
from compare import rounds_from_command_line

BAR, SAME, WARM_UP, STEPS = 1.05, 1e-5, 5, 40
BATCH, WIDTH, CLASSES = 128, 512, 10

Take = Callable[[dict[str, Tensor]], float]


class Net(nn.Module):
    """Four wide layers with norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(one for _ in range(4) for one in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Gan(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, phase: str) -> tuple[Tensor, ...]:
        fake = self.generator(x.flip(-1))
        return (self.critic(fake),) if phase == "generator" else (self.critic(x), self.critic(fake.detach()))


def rows() -> px.Table:
    x = torch.randn(8 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return px.Table(x=x, y=x[:, :CLASSES].argmax(1))


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=1e-3)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def critic_loss(output: tuple[Tensor, ...], batch: Any) -> px.Loss:
    return px.Loss((F.softplus(-output[0]) + F.softplus(output[1])).sum(), len(output[0]))


def generator_loss(output: tuple[Tensor, ...], batch: Any) -> px.Loss:
    return px.Loss(F.softplus(-output[0]).sum(), len(output[0]))


def with_average() -> px.Job:
    return px.Job(
        model=Net,
        data=rows,
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(px.no_decay(params, 0.01), lr=1e-3),
        clip=1.0,
        average=px.Average(decay=0.999),
        batch=BATCH,
        steps=100_000,
    )


def with_phases() -> px.Job:
    phases = [
        px.Phase(name="critic", parameters="critic.*", loss=critic_loss, optimizer=adam),
        px.Phase(name="generator", parameters="generator.*", loss=generator_loss, optimizer=adam),
    ]
    return px.Job(model=Gan, data=rows, phases=phases, batch=BATCH, steps=100_000)


def average_by_hand() -> Take:
    model = Net()
    optimizer, average = decayed(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def take(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value = loss.item()
        if not (torch.isfinite(norm) and value == value):
            raise ValueError("not finite")
        optimizer.step()
        average.update_parameters(model)
        return value

    return take


def phases_by_hand() -> Take:
    model = Gan()
    critic, generator = adam(model.critic.parameters()), adam(model.generator.parameters())

    def take(batch: dict[str, Tensor]) -> float:
        first = 0.0
        for phase, optimizer, loss in (("critic", critic, critic_loss), ("generator", generator, generator_loss)):
            model.critic.requires_grad_(phase == "critic")
            model.generator.requires_grad_(phase == "generator")
            optimizer.zero_grad()
            total, count = loss(model(batch["x"], phase), batch)
            mean = total / count
            mean.backward()
            value = mean.item()
            first = first or value
            if value != value:
                raise ValueError("not finite")
            optimizer.step()
        return first

    return take


def in_turn(job: px.Job, by_hand: Take) -> tuple[float, float, float, float]:
    """Median seconds of our step and of the loop's, the median of their ratios, and how far early losses differ."""
    step, loader = px.build(job, "single")
    batches = iter(loader)
    ours: list[float] = []
    theirs: list[float] = []
    found = other = apart = 0.0
    for at in range(WARM_UP + STEPS):
        batch = next(batches)
        plain = batch.parts[0][0].batch
        for side in (0, 1) if at % 2 else (1, 0):
            began = time.perf_counter()
            if side:
                other = by_hand(plain)
            else:
                found = step(batch).loss
            (theirs if side else ours).append(time.perf_counter() - began)
        if at == WARM_UP:
            apart = abs(found - other) / abs(other)
    ratios = [a / b for a, b in zip(ours[WARM_UP:], theirs[WARM_UP:], strict=True)]
    return statistics.median(ours[WARM_UP:]), statistics.median(theirs[WARM_UP:]), statistics.median(ratios), apart


CASES = {
    "EMA, parameter groups, clipping": (with_average, average_by_hand),
    "two networks, a phase each": (with_phases, phases_by_hand),
}


def main() -> int:
    rounds = rounds_from_command_line(5)
    torch.set_num_threads(1)
    met = True
    for name, (job, by_hand) in CASES.items():
        found = [in_turn(job(), by_hand()) for _ in range(rounds)]
        ours, theirs, ratio, apart = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = [one[2] for one in found]
        fine = ratio <= BAR and apart <= SAME
        met &= fine
        print(
            f"{name}: {ours * 1e3:.2f} ms, by hand {theirs * 1e3:.2f} ms: {ratio:.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}), losses {apart:.1e} apart; "
            f"bar {BAR}: {'met' if fine else 'missed'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
