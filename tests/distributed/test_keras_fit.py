"""What ``compile`` and ``fit`` get of a Keras job: losses, weights, optimizers, metrics, data, and the model back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_models import BATCH, CLASSES, MODELS, apart, data, fitted, furthest, job_of, keras, layers, made

import phalanx as px
from longer import longer
from phalanx.errors import PhalanxError

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

optimizers, losses = keras.optimizers, keras.losses


@pytest.mark.parametrize("model", ["mlp", *longer(*(name for name in MODELS if name != "mlp"))])
def test_twenty_steps_are_those_of_fit(model: str) -> None:
    expected, trained = fitted(made(model), *data(model), epochs=4)
    run = px.fit(job_of(made(model), data(model), epochs=4))
    assert apart(run.losses, expected) < 1e-5
    assert furthest(px.to_keras(run), trained) < 1e-5


WEIGHTS = np.linspace(0.0, 2.0, 40).astype("float32")
ONE_HOT = np.eye(CLASSES, dtype="float32")


@pytest.mark.parametrize(
    ("loss", "y", "weight"),
    [
        (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), None, WEIGHTS),
        (lambda: losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight"), None, WEIGHTS),
        (lambda: losses.SparseCategoricalCrossentropy(True, reduction="sum"), None, None),
        (lambda: losses.SparseCategoricalCrossentropy(True, ignore_class=2), None, None),
        (lambda: losses.SparseCategoricalCrossentropy(True, ignore_class=2), None, WEIGHTS),
        (lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT, None),
        (lambda: "mse", ONE_HOT, WEIGHTS),
        (lambda: losses.Huber(0.5), ONE_HOT, None),
        (lambda: lambda y, p: keras.ops.mean(keras.ops.abs(y - p) ** 1.5, -1), ONE_HOT, None),
    ],
)
@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("")])
def test_a_loss_is_reduced_over_the_global_batch(loss: Callable[[], Any], y: Any, weight: Any, plan: str) -> None:
    x, labels = data("mlp")
    labels = labels if y is None else y[labels]
    make = made("mlp", lambda: optimizers.SGD(0.01), loss=loss())
    expected, trained = fitted(make, x, labels, sample_weight=weight)
    run = px.fit(job_of(make, (x, labels) if weight is None else (x, labels, weight)), plan)
    assert np.allclose(run.losses, expected, rtol=1e-5)
    assert furthest(px.to_keras(run), trained) < 2e-5


def test_class_weights() -> None:
    classes = {0: 2.0, 3: 0.25}
    make = made("mlp")
    expected, trained = fitted(make, *data("mlp"), class_weight=classes)
    run = px.fit(job_of(make, data("mlp"), class_weight=classes), "dp=2")
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


@pytest.mark.parametrize("plan", ["dp=2 micro=2", "pp=2", *longer("")])
def test_losses_of_several_outputs(plan: str) -> None:
    x, labels = data("mlp")
    y = {"kind": labels, "size": x[:, :1]}
    expected, trained = fitted(two_outputs, x, y)
    run = px.fit(job_of(two_outputs, (x, y), evaluate=(x, y)), plan)
    assert apart(run.losses, expected) < 2e-5
    found = dict(trained.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True))
    assert run.evaluation is not None
    for name, value in run.evaluation["metrics"].items():
        assert value == pytest.approx(found[name], abs=1e-4), name
    assert {"kind_accuracy", "size_mae"} <= set(run.evaluation["metrics"])


@pytest.mark.parametrize("plan", ["dp=2", "pp=2", *longer("")])
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
        found.compile(optimizer=optimizers.SGD(0.05), loss="binary_crossentropy", metrics=metrics)
        return found

    _, trained = fitted(make, x, labels)
    run = px.fit(job_of(make, (x, labels), evaluate=(x[:37], labels[:37])), plan)
    found = trained.evaluate(x[:37], labels[:37], batch_size=BATCH, verbose=0, return_dict=True)
    assert run.evaluation is not None
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
    run = px.fit(job_of(made("mlp"), Batches(x, y)), plan)
    assert apart(run.losses, expected) < 2e-5


class Noisy(Batches):
    """Adds noise to each batch, as a dataset that augments does."""

    def __getitem__(self, at: int) -> Any:
        x, y = super().__getitem__(at)
        return x + np.random.normal(size=x.shape), y


@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("dp=2", "pp=2")])
def test_what_a_batch_draws_is_the_same_under_every_plan(plan: str) -> None:
    expected, run = (px.fit(job_of(made("mlp"), Noisy(*data("mlp", 37)), epochs=2), one) for one in ("", plan))
    assert apart(run.losses, expected.losses) < 2e-5
    without = px.fit(job_of(made("mlp"), Batches(*data("mlp", 37)), epochs=2))
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


@pytest.mark.parametrize(("model", "plan"), [("mlp", "dp=2"), ("gpt", "dp=2"), *longer(("mlp", ""))])
def test_a_stream_of_batches_is_read_in_its_order(model: str, plan: str) -> None:
    x, y = data(model)
    expected, _ = fitted(made(model), x, y)
    run = px.fit(job_of(made(model), lambda: Stream(x, y), shuffle=None), plan)
    assert apart(run.losses, expected) < 2e-5


def test_a_model_goes_to_a_file_and_back(tmp_path: Path) -> None:
    run = px.fit(job_of(made("gpt"), data("gpt")), "fsdp=2")
    trained = px.to_keras(run)
    trained.save_weights(tmp_path / "model.weights.h5")
    other = px.to_keras(px.load(run.folder, run.job))
    for variable in other.weights:
        variable.assign(variable * 0)
    other.load_weights(tmp_path / "model.weights.h5")
    assert furthest(trained, other) == 0.0
    values = px.to_keras(px.fit(job_of(made("residual"), data("residual")), "pp=2"))
    values.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert furthest(values, again) == 0.0
    x, _ = data("residual")
    assert np.array_equal(values.predict(x, verbose=0), again.predict(x, verbose=0))


@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("")])
def test_a_loss_that_compares_samples_is_of_the_global_batch(plan: str) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential([keras.Input((9,)), layers.Dense(CLASSES), layers.UnitNormalization()])
        found.compile(optimizer=optimizers.SGD(0.05), loss=losses.Circle(gamma=4.0))
        return found

    x, _ = data("mlp")
    y = np.arange(len(x)) % 4
    expected, trained = fitted(make, x, y)
    run = px.fit(job_of(make, (x, y), loss_over="batch"), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


def test_a_metric_of_a_batch_is_refused() -> None:
    x, y = data("mlp")
    make = made("mlp", loss="mse", metrics=[lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2))])
    with pytest.raises(PhalanxError, match="one number for a batch"):
        px.fit(job_of(make, (x, ONE_HOT[y]), evaluate=(x, ONE_HOT[y])))


def test_a_loss_of_a_batch_is_refused() -> None:
    make = made("mlp", loss=lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)))
    x, y = data("mlp")
    with pytest.raises(PhalanxError, match="one number for a batch"):
        px.fit(job_of(make, (x, ONE_HOT[y])))


@pytest.mark.parametrize(
    ("model", "plan"), [("gpt", "tp=2"), ("conv", "dp=2"), *longer(("gpt", "dp=2"), ("gpt", "pp=2"))]
)
def test_a_proof_of_a_keras_job(model: str, plan: str) -> None:
    more = {"batch_statistics": "global"} if model == "conv" else {}
    proof = px.prove(job_of(made(model), data(model), **more), plan, steps=3)
    assert proof.equal, f"{proof.first}\n{proof.cause}"


def test_a_job_says_which_layers_are_cut_by_columns() -> None:
    expected, trained = fitted(made("mlp"), *data("mlp"))
    how = {"dense": "colwise", "dense_1": "rowwise", "dense_2": "whole"}
    run = px.fit(job_of(made("mlp"), data("mlp"), tensor_parallel=how), "tp=2")
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


def test_weights_of_attention_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    px.fit(job_of(made("gpt"), data("gpt")), "tp=2")
    (whole,) = [one.message for one in caplog.records if "leaves on every rank" in one.message]
    assert "tokens.embeddings_" in whole
    assert "attention" not in whole


def test_plans_forecasts_and_drawings_are_made_of_it() -> None:
    job = job_of(made("gpt"), data("gpt"))
    assert px.forecast(job, "dp=4 tp=2", "8xH100").allocated > 0
    assert px.plan(job, "2xH100").ranking.best is not None
