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
from longer import longer

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
        fake = fake.detach()
        between = (0.3 * x + 0.7 * fake).requires_grad_()
        return self.critic(x), self.critic(fake), self.critic(between), between


def critic_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> px.Loss:
    real, fake, _, _ = output
    return px.Loss((softplus(-real) + softplus(fake)).sum(), len(real))


def penalised_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> px.Loss:
    real, fake, score, between = output
    (grad,) = torch.autograd.grad(score.sum(), between, create_graph=True)
    penalty = (grad.norm(dim=1) - 1).square().sum()
    return px.Loss((softplus(-real) + softplus(fake)).sum() + 10 * penalty, len(real))


def generator_loss(output: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    return softplus(-output[0]).mean()


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = perceptron(5, 4), perceptron(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distilled_loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> px.Loss:
    student, teacher = output
    return px.Loss(nn.functional.cross_entropy(student, teacher.softmax(-1), reduction="sum"), len(student))


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


def gan(loss: Callable[..., Any] = critic_loss) -> dict[str, Any]:
    critic = px.Phase(name="critic", parameters="critic.*", loss=loss, optimizer=adam)
    generator = px.Phase(name="generator", parameters="generator.*", loss=generator_loss, optimizer=momentum)
    return {"model": Gan, "phases": [critic, generator], "clip": 0.5}


def distillation() -> dict[str, Any]:
    only = px.Phase(name="student", parameters=["student.0.*", "student.2.*"], loss=distilled_loss, optimizer=adam)
    return {"model": Distilled, "phases": [only]}


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


def gan_by_hand(penalty: bool = False) -> Found:
    net, losses = start(Gan), list[dict[str, float]]()
    critics, generators = adam(net.critic.parameters()), momentum(net.generator.parameters())
    for batch in batches():
        with torch.no_grad():
            fake = net.generator(batch["z"])
        scores = torch.cat([net.critic(batch["x"]), net.critic(fake)])
        real = torch.cat([torch.ones_like(scores[::2]), torch.zeros_like(scores[::2])])
        first = 2 * binary_cross_entropy_with_logits(scores, real)
        if penalty:
            between = (0.3 * batch["x"] + 0.7 * fake).requires_grad_()
            (grad,) = torch.autograd.grad(net.critic(between).sum(), between, create_graph=True)
            first = first + 10 * (grad.norm(dim=1) - 1).square().mean()
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


def distillation_by_hand() -> Found:
    net, losses = start(Distilled), list[dict[str, float]]()
    optimizer = adam(net.student.parameters())
    for batch in batches():
        with torch.no_grad():
            target = net.teacher(batch["x"]).softmax(-1)
        loss = nn.functional.cross_entropy(net.student(batch["x"]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append({"student": loss.item()})
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
    "distillation": (distillation, distillation_by_hand),
    "actor-critic": (actor_critic, actor_critic_by_hand),
    "scheduled": (schedulers, lambda: actor_critic_by_hand(scheduled=True)),
}


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("gan", "fsdp=2 micro=3"),
        ("distillation", "threads=2"),
        ("scheduled", "dp=2 micro=3"),
        *longer(("gan", "single"), ("gan", "threads=2"), ("gan", "dp=2 micro=3"), ("gan", "fsdp=2 zero=1")),
        *longer(("distillation", "fsdp=2 zero=2 micro=3"), ("distillation", "dp=2"), ("scheduled", "fsdp=2")),
        *longer(("actor-critic", "single"), ("actor-critic", "fsdp=2 micro=3"), ("actor-critic", "dp=2")),
    ],
)
def test_each_phase_is_that_of_a_loop_by_hand(case: str, plan: str, tmp_path: Path) -> None:
    how, by_hand = CASES[case]
    same(trained(job(**how()), plan, tmp_path / "run"), by_hand())


@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("single", "dp=2 micro=3")])
def test_a_loss_may_have_gradients_of_gradients(plan: str, tmp_path: Path) -> None:
    same(trained(job(**gan(penalised_loss)), plan, tmp_path / "run"), gan_by_hand(penalty=True))


@pytest.mark.parametrize(
    ("case", "before", "after"), [("scheduled", "dp=2", "fsdp=2 zero=2"), *longer(("gan", "fsdp=2 zero=2", "single"))]
)
def test_a_run_goes_on_under_another_plan(case: str, before: str, after: str, tmp_path: Path) -> None:
    how, by_hand = CASES[case]
    trained(job(**how()), before, tmp_path / "run", steps=3)
    same(trained(job(**how()), after, tmp_path / "run", resume=True), by_hand())


def test_each_phase_draws_numbers_of_its_own_that_come_again() -> None:
    drawn: list[float] = []

    class Noisy(Gan):
        def forward(self, x: Tensor, z: Tensor, phase: str) -> tuple[Tensor, ...]:
            drawn.append(torch.rand(()).item())
            return super().forward(x, z, phase)

    for _ in range(2):
        step, loader = px.build(job(**(gan() | {"model": Noisy})))
        torch.manual_seed(len(drawn))
        for batch in loader:
            step(batch)
    assert len(set(drawn)) == 2 * STEPS
    assert drawn[: 2 * STEPS] == drawn[2 * STEPS :]


@pytest.mark.parametrize("plan", ["single", "threads=2"])
def test_only_the_parameters_of_a_phase_have_gradients_in_it(plan: str) -> None:
    learning: dict[str, set[str]] = {}

    class Watched(Gan):
        def forward(self, x: Tensor, z: Tensor, phase: str) -> tuple[Tensor, ...]:
            own = {name.partition(".")[0] for name, one in self.named_parameters() if one.requires_grad}
            learning.setdefault(phase, set()).update(own)
            return super().forward(x, z, phase)

    step, loader = px.build(job(**(gan() | {"model": Watched})), plan)
    metrics = [step(batch) for batch in loader]
    assert learning == {"critic": {"critic"}, "generator": {"generator"}}
    assert [one.losses.keys() for one in metrics] == [learning.keys()] * STEPS


def test_evaluation_is_of_the_first_phase(tmp_path: Path) -> None:
    how = actor_critic()
    _, values = trained(job(**how, evaluate=lambda: rows(1), best=px.Best()), "fsdp=2", tmp_path / "run")
    net, held_out = ActorCritic(), rows(1).columns
    net.load_state_dict(values)
    with torch.no_grad():
        expected = nn.functional.mse_loss(net(held_out["x"], held_out["y"]), held_out["z"][:, 0]).item()
    (event,) = px.load(tmp_path / "run").events("evaluate")
    assert event["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("scheduled", "fsdp=2 zero=2"),
        *longer(("gan", "dp=2 micro=3"), ("distillation", "threads=2"), ("actor-critic", "fsdp=2")),
    ],
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


class Deep(nn.Module):
    """Networks of blocks, which are gathered one by one, and of which each phase calls others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.generator = nn.ModuleList(perceptron(5, 5) for _ in range(3))
        self.critic = nn.ModuleList(perceptron(5, 5) for _ in range(2))
        self.score = nn.Linear(5, 1)

    def forward(self, x: Tensor, z: Tensor, phase: str) -> tuple[Tensor, ...]:
        fake = self.first(z)
        for block in self.generator:
            fake = fake + block(fake)
        if phase == "generator":
            return (self.judged(fake),)
        fake = fake.detach()
        return self.judged(x), self.judged(fake), fake, fake

    def judged(self, x: Tensor) -> Tensor:
        for block in self.critic:
            x = x + block(x)
        return self.score(x)


@pytest.mark.parametrize("plan", ["fsdp=2", *longer("dp=2", "fsdp=2 zero=2", "dp=2 fsdp=2 micro=2")])
def test_networks_of_blocks_are_trained_as_on_one_device(plan: str) -> None:
    critic = px.Phase(name="critic", parameters=["critic.*", "score.*"], loss=critic_loss, optimizer=adam)
    own = ["first.*", "generator.*"]
    generator = px.Phase(name="generator", parameters=own, loss=generator_loss, optimizer=momentum, every=2)
    proof = px.prove(job(model=Deep, phases=[critic, generator]), plan, steps=4)
    assert proof.equal, (proof.first, proof.cause)


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


def test_gradients_of_gradients_are_refused_where_parameters_are_gathered(tmp_path: Path) -> None:
    with pytest.raises(px.PhalanxError, match="gradients of gradients"):
        px.fit(job(**gan(penalised_loss)), "fsdp=2", folder=tmp_path / "run")


def test_a_forecast_is_refused_and_training_goes_on_without(tmp_path: Path) -> None:
    with pytest.raises(px.PhalanxError, match="phases"):
        px.forecast(job(**gan()), "dp=8", "8xH100")
    with pytest.raises(px.PhalanxError, match="phases"):
        px.prove(job(**gan()), "dp=2", dropout=True)
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


def test_a_tied_parameter_is_of_one_phase(tmp_path: Path) -> None:
    class Tied(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.critic[2].bias = self.generator[0].bias = nn.Parameter(torch.zeros(1))

    given = job(model=Tied, phases=[phase(), phase(name="generator", parameters="generator.*")])
    with pytest.raises(px.PhalanxError, match=r"generator\.0\.bias.* critic and generator both"):
        px.fit(given, "single", folder=tmp_path / "run")


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    trained(job(**gan()), "single", tmp_path / "run", steps=2)
    other = job(model=Gan, phases=[phase(optimizer=momentum), gan()["phases"][1]])
    with pytest.raises(px.PhalanxError, match="critic: Adam, generator: SGD"):
        trained(other, "single", tmp_path / "run", resume=True)


def test_what_no_phase_updates_is_told(tmp_path: Path) -> None:
    run = px.fit(job(**distillation()), "single", folder=tmp_path / "run")
    assert any("4 parameters" in event["message"] for event in run.events("warning"))


def test_a_parameter_without_a_gradient_in_its_phase_is_named(tmp_path: Path) -> None:
    given = job(model=Gan, phases=[phase(parameters="*")])
    with pytest.raises(px.PhalanxError, match="generator"):
        px.fit(given, "dp=2", folder=tmp_path / "run")


def test_a_scheduler_that_follows_evaluations_is_of_the_first_phase(tmp_path: Path) -> None:
    def plateau(params: Any) -> Any:
        optimizer = adam(params)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    first, second = actor_critic()["phases"]
    how = {"model": ActorCritic, "evaluate": rows, "evaluate_every": 2}
    late = replace(second, optimizer=plateau, schedule=None)
    with pytest.raises(px.PhalanxError, match="first phase"):
        trained(job(phases=[first, late], **how), "dp=2", tmp_path / "late")
    trained(job(phases=[replace(first, optimizer=plateau), second], **how), "single", tmp_path / "first")
