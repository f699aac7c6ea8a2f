"""Keras layers that a loss hears of beside their output: regularisers, masks, dropout, policies of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from keras_models import (
    CLASSES,
    apart,
    assert_as_fit,
    data,
    fit,
    fitted,
    job_of,
    keras,
    layers,
    losses,
    made,
    optimizers,
    stack,
)

import phalanx as px
from law_rows import longer
from phalanx.errors import RefusedError, SpecError

# Keras hands arrays to numpy in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def regularised() -> Any:
    """A layer that is called twice counts once."""
    keras.utils.set_random_seed(1)
    again = layers.Dense(9, activation="tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02))
    given = keras.Input((9,))
    found = keras.Model(given, layers.Dense(CLASSES, kernel_regularizer="l2")(again(again(given))))
    found.compile(optimizer=optimizers.SGD(0.05), loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    return found


class Penalised(layers.Layer):
    """A feed-forward network whose weights are cut by ``tp``, and penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Dense(16, activation="gelu", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02))
        self.down = layers.Dense(9, kernel_regularizer="l2", bias_regularizer="l1")

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(x))


class Attending(layers.Layer):
    """Attends to what is no padding: the mask is tied to what comes in, and no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, 4)
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return x + self.attention(self.norm(x), x)


class Counting(layers.Layer):
    """Counts its calls, in a weight that learns or in one that does not."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=learns, name="calls")

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.calls.assign(self.calls + 1.0)
        return x


def frozen() -> list[Any]:
    """A part that does not learn, with a BatchNormalization that then goes by its running statistics."""
    base = keras.Sequential([keras.Input((9,)), layers.Dense(16, activation="relu"), layers.BatchNormalization()])
    base.trainable = False
    return [base, layers.Dense(16, activation="relu"), layers.Dense(CLASSES)]


PENALISED = stack(lambda: [Penalised(), Penalised(), layers.Dense(CLASSES)])
ATTENDING = stack(
    lambda: [layers.Embedding(11, 8, mask_zero=True), Attending(), Attending(), layers.Dense(11)], shape=(6,)
)
FROZEN = stack(frozen, optimizer=lambda: optimizers.Adam(0.01))
CASES: dict[str, tuple[Callable[[], Any], str, str, tuple[str, ...]]] = {
    "regularised": (regularised, "mlp", "dp=2 micro=2", ("", "fsdp=2 recompute=full", "fsdp=2 zero=1", "threads=2")),
    "cut and penalised": (PENALISED, "mlp", "tp=2", ("recompute=full", "dp=2 tp=2", "tp=2 recompute=full", "fsdp=2")),
    "masked inside": (ATTENDING, "gpt", "fsdp=2 recompute=full", ("", "tp=2", "dp=2 micro=2", "dp=2 server=1")),
    "frozen": (FROZEN, "mlp", "fsdp=2 zero=1", ("fsdp=2", "dp=2 micro=2", "tp=2", "pp=2", "dp=2 server=1")),
}
"""What a model has → how it is made, its data, the plan of every run of the tests, and more plans."""


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        *((case, one[2]) for case, one in CASES.items()),
        *longer(*((case, plan) for case, one in CASES.items() for plan in one[3])),
    ],
)
def test_it_trains_as_keras_does(case: str, plan: str, caplog: pytest.LogCaptureFixture) -> None:
    make, of, _, _ = CASES[case]
    run = assert_as_fit(make, data(of), plan, weights=1e-4 if case == "masked inside" else 2e-5)
    if case == "cut and penalised":
        whole = [one.message for one in caplog.records if "leaves on every rank" in one.message]
        assert not any(".up." in one or ".down." in one for one in whole), whole
    if case == "frozen":
        assert len(px.to_keras(run).trainable_weights) == 4


COUNTING = stack(lambda: [layers.Dense(8), Counting(True), layers.Dense(CLASSES)])


class Adding(layers.Layer):
    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.add_loss(keras.ops.mean(x**2))
        return x


@pytest.mark.parametrize(
    ("make", "of", "plan", "words"),
    [
        (regularised, "mlp", "pp=2", "regularisers"),
        (ATTENDING, "gpt", "pp=2", "masks"),
        (COUNTING, "mlp", "fsdp=2 zero=2", "assigns to"),
        (stack(lambda: [layers.Dense(8), Adding(), layers.Dense(CLASSES)]), "mlp", "dp=2", "add_loss in layer"),
        *longer(
            (COUNTING, "mlp", "", "assigns to"),
            (COUNTING, "mlp", "pp=2", "assigns to"),
            (ATTENDING, "gpt", "cp=2", "masks"),
        ),
    ],
)
def test_what_no_plan_can_keep_is_refused(make: Callable[[], Any], of: str, plan: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        fit(job_of(make, data(of)), plan)


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
    [("mixed_bfloat16", "precision=bf16", 5e-3), *longer(("mixed_float16", "dp=2 precision=fp16", 1e-3))],
)
def test_the_plans_precision_stands_for_a_policy(policy: str, plan: str, near: float) -> None:
    """As near to Keras' training under the policy as that is to float32: by rounding of halves."""
    whole, _ = fitted(made("mlp"), *data("mlp"))
    half, _ = fitted(under(policy, made("mlp")), *data("mlp"))
    run = fit(job_of(made("mlp"), data("mlp")), plan)
    assert 1e-5 < apart(half, whole) < near
    assert 1e-5 < apart(run.losses, whole) < near
    assert apart(run.losses, half) < near
    with pytest.raises(SpecError, match=plan.rpartition("precision=")[2]):
        job_of(under(policy, made("mlp")), data("mlp"))


def dropping(rate: float) -> Callable[[], Any]:
    return stack(lambda: [layers.Dense(64, activation="relu"), layers.Dropout(rate, seed=3), layers.Dense(CLASSES)])


@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2 recompute=full", "tp=2", "pp=2")])
def test_dropout_is_on_in_training_and_off_in_evaluation(plan: str) -> None:
    x, y = data("mlp")
    without, _ = fitted(dropping(0.0), x, y)
    run = fit(job_of(dropping(0.5), (x, y), evaluate=(x, y)), plan)
    assert apart(run.losses, without) > 1e-3
    found = px.to_keras(run).evaluate(x, y, verbose=0)
    assert run.evaluation["loss"] == pytest.approx(found, abs=1e-5)
    again = fit(job_of(dropping(0.5), (x, y)), plan)
    assert apart(run.losses, again.losses) < 1e-6
