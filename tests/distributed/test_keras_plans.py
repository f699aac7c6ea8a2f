"""Keras models: what Keras' own ``fit`` gives on one device, under every plan, with its optimizers and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import (
    BATCH,
    CLASSES,
    MODELS,
    NORMALISED,
    apart,
    assert_as_fit,
    data,
    fit,
    fitted,
    furthest,
    job_of,
    keras,
    layers,
    losses,
    made,
    one_device,
    optimizers,
)

import phalanx as px
from law_rows import longer
from phalanx.errors import SpecError
from phalanx.train.elementwise import Parameters
from phalanx.train.keras.keras_optimizers import parts_of

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

PLANS = (
    *("dp=2", "dp=2 micro=2", "fsdp=2", "fsdp=2 zero=2", "fsdp=2 zero=1", "tp=2", "pp=2"),
    *("pp=2 micro=2 schedule=1f1b", "cp=2", "dp=2 tp=2", "fsdp=2 recompute=full", "dp=2 server=1"),
)
REFUSED = {
    **{(model, "cp=2"): "attend" for model in MODELS if model != "gpt"},
    **{(model, "cp=2"): "plan.cp" for model in NORMALISED},
    **{(model, plan): "no two layers" for model in ("conv",) for plan in ("tp=2", "dp=2 tp=2")},
    **{(model, plan): "plan.micro" for model in NORMALISED for plan in PLANS if "micro" in plan},
    **{(model, "dp=2 server=1"): "plan.server" for model in NORMALISED},
}
"""(model, plan) → a word of the reason."""
QUICK = (
    *(("mlp", plan) for plan in ("fsdp=2 zero=1", "dp=2 server=1", "cp=2")),
    *(
        ("gpt", "cp=2"),
        ("gpt", "tp=2"),
        ("conv", "dp=2"),
        ("residual", "pp=2 micro=2 schedule=1f1b"),
        ("lstm", "fsdp=2"),
    ),
)
MORE = (*((model, plan) for model in MODELS for plan in PLANS if (model, plan) not in QUICK), ("mlp", "threads=2"))


@pytest.mark.parametrize(("model", "plan"), [*QUICK, *longer(*MORE)])
def test_a_plan_gives_what_fit_gives(model: str, plan: str) -> None:
    expected, trained = one_device(model)
    job = job_of(made(model), data(model), **({"batch_statistics": "global"} if model in NORMALISED else {}))
    if reason := REFUSED.get((model, plan)):
        with pytest.raises(SpecError, match=reason):
            fit(job, plan)
        return
    run = fit(job, plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 1e-4


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
STEPPED = (("global norm", "tp=2"), ("clipped values", ""), ("without decay of biases", ""))


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
    [*STEPPED, *longer(*((name, plan) for name in OPTIMIZERS for plan in ("fsdp=2 zero=1", "pp=2", "tp=2")))],
)
def test_an_optimizer_steps_by_the_formula_of_keras(name: str, plan: str) -> None:
    weights = 1e-4 if name == "lion" else 2e-5
    assert_as_fit(made("mlp", OPTIMIZERS[name]), data("mlp"), plan, weights=weights, epochs=2)


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    make = made("mlp", OPTIMIZERS["warm-up"])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    fit(job_of(make, data("mlp")), "dp=2", folder=tmp_path / "run")
    run = fit(job_of(make, data("mlp"), epochs=2), "", folder=tmp_path / "run", resume=True)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


@pytest.mark.parametrize(
    ("name", "plan"),
    [("warm-up", "dp=2"), *longer(*((name, plan) for name in SAVED for plan in ("tp=2", "pp=2", "fsdp=2 zero=1")))],
)
def test_fit_goes_on_where_a_run_has_ended(name: str, plan: str, tmp_path: Path) -> None:
    """By way of a file: the optimizer's state, its steps and its schedule are those of one training."""
    make = made("mlp", OPTIMIZERS[name])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    run = fit(job_of(make, data("mlp")), plan)
    px.to_keras(run).save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert int(model.optimizer.iterations) == len(run.losses)
    after, model = fitted(lambda: model, *data("mlp"))
    assert apart([*run.losses, *after], expected) < 2e-5
    assert furthest(model, trained) < (1e-4 if name == "lion" else 2e-5)


WEIGHTS = np.linspace(0.0, 2.0, 40).astype("float32")
ONE_HOT = np.eye(CLASSES, dtype="float32")


LOSSES: list[tuple[Callable[[], Any], Any, Any]] = [
    (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), None, WEIGHTS),
    (lambda: losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight"), None, WEIGHTS),
    (lambda: losses.SparseCategoricalCrossentropy(True, reduction="sum"), None, None),
    (lambda: losses.SparseCategoricalCrossentropy(True, ignore_class=2), None, None),
    (lambda: losses.SparseCategoricalCrossentropy(True, ignore_class=2), None, WEIGHTS),
    (lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT, None),
    (lambda: "mse", ONE_HOT, WEIGHTS),
    (lambda: losses.Huber(0.5), ONE_HOT, None),
    (lambda: lambda y, p: keras.ops.mean(keras.ops.abs(y - p) ** 1.5, -1), ONE_HOT, None),
]
WEIGHTED, SUMMED, IGNORING = (LOSSES[at] for at in (1, 2, 4))  # every way to count


@pytest.mark.parametrize(
    ("loss", "y", "weight"), [WEIGHTED, SUMMED, IGNORING, *longer(*(LOSSES[at] for at in (0, 3, 5, 6, 7, 8)))]
)
@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("")])
def test_a_loss_is_reduced_over_the_global_batch(loss: Callable[[], Any], y: Any, weight: Any, plan: str) -> None:
    x, labels = data("mlp")
    labels = labels if y is None else y[labels]
    make = made("mlp", lambda: optimizers.SGD(0.01), loss=loss())
    expected, trained = fitted(make, x, labels, sample_weight=weight)
    run = fit(job_of(make, (x, labels) if weight is None else (x, labels, weight)), plan)
    assert np.allclose(run.losses, expected, rtol=1e-5)
    assert furthest(px.to_keras(run), trained) < 2e-5


def test_class_weights() -> None:
    classes = {0: 2.0, 3: 0.25}
    make = made("mlp")
    expected, trained = fitted(make, *data("mlp"), class_weight=classes)
    run = fit(job_of(make, data("mlp"), class_weight=classes))
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


def two_outputs() -> Any:
    keras.utils.set_random_seed(1)
    given = keras.Input((9,))
    x = layers.Dense(16, activation="relu")(given)
    outputs = {"kind": layers.Dense(CLASSES, name="kind")(x), "size": layers.Dense(1, name="size")(x)}
    found = keras.Model(given, outputs)
    found.compile(
        optimizer=optimizers.SGD(0.05),
        loss={"kind": losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return found


@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("", "pp=2")])
def test_losses_of_several_outputs(plan: str) -> None:
    x, labels = data("mlp")
    y = {"kind": labels, "size": x[:, :1]}
    expected, trained = fitted(two_outputs, x, y)
    run = fit(job_of(two_outputs, (x, y), evaluate=(x, y)), plan)
    assert apart(run.losses, expected) < 2e-5
    found = dict(trained.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True))
    for name, value in run.evaluation["metrics"].items():
        assert value == pytest.approx(found[name], abs=1e-4), name
    assert {"kind_accuracy", "size_mae"} <= set(run.evaluation["metrics"])


@pytest.mark.parametrize("plan", ["dp=2", *longer("", "pp=2")])
def test_metrics_are_those_of_evaluate(plan: str) -> None:
    x, labels = data("mlp")
    labels = (labels > 2).astype("float32")[:, None]

    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential(
            [keras.Input((9,)), layers.Dense(8, activation="relu"), layers.Dense(1, activation="sigmoid")]
        )
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
        metrics.append(keras.metrics.RootMeanSquaredError(name="root"))  # no mean, though Keras has it as one
        metrics += [keras.metrics.BinaryAccuracy(name="auc"), keras.metrics.BinaryAccuracy(name="auc")]
        twice = {"weighted_metrics": ["accuracy", keras.metrics.BinaryAccuracy(name="accuracy")]}
        found.compile(optimizer=optimizers.SGD(0.05), loss="binary_crossentropy", metrics=metrics, **twice)
        return found

    _, trained = fitted(make, x, labels)
    run = fit(job_of(make, (x, labels), evaluate=(x[:37], labels[:37])), plan)
    found = trained.evaluate(x[:37], labels[:37], batch_size=BATCH, verbose=0, return_dict=True)
    assert run.evaluation["loss"] == pytest.approx(found.pop("loss"), abs=1e-5)
    assert run.evaluation["metrics"] == pytest.approx(found, abs=1e-5)


class Batches(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, at: int) -> Any:
        rows = slice(at * BATCH, (at + 1) * BATCH)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("plan", ["dp=2", *longer("")])
def test_a_dataset_that_gives_batches_by_number(plan: str) -> None:
    x, y = data("mlp", 37)
    expected, _ = fitted(made("mlp"), x, y)
    run = fit(job_of(made("mlp"), Batches(x, y)), plan)
    assert apart(run.losses, expected) < 2e-5


class Noisy(Batches):
    """Adds noise to each batch, as a dataset that augments does."""

    def __getitem__(self, at: int) -> Any:
        x, y = super().__getitem__(at)
        return x + np.random.normal(size=x.shape), y


@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("dp=2", "pp=2")])
def test_what_a_batch_draws_is_the_same_under_every_plan(plan: str) -> None:
    expected, run = (fit(job_of(made("mlp"), Noisy(*data("mlp", 37)), epochs=2), one) for one in ("", plan))
    assert apart(run.losses, expected.losses) < 2e-5
    without = fit(job_of(made("mlp"), Batches(*data("mlp", 37)), epochs=2))
    assert apart(without.losses, expected.losses) > 1e-2
    assert not any("random" in note for start in run.events("start") for note in start["notes"])


def test_a_proof_draws_what_a_batch_draws() -> None:
    noisy = lambda: Noisy(*data("mlp", 37))  # noqa: E731 - whose samples are shuffled each by itself
    proof = px.prove(job_of(made("mlp"), noisy, epochs=2, shuffle=True), "dp=2", steps=7)
    assert proof.equal, f"{proof.first}\n{proof.cause}"


class Stream:
    """What is asked of a ``tf.data.Dataset``: batches of arrays, in order."""

    element_spec = unbatch = None

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def as_numpy_iterator(self) -> Iterator[Any]:
        return ((self.x[at : at + BATCH], self.y[at : at + BATCH]) for at in range(0, len(self.x), BATCH))


@pytest.mark.parametrize(("model", "plan"), [("gpt", "dp=2"), *longer(("mlp", "dp=2"), ("mlp", ""))])
def test_a_stream_of_batches_is_read_in_its_order(model: str, plan: str) -> None:
    x, y = data(model)
    expected, _ = fitted(made(model), x, y)
    run = fit(job_of(made(model), lambda: Stream(x, y), shuffle=None), plan)
    assert apart(run.losses, expected) < 2e-5


def test_a_model_goes_to_a_file_and_back(tmp_path: Path) -> None:
    run = fit(job_of(made("gpt"), data("gpt")), "dp=2")
    trained = px.to_keras(run)
    trained.save_weights(tmp_path / "model.weights.h5")
    other = px.to_keras(px.load(run.folder, run.job))
    for variable in other.weights:
        variable.assign(variable * 0)
    other.load_weights(tmp_path / "model.weights.h5")
    assert furthest(trained, other) == 0.0
    values = px.to_keras(fit(job_of(made("residual"), data("residual"))))
    values.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert furthest(values, again) == 0.0
    x, _ = data("residual")
    assert np.array_equal(values.predict(x, verbose=0), again.predict(x, verbose=0))


def test_a_job_says_which_layers_are_cut_by_columns() -> None:
    how = {"dense": "colwise", "dense_1": "rowwise", "dense_2": "whole"}
    assert_as_fit(made("mlp"), data("mlp"), "tp=2", tensor_parallel=how)
