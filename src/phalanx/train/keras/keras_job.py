"""A job of a Keras model:

``px.from_keras`` takes the function that builds and compiles it, and arguments of ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from phalanx.config import Job
from phalanx.errors import MissingExtraError, Problem, SpecError

if TYPE_CHECKING:
    from phalanx.train.keras.compiled import Compiled
    from phalanx.train.keras.keras_data import KerasData
    from phalanx.train.keras.keras_module import KerasMaker
    from phalanx.train.keras.keras_optimizers import OptimizerParts

_COMPILE = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
_OURS = ("model", "inputs")
_BACKEND = "KERAS_BACKEND=torch in the environment, before Keras is first imported"
_NOT_MEASURED = (
    "metrics of compile() are of evaluations, of which this job has none: evaluate=(x, y) in px.from_keras gives them."
)


def from_keras(
    make: Callable[[], Any],
    *,
    data: Any,
    batch: int,
    evaluate: Any = None,
    class_weight: Mapping[int, float] | None = None,
    **settings: Any,
) -> Job:
    """Return a job for the Keras model that ``make`` builds, on Keras' torch backend.

    It trains like Keras' ``fit``: by Keras' losses, reductions, sample and class weights and regularisers, by the
    formula of its optimizer and its learning-rate schedule. ``docs/how-to/keras.md`` lists which parts are exact under
    which plan.

    Args:
        make: builds the model, a Sequential, Functional or subclassed one, and compiles it, or leaves that to
            ``settings``. With ``keras.utils.set_random_seed`` as its first line the run starts with the script's
            values.
        data: ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, a ``keras.utils.PyDataset`` whose batches have
            ``batch`` samples; or a function that returns one of these, or a batched ``tf.data.Dataset``.
        batch: the **global** batch, on any number of devices; Keras' ``batch_size``.
        evaluate: the data for evaluation, as ``data``; Keras' ``validation_data``.
        class_weight: class → the weight of its samples, as of ``fit``.
        settings: arguments of ``compile`` (optimizer, loss, loss_weights, metrics, weighted_metrics), if ``make`` does
            not compile; and fields of ``Job``, such as ``epochs=5`` or ``shuffle=False``.

    Raises:
        SpecError: with the name of an unsupported part: a custom ``train_step``, an optimizer without a formula here,
            a policy of dtypes, a layer that adds a loss of its own; or Keras runs on another backend.
        MissingExtraError: Keras is not installed.
    """
    _need_keras()
    from phalanx.train.keras.keras_data import KerasData, order_of_batches, rows_of
    from phalanx.train.keras.keras_module import KerasMaker
    from phalanx.train.keras.keras_optimizers import parts_of

    given = _compile_settings(settings)
    source = KerasData(data, batch, class_weight)
    maker = KerasMaker(_compiling(make, given), source.example)
    model = _looked_at(maker)
    how = _compiled(model, batch)
    _need_whole_batches(how, source, batch, settings)
    parts = parts_of(model.optimizer)
    _need_one_of_two(parts, settings)
    found: dict[str, Any] = {"schedule": parts.schedule, "clip": parts.clip, "optimizer": parts, "loss": how.loss_of}
    if source.in_batches and settings.get("shuffle") is not False and settings.get("sampler") is None:
        settings.pop("shuffle", None)
        found["sampler"] = order_of_batches(len(source()), batch)
    measures = how.metrics is not None or how.weighted_metrics is not None
    if evaluate is not None:
        found |= {"evaluate": KerasData(evaluate, batch), **({"metrics": how.metrics_of} if measures else {})}
    elif measures:
        maker = replace(maker, notes=(_NOT_MEASURED,))
    own: dict[str, Any] = {"model": maker, "data": source, "batch": batch, "inputs": lambda one: (rows_of(one, "x"),)}
    return Job(**{**found, **own, **settings})


def _compile_settings(settings: dict[str, Any]) -> dict[str, Any]:
    from phalanx.train.keras.keras_refusals import fit_problems

    known = {field.name for field in fields(Job)} - {*_OURS}
    strange = [name for name in settings if name not in known and name not in _COMPILE]
    if problems := fit_problems(settings, strange):
        raise SpecError(problems)
    if strange:
        allowed = f"what compile takes ({', '.join(_COMPILE)}) and fields of px.Job"
        given = " ".join(repr(settings[strange[0]]).split())[:60]
        raise SpecError.of(strange[0], given, allowed, "epochs=5")
    return {name: settings.pop(name) for name in _COMPILE if name in settings}


def _looked_at(maker: KerasMaker) -> Any:
    from phalanx.train.keras.keras_refusals import model_problems

    with _only_looked_at():
        model = maker.plain()
    _need_compiled(model)
    if problems := model_problems(model):
        raise SpecError(problems)
    return model


def _compiled(model: Any, batch: int) -> Compiled:
    from phalanx.train.keras.compiled import Compiled, check_reduction

    config = model._compile_config.config
    check_reduction(config["loss"])
    return Compiled(
        **{name: config[name] for name in ("loss", "loss_weights", "metrics", "weighted_metrics")},
        output_names=getattr(model, "output_names", None),
        batch=batch,
    )


def _compiling(make: Callable[[], Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    if not callable(make) or hasattr(make, "named_parameters"):
        allowed = "a function that builds the model when called: each process builds its own"
        raise SpecError.of("make", f"a {type(make).__name__}", allowed, "px.from_keras(make, data=(x, y), batch=32)")
    if not given:
        return make

    def compiled() -> Any:
        model = make()
        if getattr(model, "compiled", False):
            name = next(iter(given))
            allowed = "compile() in the function, or its arguments here"
            raise SpecError.of(name, "beside a model that is compiled already", allowed, f"model.compile({name}=...)")
        model.compile(**{name: _anew(value) for name, value in given.items()})
        return model

    return compiled


def _anew(given: Any) -> Any:
    import keras

    if not isinstance(given, keras.optimizers.Optimizer) or not type(given).__module__.startswith("keras."):
        return given
    config: dict[str, Any] = given.get_config()
    if not isinstance(given._learning_rate, keras.Variable):
        config["learning_rate"] = given._learning_rate  # a schedule, of a class that Keras need not know by name
    made: Any = type(given).from_config(config)
    made.iterations.assign(given.iterations)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(given, name):
            setattr(made, name, getattr(given, name))
    return made


def _need_keras() -> None:
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name == "keras":
            raise MissingExtraError("keras", "keras") from None
        given = f"Keras on a backend that is not installed ({error.name})"
        raise SpecError.of("KERAS_BACKEND", given, "torch, whose tensors plans are of", _BACKEND) from None
    if keras.backend.backend() != "torch":
        given = keras.backend.backend()
        raise SpecError.of("KERAS_BACKEND", given, "torch, whose tensors plans are of", _BACKEND)


def _need_compiled(model: Any) -> None:
    problems: list[Problem] = []
    if not model.compiled or model.optimizer is None:
        fix = 'model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")'
        problems.append(Problem(where="make", given="a model that is not compiled", allowed="a compiled one", fix=fix))
    elif model._compile_loss is None:
        allowed = "compile() with a loss: what layers add by themselves is of the batch that they happen to see"
        fix = 'model.compile(optimizer="adam", loss="mse")'
        problems.append(Problem(where="loss", given="none", allowed=allowed, fix=fix))
    if problems:
        raise SpecError(problems)


def _need_one_of_two(parts: OptimizerParts, settings: Mapping[str, Any]) -> None:
    own = {"schedule": parts.schedule.function, "clip": parts.clip}
    for name, what in (("schedule", "LearningRateSchedule"), ("clip", "global_clipnorm or clipvalue")):
        if own[name] is not None and settings.get(name) is not None:
            given, allowed = f"beside the optimizer's own {what}", "one of the two"
            raise SpecError.of(name, given, allowed, f"px.from_keras(...) without {name}")


def _need_whole_batches(how: Compiled, source: KerasData, batch: int, settings: Mapping[str, Any]) -> None:
    """Refuse a sum over each batch: the last, smaller batch would be divided like the others."""
    from torch.utils._pytree import tree_leaves

    if settings.get("drop_last") or all(getattr(one, "reduction", "") != "sum" for one in tree_leaves(how.loss)):
        return
    samples = len(source()) if hasattr(source(), "__len__") else 0
    if samples % batch or not samples:
        given = f'reduction="sum" with {samples or "unknown"} samples in batches of {batch}'
        raise SpecError.of("loss", given, "whole batches alone, or a mean", "drop_last=True")


@contextmanager
def _only_looked_at() -> Iterator[None]:
    """Restore the random state after a model is traced, and compute with one thread.

    Threads of a pool would be missing in workers forked from this process.
    """
    import torch

    from phalanx.data.sampler import seeded

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with seeded(0):
            yield
    finally:
        torch.set_num_threads(threads)
