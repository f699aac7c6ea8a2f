"""Dropout that is the same however a batch is split: masks are drawn by sample and layer.

A proof switches dropout off, or on request draws it so: whether an element is kept is a hash of the job's seed, the
step, the sample's id, the layer's path with which of its masks it is, and the element's place within the sample (a
counter-based generator in the sense of Salmon et al. 2011, with SplitMix64's finaliser). No rank, no micro-batch and no
order is in it, so that a plan drops what one device drops, and a plan that drops anything else is unequal. The plain
loop that a plan is held against has the same rule from ``docs/explanation/proof.md``, in lines of its own.

Samples are along the first dimension, alone or with what is within a sample (tokens) folded into it; or along the
second, where the first has another length. What is of no sample, such as a weight, is drawn by layer and step.

A layer's *path* is the modules that run, outermost first, each with the number of times that the module around it has
called it before in this forward, such as ``blocks.0*0/blocks.0.drop*1``. A module that is used twice thus has two
paths, and a path is the same however a model is split. Hooks follow them in every thread (``RunningLayers``).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phalanx.config import Job, Plan
from phalanx.data.loader import BatchPieces
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.local_shards import is_sliced
from phalanx.parallel.pipeline import stage as stages
from phalanx.parallel.rng_streams import stream
from phalanx.train import grad_accumulation
from phalanx.train.parameter_server.gradient_worker import Computer
from phalanx.train.split_causes import splits_batches

_BITS = 24  # of a fp32 number in [0, 1)


@dataclass(frozen=True, slots=True)
class MaskPlace:
    """What a mask is drawn by, but for the elements' places: step, samples, the layer's path and which of its masks."""

    step: int
    ids: tuple[int, ...]
    layer: str


class BySample:
    """Masks by sample and layer, in place of torch's, for one job in this process."""

    def __init__(self, seed: int, of_no_sample: Iterable[str] = ()) -> None:
        """``of_no_sample`` are the names of masks that the reference drew by layer only."""
        self._seed, self._of_no_sample = seed, frozenset(of_no_sample)
        self._running = RunningLayers()
        self._step = -1
        self._drawn: dict[int, MaskPlace] = {}

    def install(self) -> None:
        """From now on every dropout of this process is drawn so; what cannot be is the identity."""
        for name in ("alpha_dropout", "feature_alpha_dropout"):
            setattr(functional, name, lambda input, *_, **__: input)
        functional.dropout = self._dropout
        for dims in (1, 2, 3):
            setattr(functional, f"dropout{dims}d", self._of_channels)
        functional.scaled_dot_product_attention = self._attention(functional.scaled_dot_product_attention)
        self._running.install()

    def mask(self, shape: Sequence[int], rate: float, device: torch.device, place: MaskPlace) -> Tensor:
        """Which elements are kept: 1, over the share that is, or 0."""
        keys, each = self._keys(shape, place)
        numbers = torch.arange(1, each + 1, dtype=torch.int64).unsqueeze(0) * _signed(0x9E3779B97F4A7C15)
        drawn = _mixed(torch.tensor(keys, dtype=torch.int64).unsqueeze(1) + numbers)
        kept = _shifted(drawn, 64 - _BITS) >= round(rate * 2**_BITS)
        mask = kept.to(torch.float32) / (1.0 - rate) if rate < 1.0 else kept.to(torch.float32) * 0.0
        if len(keys) > 1 and _along(shape, len(keys)) == 1:  # else samples are first, if they are in it
            mask = mask.reshape(len(keys), shape[0], *shape[2:]).transpose(0, 1)
        return mask.reshape(tuple(shape)).to(device)

    def _keys(self, shape: Sequence[int], place: MaskPlace) -> tuple[list[int], int]:
        words = (place.step, crc32(place.layer.encode()))
        samples = len(place.ids)
        if _along(shape, samples) is None or place.layer in self._of_no_sample:
            return [stream(self._seed, *words)], math.prod(shape)
        return [stream(self._seed, *words, 1 + one) for one in place.ids], math.prod(shape) // samples

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return self._times(input, tuple(input.shape), p, inplace)

    def _of_channels(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return self._times(input, (*input.shape[:2], *(1 for _ in input.shape[2:])), p, inplace)

    def _times(self, input: Tensor, shape: Sequence[int], rate: float, inplace: bool) -> Tensor:
        """``input`` times its mask: one operation, on stages of a pipeline that only follow the model as well."""
        mask: Tensor | float = 1.0
        if not only_looked_at(input):
            with torch._C.DisableTorchFunction():
                mask = self.mask(shape, rate, input.device, self._place(input.device)).to(input.dtype)
        return input.mul_(mask) if inplace else input * mask

    def _attention(self, fused: Any) -> Any:
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **named: Any,
        ) -> Tensor:
            looked_at = is_sliced(query) and only_looked_at(query)  # for a split, which is that of any other run
            if dropout_p == 0.0 or looked_at:
                return fused(query, key, value, attn_mask, 0.0, is_causal, **named)
            if named.get("enable_gqa"):
                times = query.shape[-3] // key.shape[-3]
                key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
            scores = query @ key.transpose(-2, -1) * (named.get("scale") or 1.0 / math.sqrt(query.shape[-1]))
            if is_causal:
                ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
                scores = scores.masked_fill(ahead, -math.inf)
            if attn_mask is not None:
                barred = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, -math.inf) if barred else scores + attn_mask
            return self._dropout(scores.softmax(-1), dropout_p) @ value

        return attention

    def _place(self, device: torch.device) -> MaskPlace:
        """Where this call is; one that is computed a second time for backward is where it was the first time.

        A second time nobody says what is computed, but the stream of random numbers is what it was: one number of it
        names the call. Where it is not what it was, the mask is another, as in any other run.
        """
        name = int(torch.randint(2**62, (), device=device))
        here = self._running.here
        if name not in self._drawn:
            if here.step != self._step:
                self._step, self._drawn = here.step, {}
            self._drawn[name] = MaskPlace(here.step, here.ids, here.layers[-1].draw())
        return self._drawn[name]


def only_looked_at(tensor: Tensor) -> bool:
    """Whether nothing is computed with it, or not here: a fake, or a slice of a dry run."""
    if is_sliced(tensor):
        dry = any(one.axis.group is None and one.axis.size > 1 for one in tensor.placed)
        return dry or only_looked_at(tensor.local)
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def off_by_sample(module: nn.Module) -> list[str]:
    """Names of modules whose dropout cannot be drawn by sample, and is off in any proof."""
    kinds = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase)
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, kinds) and float(getattr(child, "p", getattr(child, "dropout", 0.0))) > 0
    ]


def refuse_compiled(plan: Plan) -> None:
    """Refuse a plan whose blocks are compiled: their code draws masks of its own."""
    if plan.compile:
        given = f'"{plan}", which compiles: compiled blocks draw masks of their own, not by sample'
        allowed = "a plan without compile; without dropout=True also one with it"
        fix = f'dropout=True, plan="{replace(plan, compile=False)}"'
        raise RefusedError.of(where="dropout", given=given, allowed=allowed, fix=fix)


def refuse_phases(job: Job) -> None:
    """Refuse a job with phases, each of which calls a layer as often as it likes in one step."""
    if job.phases:
        given = "a job with phases: a mask by sample and layer is drawn for one forward of each sample in a step"
        raise RefusedError.of(
            "dropout", given, "jobs with one loss; without dropout=True also phases", "no dropout=True"
        )


def refuse_masks(job: Job, plan: Plan, of_no_sample: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Refuse a plan that splits the batch where a mask of no sample has another shape in each step.

    Its elements belong to samples, as packed tokens do, and nobody says to which.
    """
    unknown = {name: shapes for name, shapes in of_no_sample.items() if len(shapes) > 1}
    if not unknown or not (splits_batches(job, plan) or plan.tp * plan.cp > 1):
        return
    name, shapes = next(iter(unknown.items()))
    layer = name.rpartition(":")[0].rpartition("/")[2].rpartition("*")[0] or "the model itself"
    problem = Problem(
        where="dropout",
        given=f"dropout of {layer} on tensors of shape {list(shapes[0])}, then {list(shapes[1])}, in none of "
        "whose dimensions are the samples: nobody knows whose elements these are",
        allowed="dropout of tensors whose first or second dimension is the samples, alone or with what is "
        "within a sample",
        fix=f'prove without dropout=True, which measures the masks of "{plan}" and compares the rest',
    )
    raise RefusedError([problem])


def _along(shape: Sequence[int], samples: int) -> int | None:
    """The dimension along which the samples are."""
    if not samples or not shape:
        return None
    if shape[0] == samples:
        return 0
    if len(shape) > 1 and shape[1] == samples:
        return 1
    return 0 if shape[0] and shape[0] % samples == 0 else None


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    """Without the sign that int64 shifts in."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


@dataclass(slots=True)
class Layer:
    """A module that runs.

    Attributes:
        path: from the model inwards; empty for the model itself.
        called: how often it has called each module, by name.
        drawn: how many masks it has drawn itself.
    """

    path: str = ""
    called: Counter[str] = field(default_factory=Counter[str])
    drawn: int = 0

    def call(self, name: str) -> Layer:
        """The module ``name``, which it now calls."""
        path = f"{self.path}/{name}*{self.called[name]}".lstrip("/")
        self.called[name] += 1
        return Layer(path)

    def draw(self) -> str:
        """The name of the next mask that it draws."""
        self.drawn += 1
        return f"{self.path}:{self.drawn - 1}"


@dataclass(slots=True)
class RunningState:
    """What one thread computes on: the step, the samples, and the layers that are running, the model itself first."""

    step: int = -1
    ids: tuple[int, ...] = ()
    layers: list[Layer] = field(default_factory=lambda: [Layer()])


class RunningLayers:
    """Follows one job in this process, from ``install`` on."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._here = threading.local()

    @property
    def here(self) -> RunningState:
        """What this thread computes on; in backward what it last did."""
        if not hasattr(self._here, "running"):
            self._here.running = RunningState()
        return self._here.running

    def install(self) -> None:
        register_module_forward_pre_hook(self._begins)
        register_module_forward_hook(self._ends, always_call=True)
        work_of_a_step: Any = grad_accumulation.GradAccumulation
        forward = work_of_a_step.forward

        def followed(work: Any, module: Any, device: torch.device, micro: Any) -> Any:
            self._starts(work._step.progress.step, micro.ids)
            self._know(work._step.layout.module)
            self._know(module)
            return forward(work, module, device, micro)

        work_of_a_step.forward = followed
        self._follow_stages()
        self._follow_workers()

    def _starts(self, step: int, ids: tuple[int, ...]) -> None:
        self._here.running = RunningState(step, ids)

    def _follow_workers(self) -> None:
        """Those of servers compute pieces by themselves."""
        computers: Any = Computer
        data: Any = BatchPieces
        gradients, micros = computers.gradients, data.micros

        def known(computer: Any, *rest: Any) -> Any:
            self._know(computer._layout.module)
            return gradients(computer, *rest)

        def one_by_one(pieces: BatchPieces, step: int, part: int) -> Iterator[Any]:
            for micro in micros(pieces, step, part):
                self._starts(step, micro.ids)
                yield micro

        computers.gradients, data.micros = known, one_by_one

    def _follow_stages(self) -> None:
        """A block that another stage runs counts as called."""
        run_of_a_stage: Any = stages._StageRun
        called = run_of_a_stage.called

        def counted(run: Any, unit: nn.Module, *rest: Any) -> Any:
            outermost, before = not run.inside, self._called(unit)
            result = called(run, unit, *rest)
            if outermost and not run.real and self._called(unit) == before:
                self.here.layers[-1].called[self._names.get(id(unit), "")] += 1
            return result

        run_of_a_stage.called = counted

    def _called(self, unit: nn.Module) -> int:
        return self.here.layers[-1].called[self._names.get(id(unit), "")]

    def _know(self, module: Any) -> None:
        if isinstance(module, nn.Module) and id(module) not in self._names:
            for name, child in module.named_modules():
                self._names.setdefault(id(child), name)

    def _begins(self, module: nn.Module, _: Any) -> None:
        layers, name = self.here.layers, self._names.get(id(module))
        if name == "":
            layers[:] = [Layer()]
        # What has no name of its own, such as a wrapper, is a part of what calls it.
        layers.append(layers[-1].call(name) if name else layers[-1])

    def _ends(self, *_: Any) -> None:
        if len(self.here.layers) > 1:
            self.here.layers.pop()
