"""A Keras model as a torch module, and the function of a job that makes it."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import torch
from keras.src.backend.common import global_state
from torch import Tensor, nn

from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.train.keras.keras_own import DEVICE, NAMES, is_keras_code
from phalanx.train.keras.keras_penalties import PENALTIES
from phalanx.train.keras.layer_modules import as_modules, home_of, is_regularised, masks_of, on_device_of
from phalanx.units import show_names


class KerasOutput(NamedTuple):
    """The output of a model with regularisers or masks: its output, their penalty, and the masks of its tensors."""

    output: Any
    penalty: Tensor | None
    masks: tuple[Tensor | None, ...] | None


class KerasModule(nn.Module):
    """A Keras model whose layers are its children, under their names in the model.

    It takes the model's arguments and returns the model's output, in training mode as in Keras' ``fit``; with the
    penalty if layers have regularisers.
    """

    single_layers = True
    """Sequential and Functional models are flat: two layers that pair up have no block in common."""

    def __init__(self, model: keras.Model, notes: tuple[str, ...] = ()) -> None:
        """Wrap the model; ``notes`` are sentences on its job."""
        super().__init__()
        self._notes = notes
        self.__dict__["keras_model"] = model
        as_modules(model, self)
        layers = model._flatten_layers()
        self._penalised = [layer for layer in layers if is_regularised(layer)]
        self.penalises = bool(self._penalised)
        self.masks = any(_masks(layer) for layer in layers)
        # Of Keras' own layers those that add losses are refused when the job is made.
        self._may_add = [layer for layer in layers if not is_keras_code(type(layer).call)]

    def forward(self, x: Any) -> Any:
        """Return the model's output for ``x``.

        Raises:
            RefusedError: a layer has added a loss of its own, or one with regularisers was not called.
        """
        model = self.__dict__["keras_model"]
        training = {"training": self.training} if model._call_has_training_arg else {}
        before = PENALTIES.terms
        PENALTIES.terms, PENALTIES.layers = ([] if self.penalises else None), set()
        try:
            with on_device_of(x):
                output = model(x, **training)
            terms = PENALTIES.terms
            if terms is not None and (left := [one for one in self._penalised if id(one) not in PENALTIES.layers]):
                _refuse_uncalled(left[0])
        finally:
            PENALTIES.terms = before
        if any(layer._losses for layer in self._may_add):
            _refuse_added(self._may_add)
        masks = masks_of(output) if self.masks else None
        if not terms and masks is None:
            return output
        return KerasOutput(output, torch.stack(terms).sum() if terms else None, masks)

    @property
    def learning(self) -> list[Tensor]:
        """Return the parameters of the model's trainable variables, in Keras' order."""
        homes = (home_of(variable) for variable in self.__dict__["keras_model"].trainable_variables)
        return [getattr(home, key) for home, key in homes]

    def own_notes(self) -> list[str]:
        """Return a sentence for each remark on the model under any plan."""
        drawing = [name for name, layer in self.named_modules() if vars(layer).get("draws_in_training")]
        if self.__dict__["keras_model"]._call_has_training_arg or not drawing:
            return [*self._notes]
        return [
            *self._notes,
            f"call of the model takes no `training`: in Keras' own fit, and so here, {show_names(drawing)} drops "
            "nothing. call(self, x, training=None) would have it drop in training.",
        ]

    def plan_problems(self, plan: Plan) -> list[Problem]:
        """Return the problems of the model with ``plan``."""
        found: list[Problem] = []
        if plan.compile:
            given = "compile=true for a model of Keras, whose layers decide by Python's state how they run"
            fix = str(replace(plan, compile=False))
            found.append(Problem(where="plan.compile", given=given, allowed="plans without compile", fix=fix))
        fix = str(Plan(dp=plan.dp, fsdp=plan.fsdp * plan.pp * plan.cp, tp=plan.tp, precision=plan.precision))
        if plan.pp > 1 and self.penalises:
            given = f"pp={plan.pp} for a model with regularisers: its last stage has the weights of no other"
            allowed = "plans without pp; or decay by the optimizer, such as keras.optimizers.AdamW(weight_decay=...)"
            found.append(Problem(where="plan.pp", given=given, allowed=allowed, fix=fix))
        for key, size in (("pp", plan.pp), ("cp", plan.cp)):
            if size > 1 and self.masks:
                given = f"{key}={size} for a model with masks, which Keras ties to tensors: those that go to another"
                given += " rank leave theirs behind"
                allowed = f"plans without {key}; or a mask that is an input of the model"
                found.append(Problem(where=f"plan.{key}", given=given, allowed=allowed, fix=fix))
        return found


@dataclass(frozen=True, slots=True)
class KerasMaker:
    """The ``Job.model`` of a Keras job: it builds the model, and makes a torch module of it.

    Attributes:
        make: builds the Keras model, compiled or not.
        example: the model's input of one sample; a model without own shapes is called with it once.
        notes: a sentence for each remark on the job under any plan.
    """

    make: Callable[[], Any]
    example: Callable[[], Any]
    notes: tuple[str, ...] = ()

    def __call__(self) -> KerasModule:
        """Return the module, on torch's default device, with initial values by torch's and Python's seeds."""
        return KerasModule(self.plain(), self.notes)

    def plain(self) -> Any:
        """Return the built Keras model; its layers have the names of a fresh process.

        Raises:
            SpecError: ``make`` does not return a Keras model.
        """
        with _names_from_start(), _on_default_device():
            model = self.make()
            if not isinstance(model, keras.Model):
                given, allowed = f"a function that gives a {type(model).__name__}", "one that builds a keras.Model"
                raise SpecError.of("make", given, allowed, "px.from_keras(make, data=(x, y), batch=32, epochs=5)")
            if not model.built or any(not layer.built for layer in model._flatten_layers()):
                model(self.example())
        return model


@contextmanager
def _names_from_start() -> Iterator[None]:
    """Give layers the names of a process that has not made any layer before."""
    before = global_state.get_global_attribute(NAMES)
    global_state.set_global_attribute(NAMES, defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(NAMES, before)


@contextmanager
def _on_default_device() -> Iterator[None]:
    before = global_state.get_global_attribute(DEVICE)
    global_state.set_global_attribute(DEVICE, str(torch.get_default_device()))
    try:
        yield
    finally:
        global_state.set_global_attribute(DEVICE, before)


def _masks(layer: Any) -> bool:
    own = not is_keras_code(type(layer).compute_mask)
    return own or isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))


def _refuse_uncalled(layer: Any) -> None:
    raise RefusedError.of(
        "job.model",
        f"regularisers of {layer.name!r} ({type(layer).__name__}), which Keras counts, and the model does not call",
        "regularisers of layers that are called: there a plan has their weights at hand",
        "kernel_regularizer=None for that layer",
    )


def _refuse_added(layers: list[Any]) -> None:
    for layer in layers:
        if layer._losses:
            raise RefusedError.of(
                "job.model",
                f"add_loss in layer {layer.name!r} ({type(layer).__name__}): a loss of the batch that it sees",
                "losses of compile(), and regularisers of weights",
                "the term as an output of the model, with a loss of its own in compile(loss=[...])",
            )
