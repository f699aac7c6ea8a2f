"""Several updates in a step: under every plan what a loop of plain PyTorch with several optimizers computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

import phalanx as px
from law_rows import longer

SAMPLES, BATCH, STEPS = 44, 16, 6  # the third batch of an epoch has 12


def rows(seed: int = 0) -> px.Table:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    return px.Table(x=drawn[0], z=drawn[1], y=torch.randint(4, (SAMPLES,), generator=generator))


def perceptron(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, 7), nn.Tanh(), nn.Linear(7, outside))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = perceptron(3, 5), perceptron(5, 1)

    def forward(self, x: Tensor, z: Tensor, phase: str) -> tuple[Tensor, ...]:
        fake = self.generator(z)
        if phase == "generator":
            return (self.critic(fake),)
        return self.critic(x), self.critic(fake.detach())


def critic_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> px.Loss:
    real, fake = output
    return px.Loss((softplus(-real) + softplus(fake)).sum(), len(real))


def generator_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    return softplus(-output[0]).mean()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(5, 4), perceptron(9, 1)

    def forward(self, x: Tensor, action: Tensor | None = None) -> Tensor:
        chosen = self.actor(x).softmax(-1) if action is None else nn.functional.one_hot(action, 4).to(x.dtype)
        return self.critic(torch.cat([x, chosen], -1)).squeeze(-1)


def value_loss(output: Tensor, batch: Mapping[str, Tensor]) -> px.Loss:
    return px.mse(output, batch["z"][:, 0])


def policy_loss(output: Tensor, batch: Mapping[str, Tensor]) -> px.Loss:
    return px.Loss(-output.sum(), len(output))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=5e-2, momentum=0.9)


def gan() -> dict[str, Any]:
    critic = px.Phase(name="critic", parameters="critic.*", loss=critic_loss, optimizer=adam)
    generator = px.Phase(name="generator", parameters="generator.*", loss=generator_loss, optimizer=momentum)
    return {"model": Gan, "phases": [critic, generator], "clip": 0.5}


def actor_critic() -> dict[str, Any]:
    both = [
        px.Phase(
            name="critic",
            parameters="critic.*",
            loss=value_loss,
            optimizer=momentum,
            inputs=lambda batch: {"x": batch["x"], "action": batch["y"]},
        ),
        px.Phase(
            name="actor",
            parameters="actor.*",
            loss=policy_loss,
            optimizer=adam,
            every=2,
            inputs=lambda batch: batch["x"],
            schedule=lambda step: 0.8**step,
        ),
    ]
    return {"model": ActorCritic, "phases": both, "schedule": px.Schedule(warmup_steps=3)}


def one_cycle(params: Any) -> Any:
    optimizer = adam(params)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=STEPS + 1)


def halving(params: Any) -> Any:
    optimizer = momentum(params)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def schedulers() -> dict[str, Any]:
    first, second = actor_critic()["phases"]
    both = [replace(first, optimizer=one_cycle), replace(second, optimizer=halving, schedule=None)]
    return {"model": ActorCritic, "phases": both}


def job(**how: Any) -> px.Job:
    return px.Job(data=rows, batch=BATCH, steps=STEPS, shuffle=False, **how)


Found = tuple[list[dict[str, float]], dict[str, Tensor]]
"""The losses of each step by phase, and the values of the model afterwards."""


def trained(given: px.Job, plan: str, folder: Path, **how: Any) -> Found:
    px.fit(given, run=px.RunSpec(job="phases", plan=px.Plan.parse(plan), folder=folder, forecast="none", **how))
    run = px.load(folder, given)
    losses = [event["losses"] for event in run.events("step")]
    assert run.losses == [each[given.phases[0].name] for each in losses]
    return losses, run.state_dict()


def start(model: Callable[[], nn.Module]) -> Any:
    from phalanx.train.build_model import build_model

    return build_model(px.Job(model=model, data=rows, loss=generator_loss, optimizer=adam, batch=1, steps=1))


def batches() -> list[dict[str, Tensor]]:
    table, found = rows(), list[dict[str, Tensor]]()
    whole = torch.utils.data.default_collate([table[index] for index in range(SAMPLES)])
    for step in range(STEPS):
        first = step % 3 * BATCH
        found.append({name: one[first : first + BATCH] for name, one in whole.items()})
    return found


def gan_by_hand() -> Found:
    net, losses = start(Gan), list[dict[str, float]]()
    critics, generators = adam(net.critic.parameters()), momentum(net.generator.parameters())
    for batch in batches():
        with torch.no_grad():
            fake = net.generator(batch["z"])
        scores = torch.cat([net.critic(batch["x"]), net.critic(fake)])
        real = torch.cat([torch.ones_like(scores[::2]), torch.zeros_like(scores[::2])])
        first = 2 * binary_cross_entropy_with_logits(scores, real)
        critics.zero_grad()
        first.backward()
        nn.utils.clip_grad_norm_(net.critic.parameters(), 0.5)
        critics.step()
        second = softplus(-net.critic(net.generator(batch["z"]))).mean()
        generators.zero_grad()
        second.backward()
        nn.utils.clip_grad_norm_(net.generator.parameters(), 0.5)
        generators.step()
        losses.append({"critic": first.item(), "generator": second.item()})
    return losses, net.state_dict()


def actor_critic_by_hand(scheduled: bool = False) -> Found:
    """With the rates that the phases' functions give, or with schedulers of torch."""
    net, losses = start(ActorCritic), list[dict[str, float]]()
    critics, actors = momentum(net.critic.parameters()), adam(net.actor.parameters())
    schedulers: list[Any] = []
    if scheduled:
        (critics, of_critic), (actors, of_actor) = one_cycle(net.critic.parameters()), halving(net.actor.parameters())
        schedulers = [of_critic, of_actor]
    for step, batch in enumerate(batches()):
        if not scheduled:
            critics.param_groups[0]["lr"] = 5e-2 * min(1.0, (step + 1) / 3)
            actors.param_groups[0]["lr"] = 2e-2 * 0.8**step
        value = nn.functional.mse_loss(net(batch["x"], batch["y"]), batch["z"][:, 0])
        critics.zero_grad()
        value.backward()
        critics.step()
        losses.append({"critic": value.item()})
        if step % 2 == 0:
            policy = -net(batch["x"]).mean()
            actors.zero_grad()
            policy.backward()
            actors.step()
            losses[-1]["actor"] = policy.item()
        for one in schedulers:
            one.step()
    return losses, net.state_dict()


def same(found: Found, expected: Found) -> None:
    assert found[0] == [pytest.approx(one, rel=2e-5) for one in expected[0]]
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        torch.testing.assert_close(found[1][name], values, rtol=2e-4, atol=2e-5)


CASES: Mapping[str, tuple[Callable[[], dict[str, Any]], Callable[[], Found]]] = {
    "gan": (gan, gan_by_hand),
    "actor-critic": (actor_critic, actor_critic_by_hand),
    "scheduled": (schedulers, lambda: actor_critic_by_hand(scheduled=True)),
}


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("gan", "fsdp=2 micro=3"),
        ("scheduled", "dp=2 micro=3"),
        *longer(("gan", "threads=2"), ("gan", "fsdp=2 zero=1"), ("actor-critic", "dp=2")),
    ],
)
def test_each_phase_is_that_of_a_loop_by_hand(case: str, plan: str, tmp_path: Path) -> None:
    how, by_hand = CASES[case]
    same(trained(job(**how()), plan, tmp_path / "run"), by_hand())


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [("scheduled", "dp=2", "single"), *longer(("gan", "fsdp=2 zero=2", "single"), ("scheduled", "dp=2", "fsdp=2"))],
)
def test_a_run_goes_on_under_another_plan(case: str, before: str, after: str, tmp_path: Path) -> None:
    how, by_hand = CASES[case]
    trained(job(**how()), before, tmp_path / "run", steps=3)
    same(trained(job(**how()), after, tmp_path / "run", resume=True), by_hand())


def test_evaluation_is_of_the_first_phase(tmp_path: Path) -> None:
    how = actor_critic()
    _, values = trained(job(**how, evaluate=lambda: rows(1), best=px.Best()), "dp=2", tmp_path / "run")
    net, held_out = ActorCritic(), rows(1).columns
    net.load_state_dict(values)
    with torch.no_grad():
        expected = nn.functional.mse_loss(net(held_out["x"], held_out["y"]), held_out["z"][:, 0]).item()
    (event,) = px.load(tmp_path / "run").events("evaluate")
    assert event["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "plan"), [("scheduled", "dp=2"), *longer(("gan", "fsdp=2 zero=2"), ("actor-critic", "fsdp=2"))]
)
def test_a_proof_takes_the_same_phases_in_plain_pytorch(case: str, plan: str) -> None:
    proof = px.prove(job(**CASES[case][0]()), plan, steps=5)
    assert proof.equal, (proof.first, proof.cause)
    assert proof.reference == "a plain PyTorch loop"
    assert {one.name for one in proof.gradients} == {
        one.name for one in proof.parameters if one.relative or one.allowed
    }


def test_a_proof_sees_a_phase_that_is_not_the_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(px.Phase, "turn", lambda self, step: True)
    proof = px.prove(job(**actor_critic()), "dp=2", steps=4)
    assert not proof.equal
    assert "step 1" in proof.first


def overflowing(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    loss = generator_loss(output, batch)
    return loss * math.nan if batch["x"][0, 0] == rows()[16]["x"][0] else loss


@pytest.mark.parametrize("plan", ["dp=2", *longer("single")])
def test_a_phase_whose_loss_is_not_finite_stops_the_run_or_is_left_out(plan: str, tmp_path: Path) -> None:
    how = gan()
    generator = px.Phase(name="generator", parameters="generator.*", loss=overflowing, optimizer=momentum)
    given = job(model=Gan, phases=[how["phases"][0], generator])
    with pytest.raises(px.PhalanxError, match="phase generator in step 1"):
        px.fit(given, plan, folder=tmp_path / "stopped")
    losses, _ = trained(given, plan, tmp_path / "on", on_nonfinite="skip")
    assert [sorted(name for name, loss in each.items() if loss is None) for each in losses] == [
        ["generator"] if step % 3 == 1 else [] for step in range(STEPS)
    ]
    run = px.load(tmp_path / "on")
    assert [event["skipped"] for event in run.events("step")] == [False, True, False] * 2
    assert list(run.metrics()["loss.critic"]) == [each["critic"] for each in losses]


REFUSED = (
    *("tp=2", "pp=2 micro=2", "cp=2", "ep=2", "dp=2 server=1", "dp=2 sync=local every=2", "compile=true"),
    *("precision=fp16", "recompute=full", "dp=2 compress=fp16", "dp=2 shares=3,1", "fsdp=2 offload=optimizer"),
)


def test_other_plans_are_refused(tmp_path: Path) -> None:
    for plan in REFUSED:
        with pytest.raises(px.PhalanxError) as refused:
            px.fit(job(**gan()), plan, folder=tmp_path / "run")
        (problem,) = refused.value.problems
        assert "phases" in problem.where + problem.given, plan
        assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_forecast_is_refused_and_training_goes_on_without(tmp_path: Path) -> None:
    with pytest.raises(px.PhalanxError, match="phases"):
        px.forecast(job(**gan()), "dp=8", "8xH100")
    with pytest.raises(px.PhalanxError, match="phases"):
        px.plan(job(**gan()), "8xH100")
    run = px.fit(job(**gan()), "single", folder=tmp_path / "run")
    assert not list(run.events("forecast"))
    assert len(run.losses) == STEPS


def phase(**how: Any) -> px.Phase:
    given: dict[str, Any] = {"name": "critic", "parameters": "critic.*", "loss": critic_loss, "optimizer": adam, **how}
    return px.Phase(**given)


WRONG: Mapping[str, tuple[Callable[[], Any], str]] = {
    "nothing beside": (lambda: job(model=Gan), "phases"),
    "loss beside": (lambda: job(model=Gan, phases=[phase()], loss=critic_loss), r"job\.loss"),
    "optimizer beside": (lambda: job(model=Gan, phases=[phase()], optimizer=adam), r"job\.optimizer"),
    "whole batch": (lambda: job(model=Gan, phases=[phase()], loss_over="batch"), "loss_over"),
    "no phases": (lambda: job(model=Gan, phases=["critic"]), "phases"),
    "one name twice": (lambda: job(model=Gan, phases=[phase(), phase()]), "two phases called critic"),
    "first not in each": (lambda: job(model=Gan, phases=[phase(every=2)]), "every"),
    "every": (lambda: phase(every=0), "every"),
    "patterns": (lambda: phase(parameters=[]), "parameters"),
    "loss": (lambda: phase(loss=3), "phase.loss"),
    "inputs": (lambda: phase(inputs=3), "phase.inputs"),
    "schedule": (lambda: phase(schedule=3), "phase.schedule"),
}


def test_what_is_wrong_is_said() -> None:
    for made, words in WRONG.values():
        with pytest.raises(px.PhalanxError, match=words):
            made()


def test_patterns_are_held_against_the_model(tmp_path: Path) -> None:
    plan = "dp=2"
    given = job(model=Gan, phases=[phase(), phase(name="other", parameters="critc.*")])
    with pytest.raises(px.PhalanxError, match=r"near are critic\.\*"):
        px.fit(given, plan, folder=tmp_path / "one")
    given = job(model=Gan, phases=[phase(), phase(name="other", parameters="*.weight")])
    with pytest.raises(px.PhalanxError, match="critic and other both"):
        px.fit(given, plan, folder=tmp_path / "two")
