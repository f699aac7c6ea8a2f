"""A Keras model's step: Keras' own ``fit`` on torch, a job of it here, and ``tf.distribute.MirroredStrategy``.

Usage: keras_step.py [--rounds N] [--no-tensorflow]

The same model from the same start, on the same batches in the same order: losses have to agree. Each contender runs in
a process of its own, in turn; times are medians of steps. TensorFlow, two virtual devices of one CPU, runs where it is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from compare import announce

WIDTH, CLASSES, SAMPLES, BATCH, EPOCHS, SKIP = 128, 10, 3200, 64, 2, 20
BAR, NEAR, COMPARED = 1.0, 1e-5, 20  # times fit; of losses, in the first steps: rounding grows from step to step
CONTENDERS = ("fit", "single", "dp=2", "mirrored")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 64)).astype("float32"), rng.integers(0, CLASSES, size=(SAMPLES,))


def make() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def of_fit(start: Path, mirrored: bool) -> dict[str, Any]:
    """Keras' own training; on TensorFlow over two virtual devices where ``mirrored``."""
    if mirrored:
        import tensorflow as tf

        device = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = make()
            model.set_weights(_read(start))
    else:
        model = make()
        np.savez(start, *model.get_weights())
    import keras

    class Each(keras.callbacks.Callback):
        losses: list[float]
        times: list[float]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))
            self.times.append(time.perf_counter())

    each = Each()
    each.losses, each.times = [], []
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[each])
    return {"losses": each.losses, "step": _step(each.times)}


def of_job(plan: str, start: Path) -> dict[str, Any]:
    """The same by a job under ``plan``."""
    import phalanx as px

    def begun() -> Any:
        model = make()
        model.set_weights(_read(start))
        return model

    times: list[float] = []
    job = px.from_keras(begun, data=data(), batch=BATCH, epochs=EPOCHS, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        run = px.fit(job, "" if plan == "single" else plan, folder=f"{folder}/run", watch=False, forecast="none")
        times = [event["time"] for event in run.events("step")]
        return {"losses": run.losses, "step": _step(times)}


def _read(start: Path) -> list[np.ndarray]:
    with np.load(start) as found:
        return [found[name] for name in found.files]


def _step(times: list[float]) -> float:
    """Seconds of a step: the mean over blocks of steps, which are logged together, after those that warm up."""
    settled = times[SKIP:]
    return (settled[-1] - settled[0]) / (len(settled) - 1)


def measured(name: str, start: Path) -> dict[str, Any]:
    """What ``name`` gives in a process of its own."""
    backend = "tensorflow" if name == "mirrored" else "torch"
    environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, "--as", name, "--start", str(start)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-tensorflow", action="store_true")
    parser.add_argument("--as", dest="name", choices=CONTENDERS)
    parser.add_argument("--start", type=Path)
    asked = parser.parse_args()
    if asked.name:
        own = asked.name in ("fit", "mirrored")
        found = of_fit(asked.start, asked.name == "mirrored") if own else of_job(asked.name, asked.start)
        print(json.dumps(found))
        return 0
    announce()
    names = [one for one in CONTENDERS if one != "mirrored" or not (asked.no_tensorflow or _missing())]
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.npz"
        rounds = [{name: measured(name, start) for name in names} for _ in range(asked.rounds)]
    first, met = rounds[0]["fit"]["losses"], True
    for name in names:
        step = statistics.median(each[name]["step"] for each in rounds)
        ratio = statistics.median(each[name]["step"] / each["fit"]["step"] for each in rounds)
        pairs = zip(rounds[0][name]["losses"][:COMPARED], first[:COMPARED], strict=True)
        far = max(abs(a - b) for a, b in pairs)
        good = far < NEAR and (name != "single" or ratio <= BAR)
        met = met and good
        print(f"{name:10} {step * 1e3:7.2f} ms a step   {ratio:5.2f} x fit   losses within {far:.1e}")
    if "mirrored" not in names:
        print("mirrored   TensorFlow is not installed, or was left out")
    return 0 if met else 1


def _missing() -> bool:
    return importlib.util.find_spec("tensorflow") is None


if __name__ == "__main__":
    sys.exit(main())
