"""What of a Keras model is not proven is refused by name, before anything runs, with the way out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.errors import SpecError
from phalanx.parallel import notes
from phalanx.train.keras.keras_data import dataset_of

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'phalanx[keras]'")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend than torch", allow_module_level=True)
layers, optimizers = keras.layers, keras.optimizers

pytestmark = pytest.mark.quick
DATA = np.zeros((8, 4), dtype="float32"), np.zeros((8, 2), dtype="float32")


def model(*inner: Any, kind: Any = None, **compiled: Any) -> Callable[[], Any]:
    def make() -> Any:
        made = [one() for one in inner]
        found = (kind or keras.Sequential)([keras.Input((4,)), *made, layers.Dense(2)])
        found.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
        return found

    return make


def job(make: Callable[[], Any], **how: Any) -> px.Job:
    return px.from_keras(make, **{"data": DATA, "batch": 4, "epochs": 1, **how})


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *given: Any, **how: Any) -> Any:
        return super().compute_loss(*given, **how)


class OwnEvaluation(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class OwnReduction(keras.losses.MeanSquaredError):
    def __call__(self, *given: Any, **how: Any) -> Any:
        return 2 * super().__call__(*given, **how)


class Epochs(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> Any:
        return tuple(part[4 * at : 4 * at + 4] for part in DATA)

    def on_epoch_end(self) -> None:
        """What fit calls after each epoch."""


class _ShuffleDataset:
    """What a ``tf.data.Dataset`` that was shuffled says of itself."""

    def __init__(self, seeds: tuple[int, int], again: bool) -> None:
        (self._seed, self._seed2), self._reshuffle_each_iteration = seeds, again


class Batched:
    """A ``tf.data.Dataset`` that batches another."""

    element_spec = unbatch = None

    def __init__(self, within: Any) -> None:
        self._inputs = lambda: [within]


class OwnCallback(keras.callbacks.Callback):
    pass


class OwnOptimizer(optimizers.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (model(kind=OwnStep), ("OwnStep.train_step", "px.Job")),
        (model(kind=OwnLoss), ("OwnLoss.compute_loss", "px.Job")),
        (model(kind=OwnEvaluation), ("OwnEvaluation.test_step", "metrics of compile")),
        (model(loss=OwnReduction()), ("OwnReduction.__call__", "for each sample")),
        (model(optimizer="adamax"), ("Adamax", "AdamW")),
        (model(optimizer=OwnOptimizer()), ("OwnOptimizer", "no formula")),
        (model(optimizer=optimizers.SGD(0.1, clipnorm=1.0)), ("clipnorm", "global_clipnorm")),
        (model(optimizer=optimizers.SGD(0.1, use_ema=True)), ("use_ema", "px.Average")),
        (model(optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=2)), ("gradient_accumulation", "micro")),
        (model(optimizer=optimizers.SGD(lambda: 0.1)), ("learning_rate", "LearningRateSchedule")),
        (model(lambda: layers.Dense(4, dtype="mixed_float16")), ("mixed_float16", "precision=fp16")),
        (model(lambda: layers.Dense(4, dtype="bfloat16")), ("bfloat16", "precision=bf16")),
        (model(lambda: layers.Dense(4, kernel_constraint="max_norm")), ("MaxNorm", "weight_decay")),
        (model(lambda: layers.Dense(4, activity_regularizer="l2")), ("activity_regularizer", "output of the model")),
        (model(lambda: layers.Dense(4, dtype="mixed_bfloat16")), ("mixed_bfloat16", "precision=bf16")),
        (model(lambda: layers.BatchNormalization(renorm=True)), ("renorm=True", "by default")),
        (model(lambda: layers.SpectralNormalization(layers.Dense(4))), ("writes its kernel", "AdamW")),
        (model(jit_compile=True), ("jit_compile", "eager")),
        (model(loss=keras.losses.MeanSquaredError(reduction=None)), ("reduction=None", "sum_over_batch_size")),
        (lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]), ("not compiled", "model.compile")),
        (lambda: 3, ("gives a int", "keras.Model")),
    ],
)
def test_refused_by_name(make: Callable[[], Any], words: tuple[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        job(make)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"data": iter([])}, ("data", "PyDataset")),
        ({"data": (*DATA, np.ones(8)), "class_weight": {0: 2.0}}, ("class_weight", "sample weights")),
        ({"data": Epochs()}, ("Epochs.on_epoch_end", "shuffle=True")),
        ({"optimiser": "sgd"}, ("optimiser", "what compile takes")),
        ({"optimizer": "sgd"}, ("optimizer", "compiled already")),
        ({"batch": 3, "loss_sum": True}, ("loss_sum", "px.Job")),
        ({"validation_data": DATA}, ("argument of Keras' fit", "evaluate=(x, y)")),
        ({"verbose": 1, "batch_size": 8}, ("--quiet", "batch=32")),
        ({"callbacks": [keras.callbacks.EarlyStopping()]}, ("EarlyStopping of keras", "patience=3")),
        ({"callbacks": OwnCallback()}, ("Callback of keras.callbacks", "names of events")),
    ],
)
def test_settings_are_refused_by_name(how: dict[str, Any], words: tuple[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        job(model(), **how).data()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 8)), {"schedule": px.Schedule(warmup_steps=2)}),
        (optimizers.SGD(0.1, global_clipnorm=1.0), {"clip": 2.0}),
        (optimizers.SGD(0.1, clipvalue=1.0), {"clip": 2.0}),
    ],
)
def test_what_the_optimizer_says_the_job_does_not_say_again(optimizer: Any, how: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="beside the optimizer's own"):
        job(model(optimizer=optimizer), **how)
    assert job(model(), **how).batch == 4


@pytest.mark.parametrize(("seeds", "again"), [((0, 0), False), ((0, 0), True), ((87654321, 3), True)])
def test_a_shuffle_that_each_process_has_by_itself_is_refused(seeds: tuple[int, int], again: bool) -> None:
    for data in (Batched(_ShuffleDataset(seeds, again)), Batched(Batched(_ShuffleDataset(seeds, again)))):
        with pytest.raises(SpecError, match="another order in each pass") as caught:
            dataset_of(data, 4)
        assert "seed=1, reshuffle_each_iteration=False" in str(caught.value)
    assert dataset_of(Batched(_ShuffleDataset((87654321, 3), False)), 4)


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    """As that of a model which is loaded from a file: its moments would be lost."""

    def make() -> Any:
        found = model()()
        found.optimizer.iterations.assign(3)
        return found

    with pytest.raises(SpecError, match="has taken 3 steps"):
        job(make)


def test_a_sum_over_batches_of_two_sizes_is_refused() -> None:
    make = model(loss=keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(SpecError, match="drop_last"):
        job(make, batch=3)
    assert job(make, batch=3, drop_last=True).batch == 3


def test_compile_may_be_left_to_the_job() -> None:
    found = job(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]), optimizer="adam", loss="mse")
    assert type(found.optimizer([torch.nn.Parameter(torch.zeros(2))])).__name__ == "KerasAdam"


@pytest.mark.parametrize(
    ("inner", "plan", "words", "instead"),
    [
        (lambda: layers.Dense(4), "compile=true dp=2", "Python's state", "dp=2"),
        (lambda: layers.Dense(4, kernel_regularizer="l2"), "pp=2 dp=2 precision=bf16", "weights of no other", "fsdp=2"),
        (layers.Masking, "pp=2 tp=2", "leave theirs behind", "fsdp=2 tp=2"),
        (layers.Masking, "cp=2", "leave theirs behind", "fsdp=2"),
    ],
)
def test_a_plan_is_refused_with_one_that_trains_the_model(inner: Any, plan: str, words: str, instead: str) -> None:
    module: Any = job(model(inner)).model()
    given = px.Plan.parse(plan)
    (problem,) = module.plan_problems(given)
    assert words in problem.given
    found = px.Plan.parse(problem.fix)
    assert (found.world_size, found.precision) == (given.world_size, given.precision)
    assert module.plan_problems(found) == []
    assert set(instead.split()) <= set(problem.fix.split())


class Dropping(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = layers.Dropout(0.5), layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.head(self.drop(x))


class DroppingInTraining(Dropping):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.head(self.drop(x, training=training))


@pytest.mark.parametrize(("kind", "words"), [(Dropping, "drops nothing"), (DroppingInTraining, "other random numbers")])
def test_dropout_is_told_of(kind: Any, words: str) -> None:
    def make() -> Any:
        found = kind()
        found.compile(optimizer="sgd", loss="mse")
        return found

    found = job(make)
    told = notes(found.model(), found, px.Plan(dp=2))
    assert any(words in one and "drop" in one for one in told), told


def test_metrics_without_an_evaluation_are_told_of() -> None:
    measured = model(metrics=["mae"])
    without, with_one = job(measured), job(measured, evaluate=DATA)
    assert any("metrics of compile()" in one for one in notes(without.model(), without, px.Plan()))
    assert not any("metrics of compile()" in one for one in notes(with_one.model(), with_one, px.Plan()))
    assert with_one.metrics is not None


def test_batch_normalization_is_told_of() -> None:
    found = job(model(layers.BatchNormalization))
    told = notes(found.model(), found, px.Plan(dp=2))
    assert any("BatchNorm takes its statistics from each micro-batch" in one for one in told), told
    frozen = job(model(lambda: layers.BatchNormalization(trainable=False)))
    assert not any("BatchNorm" in one for one in notes(frozen.model(), frozen, px.Plan(dp=2)))


def test_a_script_changes_in_four_lines() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "keras.md").read_text()
    before, after = (
        [line.strip() for line in page.partition(f'title="{name}.py"\n')[2].partition("```")[0].splitlines()]
        for name in ("before", "after")
    )
    new = [line for line in after if line and line not in before and not line.startswith("import ")]
    assert len(new) == 4, new


def test_names_do_not_count_up() -> None:
    found = job(model(lambda: layers.Dense(4)))
    names = [[name for name, _ in found.model().named_parameters()] for _ in range(2)]
    assert names[0] == names[1] == ["dense.kernel_", "dense.bias_", "dense_1.kernel_", "dense_1.bias_"]
