"""What of a Keras model is not proven is refused by name; Keras is imported for those who use it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from law_rows import in_one_test
from phalanx.errors import SpecError
from phalanx.train.keras.keras_data import dataset_of

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'phalanx[keras]'")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend than torch", allow_module_level=True)
layers, optimizers = keras.layers, keras.optimizers
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


@in_one_test(
    ("make", "words"),
    [
        (model(kind=OwnStep), ("OwnStep.train_step", "px.Job")),
        (model(kind=OwnLoss), ("OwnLoss.compute_loss", "px.Job")),
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


@in_one_test(
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


@in_one_test(
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


@in_one_test(("seeds", "again"), [((0, 0), False), ((0, 0), True), ((87654321, 3), True)])
def test_a_shuffle_that_each_process_has_by_itself_is_refused(seeds: tuple[int, int], again: bool) -> None:
    for data in (Batched(_ShuffleDataset(seeds, again)), Batched(Batched(_ShuffleDataset(seeds, again)))):
        with pytest.raises(SpecError, match="another order in each pass") as caught:
            dataset_of(data, 4)
        assert "seed=1, reshuffle_each_iteration=False" in str(caught.value)
    assert dataset_of(Batched(_ShuffleDataset((87654321, 3), False)), 4)


def test_a_sum_over_batches_of_two_sizes_is_refused() -> None:
    make = model(loss=keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(SpecError, match="drop_last"):
        job(make, batch=3)
    assert job(make, batch=3, drop_last=True).batch == 3


@in_one_test(
    ("inner", "plan", "words", "instead"),
    [
        (lambda: layers.Dense(4), "compile=true dp=2", "Python's state", "dp=2"),
        (lambda: layers.Dense(4, kernel_regularizer="l2"), "pp=2 dp=2 precision=bf16", "weights of no other", "fsdp=2"),
        (layers.Masking, "pp=2 tp=2", "leave theirs behind", "fsdp=2 tp=2"),
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


KERAS_JOB = """
import keras
import numpy as np
import phalanx as px

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    return model

def job():
    return px.from_keras(make, data=(np.zeros((8, 4)), np.zeros((8, 2))), batch=4, epochs=1)
"""


def command(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "300", **environment}
    return subprocess.run([sys.executable, *command], env=environment, check=False, text=True, capture_output=True)


def test_another_backend_is_refused_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "keras_job.py").write_text(KERAS_JOB)
    done = command("-m", "phalanx", "show", "keras_job.py", "--plan", "dp=2", KERAS_BACKEND="numpy")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KERAS_BACKEND" in done.stderr
    assert "torch" in done.stderr.rpartition("try:")[2], done.stderr


def test_a_job_without_keras_imports_none_of_it(tmp_path: Path) -> None:
    """What stands in the place of Keras cannot be imported."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("raise AssertionError('keras was imported')")
    (tmp_path / "plain.py").write_text(
        "import phalanx as px, sys, torch\n"
        "model = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))\n"
        "data = lambda: px.Table(x=torch.ones(8, 4), y=torch.ones(8, 4))\n"
        "loss = lambda output, batch: torch.nn.functional.mse_loss(output, batch['y'])\n"
        "job = px.Job(model=model, data=data, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "             inputs=lambda batch: (batch['x'],), batch=4, epochs=1)\n"
        "px.fit(job, 'dp=2')\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'keras'])\n"
    )
    done = command("plain.py", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
