"""Jobs of the record: each model at its full size and at a small one, its data, and its FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import phalanx as px
from gpu_record.models import Llama, ResNet, Size, Transformer, make

_SAMPLES = 64  # samples held in memory
_RESNET_50 = ((64, 3), (128, 4), (256, 6), (512, 3))
_MASKED = 0.15  # share of tokens that BERT predicts

Target = Callable[[dict[str, Tensor]], Tensor]
"""Return the part of a batch that outputs are compared with."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job with the numbers that its rows need.

    Attributes:
        build: makes the module, without values.
        size: of a transformer; ``None`` for ResNet.
        plan: keys that every plan of Phalanx gets.
        pixels: side of an image.
        classes: of an image.
    """

    name: str
    label: str
    build: Callable[[], nn.Module]
    batch: int
    size: Size | None = None
    plan: str = "precision=bf16"
    pixels: int = 0
    classes: int = 0

    def job(self, steps: int = 100_000, batch: int = 0) -> px.Job:
        """Return the job."""
        channels_last = self.size is None
        return px.Job(
            name=self.name,
            model=lambda: _formatted(make(self.build), channels_last),
            data=lambda: self.data(),
            inputs=self.inputs,
            loss=lambda output, batch: px.cross_entropy(output, self.target(batch), ignore_index=self.ignored),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            batch=batch or self.batch,
            steps=steps,
        )

    @property
    def masked(self) -> bool:
        return self.name == "bert_base"

    @property
    def ignored(self) -> int | None:
        return -100 if self.masked else None

    def data(self) -> px.Table:
        """Return random samples, held in memory."""
        if self.size is None:
            return _images(self.pixels, self.classes)
        return _tokens(self.size.context + (not self.masked), self.size.vocabulary, self.masked)

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        if self.size is None:
            return batch["image"]
        return batch["tokens"] if self.masked else batch["tokens"][:, :-1]

    def target(self, batch: dict[str, Tensor]) -> Tensor:
        if self.size is None:
            return batch["label"]
        return batch["label"] if self.masked else batch["tokens"][:, 1:]

    @property
    def units(self) -> int:
        """Tokens of a sample, or 1 for an image."""
        return self.size.context if self.size else 1

    @property
    def unit(self) -> str:
        return "tokens/s" if self.size else "samples/s"

    def on_meta(self) -> nn.Module:
        """Return the module without values."""
        with torch.device("meta"):
            return self.build()

    def flops(self, batch: int) -> float:
        """Return the model's FLOPs in one step, without recomputation.

        Transformers, by Chowdhery et al., "PaLM", 2022, appendix B: 6 FLOPs for each token and each parameter of a
        matrix product, plus 12 x layers x heads x head width x tokens of a sample for attention. A tied head counts
        once; embeddings that are only looked up do not. With LoRA, frozen weights have no gradient: 4 in place of 6,
        and attention as before. ResNet: three times the forward FLOPs that torch counts.
        """
        module = self.on_meta()
        if self.size is None:
            return 3.0 * batch * _forward_flops(module, self.pixels)
        size = self.size
        looked_up = {"place.weight"} if hasattr(module, "place") else {"token.weight"}
        each = sum(
            (6 if parameter.requires_grad else 4) * parameter.numel()
            for name, parameter in module.named_parameters()
            if name not in looked_up
        )
        attention = 12 * size.layers * size.width * size.context
        return float(batch * size.context * (each + attention))

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.on_meta().parameters())


def _formatted(module: nn.Module, channels_last: bool) -> nn.Module:
    # Convolutions on tensor cores want channels last.
    return module.to(memory_format=torch.channels_last) if channels_last else module  # pyrefly: ignore


def _forward_flops(module: nn.Module, pixels: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.empty(1, 3, pixels, pixels, device="meta"))
    return counter.get_total_flops()


@cache
def _tokens(length: int, vocabulary: int, masked: bool) -> px.Table:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (_SAMPLES, length), generator=generator)
    if not masked:
        return px.Table(tokens=tokens)
    hidden = torch.rand(tokens.shape, generator=generator) < _MASKED
    return px.Table(tokens=tokens.masked_fill(hidden, 0), label=tokens.masked_fill(~hidden, -100))


@cache
def _images(pixels: int, classes: int) -> px.Table:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2 * _SAMPLES, 3, pixels, pixels, generator=generator)
    return px.Table(image=images, label=torch.randint(classes, (2 * _SAMPLES,), generator=generator))


def _sizes(small: bool) -> dict[str, Size]:
    llama = Size(
        layers=16, width=2048, heads=32, key_heads=8, inner=8192, vocabulary=32000, context=2048
    )  # 1.1 billion parameters
    lora = Size(
        layers=32, width=4096, heads=32, key_heads=8, inner=14336, vocabulary=128256, context=2048, rank=16
    )  # Llama 3 8B
    base = Size(layers=12, width=768, heads=12, key_heads=12, inner=3072, vocabulary=50304, context=1024)
    tiny = {"layers": 2, "width": 64, "heads": 4, "inner": 128, "vocabulary": 256, "context": 64}
    if small:
        llama, lora = replace(llama, **tiny, key_heads=2), replace(lora, **tiny, key_heads=2, rank=4)
        base = replace(base, **tiny, key_heads=4)
    bert = replace(base, vocabulary=256 if small else 30528, context=64 if small else 512)
    return {"llama_1b": llama, "lora_8b": lora, "gpt2_124m": base, "bert_base": bert}


def workload(name: str, *, small: bool, memory_gib: float = 80.0) -> Workload:
    """Return the workload of a step; batches are chosen for the device's memory."""
    sizes = _sizes(small)
    large = memory_gib > 100
    if name == "resnet50":
        stages, pixels, classes = (((8, 1), (16, 1)), 32, 10) if small else (_RESNET_50, 224, 1000)
        batch = 8 if small else 128
        return Workload(
            name=name,
            label="ResNet-50",
            build=lambda: ResNet(stages, classes),
            batch=batch,
            pixels=pixels,
            classes=classes,
        )
    size = sizes[name]
    if name in ("llama_1b", "lora_8b"):
        batches = {"llama_1b": 8 if large else 4, "lora_8b": 4}
        label = "Llama 1B" if name == "llama_1b" else "Llama 8B LoRA"
        plan = "precision=bf16" if name == "llama_1b" else "recompute=full precision=bf16"
        batch = 2 if small else batches[name]
        return Workload(name=name, label=label, build=lambda: Llama(size), batch=batch, size=size, plan=plan)
    causal = name == "gpt2_124m"
    batch = 2 if small else (16 if causal else 32)
    return Workload(
        name=name,
        label="GPT-2 124M" if causal else "BERT base",
        build=lambda: Transformer(size, causal=causal),
        batch=batch,
        size=size,
    )


def proof_job(model: str) -> px.Job:
    """Return the small job that plans are proven with: ``GPT``, ``ResNet`` or ``LoRA``."""
    sizes = _sizes(small=True)
    given: dict[str, Any] = {"batch": 8, "plan": ""}
    if model == "ResNet":
        stages = ((8, 1), (16, 1))
        given |= {"build": lambda: ResNet(stages, 10, groups=4), "pixels": 32, "classes": 10}
    else:
        size = replace(sizes["gpt2_124m" if model == "GPT" else "lora_8b"], context=16, half=False)
        given |= {"size": size, "build": lambda: Transformer(size, causal=True) if model == "GPT" else Llama(size)}
    return Workload(name=model.lower(), label=model, **given).job(steps=5)


def overhead_job(model: str, small: bool) -> tuple[px.Job, Target]:
    """Return the job whose step costs little beside its loop, ``MLP`` or ``GPT 10M``, and its target."""
    if model == "GPT 10M":
        size = Size(
            layers=6, width=384, heads=6, key_heads=6, inner=1536, vocabulary=256, context=64 if not small else 16
        )
        size = replace(size, layers=2, width=128, heads=4, inner=512) if small else size
        work = Workload(name="gpt_10m", label=model, build=lambda: Transformer(size, causal=True), batch=8, size=size)
        return work.job(), work.target
    generator = torch.Generator().manual_seed(1)
    table = px.Table(x=torch.randn(1024, 64, generator=generator), y=torch.randint(10, (1024,), generator=generator))
    job = px.Job(
        name="mlp",
        model=lambda: make(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))),
        data=lambda: table,
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"], ignore_index=None),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=32,
        steps=100_000,
    )
    return job, lambda batch: batch["y"]


def checkpoint_work(small: bool) -> Workload:
    """Return a Llama whose parameters and moments are about 4 GB, small 40 MB."""
    size = Size(layers=16, width=1024, heads=16, key_heads=8, inner=4096, vocabulary=32000, context=512)
    if small:
        size = replace(size, layers=2, width=256, heads=4, key_heads=4, inner=1024, vocabulary=2048, context=16)
    return Workload(name="checkpoint", label="Llama", build=lambda: Llama(size), batch=2, size=size)
