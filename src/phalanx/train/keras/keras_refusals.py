"""Parts of Keras models that are not supported, each with an alternative."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from phalanx.errors import Problem
from phalanx.train.keras.keras_own import is_keras_code

_STEPS = ("train_step", "compute_loss", "make_train_function")
_MEASURES = ("test_step", "make_test_function", "compute_metrics")
_POLICIES = ("float32", "int32", "int64")
_OF_FIT = {  # argument of fit → what it is here, and a line to copy
    "x": ("arrays in data", "data=(x, y)"),
    "y": ("arrays in data", "data=(x, y)"),
    "sample_weight": ("the third of data", "data=(x, y, sample_weight)"),
    "batch_size": ("batch, the global one", "batch=32"),
    "validation_data": ("evaluate, of the same form as data", "evaluate=(x, y), evaluate_every=100"),
    "validation_split": ("evaluate, of samples that data leaves out", "evaluate=(x[900:], y[900:])"),
    "validation_freq": ("evaluate_every, in optimizer steps", "evaluate_every=100"),
    "validation_steps": ("evaluate, which is read to its end", "evaluate=(x, y)"),
    "steps_per_epoch": ("steps, of the whole run; an epoch is what data has", "steps=1000"),
    "initial_epoch": ("nothing: a run resumes from its checkpoint", "phalanx train JOB --run runs/one --resume"),
    "verbose": ("a word on the command line", "phalanx train JOB --quiet"),
}
_CALLBACKS = {  # class of keras.callbacks → what does that here
    "EarlyStopping": 'best=px.Best("loss", patience=3), evaluate_every=100',
    "ModelCheckpoint": 'best=px.Best("loss"), evaluate_every=100',
    "LearningRateScheduler": "optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 1000))",
    "TensorBoard": "phalanx train JOB --tensorboard",
    "CSVLogger": "run.metrics().to_csv(path), after the run",
}


def model_problems(model: Any) -> list[Problem]:
    """Return the problems of ``model``, built and compiled."""
    found: list[Problem] = []

    def wrong(where: str, given: str, allowed: str, fix: str) -> None:
        found.append(Problem(where=where, given=given, allowed=allowed, fix=fix))

    kind = type(model)
    for name in _STEPS:
        if not is_keras_code(getattr(kind, name)):
            allowed = "a model that Keras' own fit trains; a step of several losses by px.Job(phases=...)"
            wrong("make", f"{kind.__name__}.{name}, a step of its own", allowed, f"a {kind.__name__} without {name}")
    for name in _MEASURES:
        if not getattr(kind, name).__module__.startswith("keras."):
            given, allowed = f"{kind.__name__}.{name}, an evaluation of its own", "metrics of compile(), or of the job"
            wrong("make", given, allowed, f"a {kind.__name__} without {name}")
    if model.jit_compile:
        wrong("make", "compile(jit_compile=True)", "eager layers, which plans cut and gather", "jit_compile=False")
    for layer in model._flatten_layers():
        what = f"layer {layer.name!r} ({type(layer).__name__})"
        if layer.activity_regularizer is not None:
            allowed = "regularisers of weights; or the activity as an output of the model with a loss of its own"
            wrong(
                "make",
                f"activity_regularizer of {what}: a loss of the batch that it sees",
                allowed,
                "kernel_regularizer",
            )
        for variable in layer._trainable_variables:
            if variable.constraint is not None:
                allowed = "weights without constraint, or decay of weights by the optimizer"
                given = f"{type(variable.constraint).__name__} on {variable.name} of {what}: it needs the whole weight"
                wrong("make", given, allowed, "keras.optimizers.AdamW(weight_decay=0.01)")
        policy = layer.dtype_policy
        if policy.quantization_mode is not None or policy.name not in _POLICIES:
            half = "fp16" if "float16" in policy.name and "bfloat16" not in policy.name else "bf16"
            allowed = "float32; the plan says what is computed in, and scales the loss where that needs it"
            wrong("make", f"the policy {policy.name} of {what}", allowed, f"precision={half} in the plan")
        if getattr(layer, "_remat_mode", None):
            wrong("make", f"RematScope around {what}", "recompute by the plan", "recompute=full in the plan")
        if getattr(layer, "stateful", False):
            allowed = "layers whose state begins anew with each batch"
            wrong("make", f"stateful=True in {what}: it continues from the previous batch", allowed, "stateful=False")
        if isinstance(layer, keras.layers.SpectralNormalization):
            allowed = (
                "layers that leave their weights to the optimizer: what a plan has gathered for a call is not kept"
            )
            wrong(
                "make",
                f"{what}, which writes its kernel anew in each call",
                allowed,
                "keras.optimizers.AdamW(weight_decay=0.01)",
            )
        if isinstance(layer, keras.layers.BatchNormalization) and layer.renorm:
            wrong("make", f"renorm=True in {what}", "BatchNormalization as it is by default", "renorm=False")
    return found[:8]


def fit_problems(settings: Mapping[str, Any], strange: Sequence[str]) -> list[Problem]:
    """Return a problem with its replacement for each argument of Keras' ``fit``; ``strange`` fit no job."""
    found = [
        Problem(where=name, given="an argument of Keras' fit", allowed=_OF_FIT[name][0], fix=_OF_FIT[name][1])
        for name in strange
        if name in _OF_FIT
    ]
    given = settings.get("callbacks")
    for one in given if isinstance(given, list | tuple) else [given]:
        if (kind := _callback_of_keras(one)) is not None:
            allowed = "names of events → functions, which change nothing of the run; best= ends it early"
            fix = _CALLBACKS.get(kind, 'callbacks={"evaluate": print}')
            found.append(Problem(where="callbacks", given=f"{kind} of keras.callbacks", allowed=allowed, fix=fix))
    return found


def _callback_of_keras(one: Any) -> str | None:
    names = [kind.__name__ for kind in type(one).__mro__ if kind.__module__.startswith("keras.")]
    return names[0] if "Callback" in names else None
