"""Keras' optimizers by its formulas, under plans, and their state in a model that goes back to Keras."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import MODELS, apart, data, fitted, furthest, job_of, keras, made

import phalanx as px
from longer import longer
from phalanx.train.elementwise import Parameters
from phalanx.train.keras.keras_optimizers import parts_of

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

optimizers = keras.optimizers

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(1e-2, epsilon=1e-3),
    "amsgrad": lambda: optimizers.Adam(1e-2, amsgrad=True, epsilon=1e-3),
    "adamw": lambda: optimizers.AdamW(1e-2, weight_decay=0.1, epsilon=1e-3),
    "rmsprop": lambda: optimizers.RMSprop(1e-3, epsilon=1e-3),
    "rmsprop centered": lambda: optimizers.RMSprop(1e-3, centered=True, momentum=0.9, epsilon=1e-3),
    "lion": lambda: optimizers.Lion(1e-3),
    "cosine": lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 8, alpha=0.1)),
    "warm-up": lambda: optimizers.Adam(
        optimizers.schedules.CosineDecay(0.0, 6, warmup_target=1e-2, warmup_steps=3), epsilon=1e-3
    ),
    "global norm": lambda: optimizers.SGD(0.05, global_clipnorm=0.5),
    "clipped values": lambda: optimizers.SGD(0.05, clipvalue=0.01),
}


def excluding() -> Any:
    optimizer = optimizers.AdamW(1e-2, weight_decay=0.5, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS["without decay of biases"] = excluding
SAVED = tuple(name for name in OPTIMIZERS if name != "without decay of biases")  # which files of Keras do not say
WITHOUT_PROCESSES = ("momentum", "adamw", "warm-up", "clipped values")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("global norm", "clipped values")])
def test_a_formula_is_that_of_keras(name: str) -> None:
    """Six steps over two variables by the same gradients, without a model."""
    rng = np.random.default_rng(0)
    start = {"kernel": rng.normal(size=(3, 4)).astype("float32"), "bias": rng.normal(size=(4,)).astype("float32")}
    variables = [keras.Variable(value, name=key) for key, value in start.items()]
    params = {f"dense.{key}_": torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    plain, parts = OPTIMIZERS[name](), parts_of(OPTIMIZERS[name]())
    optimizer = parts(Parameters(params))
    for step in range(6):
        grads = [rng.normal(size=value.shape).astype("float32") for value in start.values()]
        plain.apply([torch.tensor(grad) for grad in grads], variables)
        for group in optimizer.param_groups:
            group["lr"] = parts.rate * parts.schedule.factor(step=step, batch=1, total_steps=6)
        for param, grad in zip(params.values(), grads, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
        for variable, param in zip(variables, params.values(), strict=True):
            assert torch.allclose(variable.value.detach(), param.detach(), rtol=1e-6, atol=1e-7), step


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, "") for name in WITHOUT_PROCESSES),
        *((name, "fsdp=2") for name in ("rmsprop centered", "lion", "without decay of biases")),
        ("global norm", "tp=2"),
        *longer(*((name, "") for name in OPTIMIZERS if name not in WITHOUT_PROCESSES)),
        *longer(("adamw", "fsdp=2"), ("adam", "tp=2")),
        *longer(*((name, plan) for name in OPTIMIZERS for plan in ("fsdp=2 zero=1", "pp=2"))),
    ],
)
def test_an_optimizer_steps_by_the_formula_of_keras(name: str, plan: str) -> None:
    make = made("mlp", OPTIMIZERS[name])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    run = px.fit(job_of(make, data("mlp"), epochs=2), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < (1e-4 if name == "lion" else 2e-5)


def test_torchs_adam_is_another_optimizer() -> None:
    make = made("mlp", lambda: optimizers.Adam(1e-2, epsilon=1e-3))
    expected, _ = fitted(make, *data("mlp"))
    given = lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-3)  # noqa: E731
    assert apart(px.fit(replace(job_of(make, data("mlp")), optimizer=given)).losses, expected) > 1e-4


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    make = made("mlp", OPTIMIZERS["warm-up"])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    px.fit(job_of(make, data("mlp")), "dp=2", folder=tmp_path / "run")
    run = px.fit(job_of(make, data("mlp"), epochs=2), "fsdp=2", folder=tmp_path / "run", resume=True)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("warm-up", "fsdp=2"),
        ("rmsprop centered", "dp=2 server=1"),
        *longer(*((name, plan) for name in SAVED for plan in ("", "tp=2", "pp=2", "fsdp=2 zero=1"))),
    ],
)
def test_fit_goes_on_where_a_run_has_ended(name: str, plan: str, tmp_path: Path) -> None:
    """By way of a file: the optimizer's state, its steps and its schedule are those of one training."""
    make = made("mlp", OPTIMIZERS[name])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    run = px.fit(job_of(make, data("mlp")), plan)
    px.to_keras(run).save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert int(model.optimizer.iterations) == len(run.losses)
    after, model = fitted(lambda: model, *data("mlp"))
    assert apart([*run.losses, *after], expected) < 2e-5
    assert furthest(model, trained) < (1e-4 if name == "lion" else 2e-5)


@pytest.mark.parametrize("name", ["warm-up", "without decay of biases"])
def test_an_optimizer_that_the_job_was_given_is_of_each_model_alone(name: str) -> None:
    make = made("mlp", OPTIMIZERS[name])
    expected, trained = fitted(make, *data("mlp"), epochs=2)

    def built() -> Any:
        keras.utils.set_random_seed(1)
        return MODELS["mlp"]()

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run = px.fit(job_of(built, data("mlp"), optimizer=OPTIMIZERS[name](), loss=loss))
    for _ in range(2):
        after, model = fitted(lambda: px.to_keras(run), *data("mlp"))
        assert apart([*run.losses, *after], expected) < 2e-5
        assert furthest(model, trained) < 2e-5


def test_no_state_is_made_up_for_another_optimizer() -> None:
    given = lambda params: torch.optim.Adam(params, lr=1e-2)  # noqa: E731
    run = px.fit(replace(job_of(made("mlp"), data("mlp")), optimizer=given))
    for job in (run.job, job_of(made("mlp", OPTIMIZERS["adam"]), data("mlp"))):
        optimizer = px.to_keras(run, job).optimizer
        assert int(optimizer.iterations) == 0
        assert not any(float(keras.ops.max(keras.ops.abs(one))) for one in optimizer.variables[2:])
