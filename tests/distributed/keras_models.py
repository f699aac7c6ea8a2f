"""Small models as people write them in Keras, their data, and what Keras' own training gives for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import phalanx as px

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'phalanx[keras]'")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend than torch", allow_module_level=True)
layers, ops, losses, optimizers = keras.layers, keras.ops, keras.losses, keras.optimizers

SAMPLES, BATCH, CLASSES, WORDS, LENGTH = 40, 8, 5, 11, 6
"""Samples are a multiple of the batch: five steps an epoch."""


class Block(layers.Layer):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.up, self.down = layers.Dense(2 * width, activation="gelu"), layers.Dense(width)

    def call(self, x: Any) -> Any:
        y = self.before(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.between(x)))


class Gpt(keras.Model):
    """A subclassed language model; its blocks are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = layers.Embedding(WORDS, 8), layers.Embedding(LENGTH, 8)
        self.blocks = [Block(8, 2) for _ in range(2)]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(WORDS)

    def call(self, words: Any) -> Any:
        x = self.tokens(words) + self.positions(ops.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((9,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="gelu"),
            layers.Dense(CLASSES),
        ]
    )


def conv() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )


def residual() -> Any:
    given = keras.Input((9,))
    x = layers.Dense(16, activation="relu")(given)
    for _ in range(3):
        x = x + layers.Dense(16)(layers.Dense(32, activation="relu")(layers.LayerNormalization()(x)))
    return keras.Model(given, layers.Dense(CLASSES)(x))


def recurrent() -> Any:
    return keras.Sequential([keras.Input((LENGTH,)), layers.Embedding(WORDS, 8), layers.LSTM(6), layers.Dense(CLASSES)])


MODELS: dict[str, Callable[[], Any]] = {"mlp": mlp, "conv": conv, "residual": residual, "gpt": Gpt, "lstm": recurrent}
NORMALISED = ("conv",)
"""Models with BatchNormalization: equal to one device by the statistics of the global batch."""


def data(model: str, samples: int = SAMPLES) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(samples, 9)).astype("float32")
    words = rng.integers(0, WORDS, size=(samples, LENGTH + 1))
    labels = rng.integers(0, CLASSES, size=(samples,))
    if model == "gpt":
        return words[:, :-1], words[:, 1:]
    if model == "lstm":
        return words[:, :-1], labels
    return (rng.normal(size=(samples, 8, 8, 3)).astype("float32") if model == "conv" else rows), labels


def made(model: str, optimizer: Callable[[], Any] | None = None, **compiled: Any) -> Callable[[], Any]:
    """The function that a user writes: it seeds, builds and compiles."""

    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = MODELS[model]()
        how = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled}
        found.compile(optimizer=optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9), **how)
        return found

    return make


def job_of(make: Callable[[], Any], given: Any, **how: Any) -> px.Job:
    """A job of one epoch in the order of the data, as ``fitted`` trains."""
    return px.from_keras(make, **{"data": given, "batch": BATCH, "epochs": 1, "shuffle": False, **how})


def fit(job: px.Job, plan: str = "", **how: Any) -> px.Run:
    """Train without a forecast: that takes longer than the run."""
    return px.fit(job, plan, forecast="none", **how)


class Each(keras.callbacks.Callback):
    """The loss of each step, where Keras shows the mean so far."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


def fitted(make: Callable[[], Any], x: Any, y: Any, epochs: int = 1, **how: Any) -> tuple[list[float], Any]:
    """The losses of each step of Keras' own ``fit``, and the model after it."""
    model, each = make(), Each()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[each], **how)
    return each.losses, model


@cache
def one_device(model: str) -> tuple[list[float], Any]:
    return fitted(made(model), *data(model))


def furthest(one: Any, other: Any) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(one.weights, other.weights, strict=True)
    return max(float((a.value - b.value).detach().abs().max()) for a, b in pairs)


def stack(inner: Callable[[], list[Any]], shape: tuple[int, ...] = (9,), optimizer: Any = None) -> Callable[[], Any]:
    """The function that makes a model of these layers."""

    def make() -> Any:
        keras.utils.set_random_seed(1)
        found = keras.Sequential([keras.Input(shape), *inner()])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(optimizer=optimizer() if optimizer else keras.optimizers.SGD(0.05), loss=loss)
        return found

    return make


def assert_as_fit(make: Callable[[], Any], given: Any, plan: str, *, weights: float = 2e-5, **how: Any) -> px.Run:
    """Losses and weights are those of Keras' own ``fit``. Returns the run."""
    x, y = given
    expected, trained = fitted(make, x, y, epochs=how.get("epochs", 1))
    run = fit(job_of(make, given, **how), plan)
    assert apart(run.losses, expected) < 2e-5
    assert furthest(px.to_keras(run), trained) < weights
    return run


def apart(found: list[float], expected: list[float]) -> float:
    """The largest difference between the losses of two runs."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
