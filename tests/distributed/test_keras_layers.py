"""Keras layers that a loss hears of beside their output: regularisers, masks, dropout, policies of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from keras_models import CLASSES, apart, data, fitted, furthest, job_of, keras, layers, made

import phalanx as px
from longer import longer
from phalanx.errors import RefusedError, SpecError

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

optimizers, losses = keras.optimizers, keras.losses


def regularised() -> Any:
    keras.utils.set_random_seed(1)
    again = layers.Dense(9, activation="tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02))
    found = keras.Sequential([keras.Input((9,)), again, layers.Dense(CLASSES, kernel_regularizer="l2")])
    given = keras.Input((9,))
    found = keras.Model(given, found.layers[-1](again(again(given))))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found.compile(optimizer=optimizers.SGD(0.05), loss=loss)
    return found


@pytest.mark.parametrize(
    "plan",
    ["dp=2 micro=2", "fsdp=2 recompute=full", *longer("", "fsdp=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "threads=2")],
)
def test_regularisers_count_once_a_step(plan: str) -> None:
    expected, trained = fitted(regularised, *data("mlp"))
    run = px.fit(job_of(regularised, data("mlp")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


class Tied(layers.Layer):
    """Takes the kernel of another layer, and its regulariser with it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def build(self, shape: Any) -> None:
        self.kernel = self.other.kernel

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.kernel))


def in_part() -> list[Any]:
    """A layer that does not learn, whose regulariser Keras leaves out, and a kernel that two layers have."""
    first = layers.Dense(16, kernel_regularizer="l2", use_bias=False)
    return [layers.Dense(9, kernel_regularizer="l1", trainable=False), first, Tied(first)]


def by_others() -> list[Any]:
    """Layers whose weights, or whose ``call``, the layer around them takes by itself."""
    return [
        layers.Reshape((3, 3)),
        layers.TimeDistributed(layers.Dense(4, kernel_regularizer="l1")),
        layers.Bidirectional(layers.GRU(3, kernel_regularizer="l2", return_sequences=True)),
        layers.LSTM(4, recurrent_regularizer="l2", bias_regularizer="l1"),
    ]


@pytest.mark.parametrize(
    ("inner", "plan"),
    [
        (in_part, "dp=2"),
        (by_others, "fsdp=2"),
        *longer(
            *((inner, plan) for inner in (in_part, by_others) for plan in ("", "micro=2", "fsdp=2 recompute=full"))
        ),
        *longer((in_part, "fsdp=2"), (by_others, "dp=2 server=1")),
    ],
)
def test_regularisers_count_where_keras_counts_them(inner: Callable[[], list[Any]], plan: str) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential([keras.Input((9,)), *inner(), layers.Dense(CLASSES)])
        found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    expected, trained = fitted(make, *data("mlp"))
    run = px.fit(job_of(make, data("mlp")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5


class Reading(layers.Layer):
    """Reads the kernel of a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(9, kernel_regularizer="l2", use_bias=False)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return x @ self.inner.kernel


def test_a_regulariser_of_a_layer_that_is_not_called_is_refused() -> None:
    def make() -> Any:
        found = keras.Sequential([keras.Input((9,)), Reading(), layers.Dense(CLASSES)])
        found.compile(optimizer="sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    with pytest.raises(RefusedError, match="which Keras counts, and the model does not call"):
        px.fit(job_of(make, data("mlp")))


def test_regularisers_are_refused_where_no_rank_has_all_weights() -> None:
    with pytest.raises(RefusedError, match="regularisers"):
        px.fit(job_of(regularised, data("mlp")), "pp=2")


class Penalised(layers.Layer):
    """A feed-forward network whose weights are cut by ``tp``, and penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Dense(16, activation="gelu", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02))
        self.down = layers.Dense(9, kernel_regularizer="l2", bias_regularizer="l1")

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(x))


def penalised() -> Any:
    keras.utils.set_random_seed(1)
    found = keras.Sequential([keras.Input((9,)), Penalised(), Penalised(), layers.Dense(CLASSES)])
    found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


@pytest.mark.parametrize(
    "plan", ["tp=2", "recompute=full", *longer("dp=2 tp=2", "tp=2 recompute=full", "fsdp=2", "dp=2 server=1")]
)
def test_regularisers_of_weights_that_are_cut(plan: str, caplog: pytest.LogCaptureFixture) -> None:
    expected, trained = fitted(penalised, *data("mlp"))
    run = px.fit(job_of(penalised, data("mlp")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 2e-5
    whole = [one.message for one in caplog.records if "leaves on every rank" in one.message]
    assert not any(".up." in one or ".down." in one for one in whole), whole


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


@pytest.mark.parametrize(
    "plan", ["dp=2 micro=2", "fsdp=2", *longer("", "fsdp=2 recompute=full", "fsdp=2 zero=1", "fsdp=2 zero=2")]
)
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


@pytest.mark.parametrize(
    "plan", ["fsdp=2 recompute=full", "tp=2", *longer("", "dp=2 micro=2", "fsdp=2", "dp=2 server=1")]
)
def test_masks_reach_layers_inside_of_others(plan: str) -> None:
    expected, trained = fitted(attending, *data("gpt"))
    run = px.fit(job_of(attending, data("gpt")), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < 1e-4


@pytest.mark.parametrize("plan", ["pp=2", "cp=2"])
def test_masks_are_refused_where_they_do_not_go_along(plan: str) -> None:
    with pytest.raises(RefusedError, match="masks"):
        px.fit(job_of(attending, data("gpt")), plan)


def under(policy: str, make: Callable[[], Any]) -> Callable[[], Any]:
    """``make`` under a policy of dtypes."""

    def made_so() -> Any:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return make()
        finally:
            keras.config.set_dtype_policy(before)

    return made_so


@pytest.mark.parametrize(
    ("policy", "plan", "near"),
    [
        ("mixed_bfloat16", "fsdp=2 precision=bf16", 5e-3),
        ("mixed_float16", "precision=fp16", 1e-3),
        *longer(("mixed_bfloat16", "precision=bf16", 5e-3), ("mixed_float16", "dp=2 precision=fp16", 1e-3)),
    ],
)
def test_the_plans_precision_stands_for_a_policy(policy: str, plan: str, near: float) -> None:
    """As near to Keras' training under the policy as that is to float32: by rounding of halves."""
    whole, _ = fitted(made("mlp"), *data("mlp"))
    half, _ = fitted(under(policy, made("mlp")), *data("mlp"))
    run = px.fit(job_of(made("mlp"), data("mlp")), plan)
    assert 1e-5 < apart(half, whole) < near
    assert 1e-5 < apart(run.losses, whole) < near
    assert apart(run.losses, half) < near
    with pytest.raises(SpecError, match=plan.rpartition("precision=")[2]):
        job_of(under(policy, made("mlp")), data("mlp"))


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


class Dropping(layers.Layer):
    """A block that drops half, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.noise = layers.Dense(9), layers.Dropout(0.5), layers.GaussianNoise(0.1)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return x + self.noise(self.drop(self.inner(x), training=training), training=training)


def test_what_is_computed_again_drops_the_same() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential([keras.Input((9,)), Dropping(), Dropping(), layers.Dense(CLASSES)])
        found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    once, again = (px.fit(job_of(make, data("mlp")), plan).losses for plan in ("", "recompute=full"))
    assert apart(once, again) == 0.0


def adding() -> Any:
    class Adding(layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            if training:
                self.add_loss(keras.ops.mean(x**2))
            return x

    found = keras.Sequential([keras.Input((9,)), layers.Dense(8), Adding(), layers.Dense(CLASSES)])
    found.compile(optimizer="sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


def frozen() -> Any:
    """A part that does not learn, with a BatchNormalization that then goes by its running statistics."""
    keras.utils.set_random_seed(1)
    base = keras.Sequential([keras.Input((9,)), layers.Dense(16, activation="relu"), layers.BatchNormalization()])
    base.trainable = False
    found = keras.Sequential([keras.Input((9,)), base, layers.Dense(16, activation="relu"), layers.Dense(CLASSES)])
    found.compile(optimizer=optimizers.Adam(0.01), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


@pytest.mark.parametrize("plan", ["fsdp=2", *longer("", "dp=2 micro=2", "tp=2", "pp=2", "dp=2 server=1")])
def test_a_part_that_does_not_learn_stays(plan: str) -> None:
    expected, trained = fitted(frozen, *data("mlp"))
    run = px.fit(job_of(frozen, data("mlp")), plan)
    assert apart(run.losses, expected) < 2e-5
    after = px.to_keras(run)
    assert furthest(after, trained) < 2e-5
    assert len(after.trainable_weights) == len(trained.trainable_weights) == 4


class Counting(layers.Layer):
    """Counts its calls, in a weight that learns or in one that does not."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=learns, name="calls")

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.calls.assign(self.calls + 1.0)
        return x


def counting(learns: bool) -> Callable[[], Any]:
    def make() -> Any:
        found = keras.Sequential([keras.Input((9,)), layers.Dense(8), Counting(learns), layers.Dense(CLASSES)])
        found.compile(optimizer="sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
        return found

    return make


@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("", "tp=2", "pp=2")])
def test_a_weight_that_a_layer_assigns_to_is_refused(plan: str) -> None:
    with pytest.raises(RefusedError, match="assigns to its weight"):
        px.fit(job_of(counting(True), data("mlp")), plan)


def test_a_state_that_a_layer_keeps_is_told_of() -> None:
    run = px.fit(job_of(counting(False), data("mlp")), "dp=2 micro=2")
    (start,) = run.events("start")
    assert any("buffers updated in forward" in note and "calls" in note for note in start["notes"]), start["notes"]


def test_a_loss_that_a_layer_adds_is_refused() -> None:
    with pytest.raises(RefusedError, match="add_loss in layer"):
        px.fit(job_of(adding, data("mlp")), "dp=2")
