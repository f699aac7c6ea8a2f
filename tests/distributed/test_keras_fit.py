"""What ``compile`` and ``fit`` get of a Keras job: losses, weights, optimizers, metrics, data, and the model back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from keras_models import BATCH, CLASSES, MODELS, apart, data, fitted, furthest, keras, layers, made

import phalanx as px
from longer import longer
from phalanx.errors import PhalanxError, RefusedError
from phalanx.train.elementwise import Parameters
from phalanx.train.keras.keras_optimizers import parts_of

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

optimizers, losses = keras.optimizers, keras.losses


def job_of(make: Callable[[], Any], given: Any, **how: Any) -> px.Job:
    return px.from_keras(make, **{"data": given, "batch": BATCH, "epochs": 1, "shuffle": False, **how})


@pytest.mark.parametrize("model", ["mlp", *longer(*(name for name in MODELS if name != "mlp"))])
def test_twenty_steps_are_those_of_fit(model: str) -> None:
    expected, trained = fitted(made(model), *data(model), epochs=4)
    run = px.fit(job_of(made(model), data(model), epochs=4))
    assert apart(run.losses, expected) < 1e-5
    assert furthest(px.to_keras(run), trained) < 1e-5


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


WEIGHTS = np.linspace(0.0, 2.0, 40).astype("float32")
ONE_HOT = np.eye(CLASSES, dtype="float32")


@pytest.mark.parametrize(
    ("loss", "y", "weight"),
    [
        (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), None, WEIGHTS),
        (lambda: losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight"), None, WEIGHTS),
        (lambda: losses.SparseCategoricalCrossentropy(True, reduction="sum"), None, None),
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


def regularised() -> Any:
    keras.utils.set_random_seed(1)
    again = layers.Dense(9, activation="tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02))
    found = keras.Sequential([keras.Input((9,)), again, layers.Dense(CLASSES, kernel_regularizer="l2")])
    given = keras.Input((9,))
    found = keras.Model(given, found.layers[-1](again(again(given))))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found.compile(optimizer=optimizers.SGD(0.05), loss=loss)
    return found


@pytest.mark.parametrize("plan", ["dp=2 micro=2", "fsdp=2 recompute=full", *longer("", "fsdp=2")])
def test_regularisers_count_once_a_step(plan: str) -> None:
    expected, trained = fitted(regularised, *data("mlp"))
    run = px.fit(job_of(regularised, data("mlp")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


@pytest.mark.parametrize(("plan", "why"), [("pp=2", "regularisers"), ("tp=2", "no two layers")])
def test_regularisers_are_refused_where_no_rank_has_whole_weights(plan: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        px.fit(job_of(regularised, data("mlp")), plan)


def masked() -> Any:
    keras.utils.set_random_seed(1)
    found = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Embedding(11, 8, mask_zero=True),
            layers.LSTM(6, return_sequences=True),
            layers.Dense(11),
        ]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found.compile(optimizer=optimizers.SGD(0.05), loss=loss)
    return found


@pytest.mark.parametrize("plan", ["dp=2 micro=2", "fsdp=2", *longer("", "fsdp=2 recompute=full")])
def test_masks_are_counted_over_the_global_batch(plan: str) -> None:
    expected, trained = fitted(masked, *data("gpt"))
    run = px.fit(job_of(masked, data("gpt")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


class Attending(layers.Layer):
    """Attends to what is no padding: the mask is tied to what comes in, and no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, 4)
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return x + self.attention(self.norm(x), x)


def attending() -> Any:
    keras.utils.set_random_seed(1)
    blocks = [Attending() for _ in range(2)]
    found = keras.Sequential([keras.Input((6,)), layers.Embedding(11, 8, mask_zero=True), *blocks, layers.Dense(11)])
    found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


@pytest.mark.parametrize("plan", ["fsdp=2 recompute=full", "tp=2", *longer("", "dp=2 micro=2", "fsdp=2")])
def test_masks_reach_layers_inside_of_others(plan: str) -> None:
    expected, trained = fitted(attending, *data("gpt"))
    run = px.fit(job_of(attending, data("gpt")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 1e-4


@pytest.mark.parametrize("plan", ["pp=2", "cp=2"])
def test_masks_are_refused_where_they_do_not_go_along(plan: str) -> None:
    with pytest.raises(RefusedError, match="masks"):
        px.fit(job_of(attending, data("gpt")), plan)


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


class Stream:
    """What is asked of a ``tf.data.Dataset``: batches of arrays, in order."""

    element_spec = unbatch = None

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def as_numpy_iterator(self) -> Iterator[Any]:
        return ((self.x[at : at + BATCH], self.y[at : at + BATCH]) for at in range(0, len(self.x), BATCH))


@pytest.mark.parametrize("plan", ["dp=2", *longer("")])
def test_a_stream_of_batches_is_read_in_its_order(plan: str) -> None:
    x, y = data("mlp")
    expected, _ = fitted(made("mlp"), x, y)
    run = px.fit(job_of(made("mlp"), lambda: Stream(x, y), shuffle=None), plan)
    assert apart(run.losses, expected) < 2e-5


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    make = made("mlp", OPTIMIZERS["warm-up"])
    expected, trained = fitted(make, *data("mlp"), epochs=2)
    px.fit(job_of(make, data("mlp")), "dp=2", folder=tmp_path / "run")
    run = px.fit(job_of(make, data("mlp"), epochs=2), "fsdp=2", folder=tmp_path / "run", resume=True)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


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


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("warm-up", "fsdp=2"),
        ("rmsprop centered", "dp=2 server=1"),
        *longer(*((name, plan) for name in OPTIMIZERS for plan in ("", "tp=2", "pp=2", "fsdp=2 zero=1"))),
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


def test_no_state_is_made_up_for_another_optimizer() -> None:
    given = lambda params: torch.optim.Adam(params, lr=1e-2)  # noqa: E731
    model = px.to_keras(px.fit(replace(job_of(made("mlp"), data("mlp")), optimizer=given)))
    assert not any(float(keras.ops.max(keras.ops.abs(one))) for one in model.optimizer.variables[2:])


def dropping(rate: float) -> Callable[[], Any]:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential(
            [
                keras.Input((9,)),
                layers.Dense(64, activation="relu"),
                layers.Dropout(rate, seed=3),
                layers.Dense(CLASSES),
            ]
        )
        found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    return make


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 recompute=full", "tp=2", "pp=2"])
def test_dropout_is_on_in_training_and_off_in_evaluation(plan: str) -> None:
    x, y = data("mlp")
    without, _ = fitted(dropping(0.0), x, y)
    run = px.fit(job_of(dropping(0.5), (x, y), evaluate=(x, y)), plan)
    assert apart(run.losses, without) > 1e-3
    found = px.to_keras(run).evaluate(x, y, verbose=0)
    assert run.evaluation is not None
    assert run.evaluation["loss"] == pytest.approx(found, abs=1e-5)
    again = px.fit(job_of(dropping(0.5), (x, y)), plan)
    assert apart(run.losses, again.losses) < 1e-6


def test_a_loss_of_a_batch_is_refused() -> None:
    make = made("mlp", loss=lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)))
    x, y = data("mlp")
    with pytest.raises(PhalanxError, match="one number for a batch"):
        px.fit(job_of(make, (x, ONE_HOT[y])))


def adding() -> Any:
    class Adding(layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            if training:
                self.add_loss(keras.ops.mean(x**2))
            return x

    found = keras.Sequential([keras.Input((9,)), layers.Dense(8), Adding(), layers.Dense(CLASSES)])
    found.compile(optimizer="sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


def test_a_loss_that_a_layer_adds_is_refused() -> None:
    with pytest.raises(RefusedError, match="add_loss in layer"):
        px.fit(job_of(adding, data("mlp")), "dp=2")


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
