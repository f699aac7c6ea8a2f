"""Jobs as people write them × fourteen plans: what each job shows, and which plans refuse it, by which words.

A cell without an entry must be equal to a plain PyTorch loop on one device. Which plans refuse follows from what the
job means: a plan cannot cut what has no two layers to share, nor attend in pieces where nothing attends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import case_models as models
import case_table
import torch
import zoo_libraries as libraries
import zoo_models as zoo
from case_jobs import BATCH, job, rows
from case_table import CASES, EQUAL, Case, Expected

import phalanx as px

PLANS = (
    *("dp=2", "dp=2 micro=4", "dp=4", "threads=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "fsdp=2", "dp=2 fsdp=2", "tp=2"),
    *("pp=2", "pp=2 micro=4", "dp=2 tp=2", "cp=2", "dp=2 server=1"),
)


def of(table: Mapping[str, str], plan: str) -> str | None:
    """What ``table`` says of ``plan``: of it as a whole, else of one of its keys, such as ``tp``; ``None``: nothing."""
    keys = [one.partition("=")[0] for one in plan.split()]
    return next((table[key] for key in (plan, *keys) if key in table), None)


def kept(
    job: Callable[[], px.Job],
    shows: str,
    *,
    refused: Mapping[str, str] = MappingProxyType({}),
    named: Mapping[str, str] = MappingProxyType({}),
    attends: bool = False,
    needs: tuple[str, ...] = (),
) -> Case:
    """A job of the zoo, equal to a plain loop but for ``refused`` and ``named``: a plan, or the key of one → words.

    ``attends``: it attends over tokens, so that plans may cut these. ``needs``: libraries that ``make zoo`` installs.
    """
    refusals = dict(refused) if attends else {"cp": "cp"} | dict(refused)

    def expected(plan: str) -> Expected:
        if (refusal := of(refusals, plan)) is not None:
            return case_table.refused(refusal)
        return EQUAL if (cause := of(named, plan)) is None else case_table.named(cause)

    return Case(job=job, shows=shows, expected={plan: expected(plan) for plan in PLANS}, steps=3, needs=needs)


def of_case(name: str, **how: Any) -> Case:
    """A job of the other grid."""
    return kept(CASES[name].job, CASES[name].shows, **how)


def language(model: Callable[[], Any], **how: Any) -> px.Job:
    """A model of tokens with a loss of its own."""
    given = {"model": model, "data": zoo.Tokens, "loss": px.model_loss(), "inputs": lambda batch: dict(batch), **how}
    return job(**given)


def phased(model: Callable[[], Any], *phases: px.Phase, **how: Any) -> px.Job:
    """A job of several updates."""
    return px.Job(model=model, data=rows, phases=list(phases), batch=16, steps=3, **how)


def by_row_groups() -> px.Job:
    """Rows in the order that their files are read fast in."""
    data = zoo.parquet_files()
    return job(data=lambda: data, sampler=data.sampler)


def pictured(model: Callable[[], Any], *needs: str, side: int = 8, shows: str, **how: Any) -> Case:
    """A model of images of another library."""
    given = {"data": partial(libraries.Pictures, side), "loss": libraries.picture_loss}
    given["inputs"] = lambda batch: {"x": batch["image"]}
    return kept(partial(job, model=model, **given), shows, needs=needs, **how)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def phase(name: str, parameters: Any, loss: Any, every: int = 1) -> px.Phase:
    return px.Phase(name=name, parameters=parameters, loss=loss, optimizer=adam, every=every)


NO_PAIRS = {"tp": "no two layers can share out their weights"}
NO_SERVERS = {"server": "plans without servers"}
NO_STREAMS = {"server": "a stream"}
PHASES = {
    "tp": "phases, whose forward is another one",
    "pp": "phases, whose forward is another one",
    "server": "phases",
}
DRAWN = dict.fromkeys(("dp", "fsdp", "threads", "pp"), "random numbers drawn in forward")
ONE_PIECE = {"micro": "in one forward", "server": "plans whose ranks compute a step together"}

ZOO: dict[str, Case] = {
    "residual": of_case("residual"),
    "outputs": of_case("outputs"),
    "recurrent": of_case("recurrent", refused=NO_PAIRS),
    "named blocks": of_case("named blocks"),
    "recomputing": of_case("recomputing"),
    "distilled": of_case("distilled"),
    "frozen table": of_case("frozen table"),
    "encoder": of_case("encoder", attends=True),
    "tables": of_case("tables"),
    "forgotten, allowed": of_case("forgotten, allowed"),
    "groups": of_case("groups"),
    "scheduler": of_case("scheduler", refused=NO_SERVERS),
    "stream": of_case("stream", refused=NO_STREAMS),
    "noisy, workers": of_case("noisy, workers"),
    "padded": of_case("padded"),
    "class weights, counted": of_case("class weights, counted"),
    "EMA": kept(
        partial(job, average=px.Average(decay=0.9), evaluate=rows, evaluate_every=2),
        "`average=px.Average(decay=0.9)`, evaluated",
        refused=NO_SERVERS,
    ),
    "SWA": kept(
        partial(job, average=px.Average(kind="mean", start=1), evaluate=rows),
        '`average=px.Average(kind="mean", start=1)`, evaluated',
        refused=NO_SERVERS,
    ),
    "groups by name": kept(partial(job, optimizer=zoo.grouped), "`px.groups`: biases and the head"),
    "no decay": kept(
        partial(job, optimizer=lambda params: torch.optim.AdamW(px.no_decay(params, 0.1), lr=1e-3)), "`px.no_decay`"
    ),
    "clip by value": kept(partial(job, clip=px.Clip(value=0.01)), "`clip=px.Clip(value=0.01)`"),
    "clip by group": kept(
        partial(job, clip=px.Clip(norm=0.1, per="group"), optimizer=zoo.grouped),
        '`clip=px.Clip(norm=0.1, per="group")`',
        refused={"server": "px.Clip(value=...)"},
    ),
    "plateau": kept(
        partial(job, optimizer=zoo.plateau, evaluate=rows, evaluate_every=1),
        "`ReduceLROnPlateau` beside the optimizer",
        refused=NO_SERVERS,
    ),
    "schedule": kept(partial(job, schedule=lambda step: 1 / (1 + step), clip=1.0), "a schedule of one's own, clipping"),
    "metrics": kept(
        partial(
            job,
            evaluate=rows,
            evaluate_every=2,
            metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
            best=px.Best("accuracy", mode="max"),
        ),
        "evaluations with accuracy, the best one's checkpoint",
    ),
    "smoothing": kept(
        partial(job, loss=lambda output, batch: px.cross_entropy(output, batch["y"], label_smoothing=0.1)),
        "label smoothing",
    ),
    "losses of one count": kept(
        partial(job, loss=px.Losses(zoo.of_samples, weights={"class": 1.0, "size": 0.1})),
        "`px.Losses` of two means over samples",
    ),
    "losses of unlike counts": kept(
        partial(
            CASES["padded"].job,
            loss=px.Losses(zoo.of_words, weights={"words": 1.0, "size": 0.1}, counts=zoo.words),
            evaluate=CASES["padded"].job().data,
            evaluate_every=2,
        ),
        "`px.Losses` over words and over sentences, with `counts`, evaluated",
        refused=NO_SERVERS,
    ),
    "GAN": kept(
        partial(
            phased,
            zoo.Gan,
            phase("critic", "critic.*", zoo.critic_loss),
            phase("generator", "generator.*", zoo.generator_loss, every=2),
        ),
        "a GAN, its generator every second step",
        refused=PHASES,
    ),
    "GAN with penalty": kept(
        partial(
            phased,
            zoo.Gan,
            phase("critic", "critic.*", zoo.penalised_loss),
            phase("generator", "generator.*", zoo.generator_loss),
        ),
        "a GAN with gradient penalty: a gradient of a gradient",
        refused=PHASES | dict.fromkeys(("fsdp=2", "dp=2 fsdp=2"), "gradients of gradients"),
    ),
    "actor and critic": kept(
        partial(
            phased,
            zoo.TwoHeads,
            phase("critic", ["stem.*", "body.*", "value.*"], zoo.value_loss),
            phase("actor", "actor.*", zoo.actor_loss),
        ),
        "actor and critic, one loss each",
        refused=PHASES,
    ),
    "teacher": kept(
        partial(
            phased,
            models.Taught,
            px.Phase(name="student", parameters="*", loss=CASES["distilled"].job().loss, optimizer=adam),
        ),
        "distillation from a frozen teacher, as a phase",
        refused=PHASES,
    ),
    "shaken blocks": kept(partial(job, model=zoo.Shaken), "noise that each block draws", named=DRAWN),
    "batch norm": kept(
        partial(job, model=zoo.Normed, batch_statistics="global"),
        'BatchNorm with `batch_statistics="global"`',
        refused=NO_PAIRS | ONE_PIECE,
    ),
    "contrastive": kept(
        partial(job, model=models.Views, loss=zoo.contrastive, loss_over="batch"),
        'each sample against all others, `loss_over="batch"`',
        refused=dict.fromkeys(("pp", "server"), "needs the outputs of the whole global batch"),
    ),
    "weighted": kept(partial(job, sampler=px.weighted(torch.arange(1, 97).tolist())), "`sampler=px.weighted(...)`"),
    "buckets": kept(
        partial(CASES["padded"].job, sampler=px.buckets([(index * 7) % 12 for index in range(64)])),
        "`sampler=px.buckets(...)`, padded sentences",
    ),
    "mixture": kept(partial(job, data=lambda: zoo.MIXTURE, sampler=zoo.MIXTURE.sampler), "`px.Mixture` of two tables"),
    "batch ramp": kept(partial(job, batch_ramp={0: 4, 1: 7, 2: BATCH}), "`batch_ramp`, a batch that grows"),
    "short texts first": kept(
        partial(language, zoo.gpt2, data=zoo.texts_by_step),
        "`px.Curriculum`, texts of 8 tokens and then of 12",
        attends=True,
    ),
    "packed tokens": kept(
        partial(
            job,
            model=zoo.Packed,
            data=zoo.token_file,
            loss=lambda output, batch: px.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()),
        ),
        "`px.TokenFile` with documents, attention within each",
        attends=True,
    ),
    "tar files": kept(
        partial(
            job,
            data=zoo.tar_files,
            inputs=lambda batch: batch["npy"],
            loss=lambda output, batch: px.cross_entropy(output, batch["cls"]),
        ),
        "`px.TarFiles`, an archive of arrays",
    ),
    "Parquet files": kept(by_row_groups, "`px.ParquetFiles`, two row groups at a time"),
    "datasets": kept(partial(job, data=zoo.huggingface), "a Hugging Face `Dataset`"),
    "datasets, stream": kept(
        partial(job, data=zoo.huggingface_stream), "a Hugging Face `IterableDataset`", refused=NO_STREAMS
    ),
    "GPT-2": kept(
        partial(language, zoo.gpt2), "transformers' GPT-2 with its own loss over uneven labels", attends=True
    ),
    "Llama": kept(partial(language, zoo.llama), "transformers' Llama, grouped heads, its own loss", attends=True),
    "T5": kept(
        partial(language, zoo.t5, loss=px.model_loss(count=lambda batch: (batch["labels"] != -100).sum())),
        "transformers' T5, encoder and decoder",
        attends=True,
    ),
    "BERT": kept(
        partial(language, zoo.bert, data=zoo.Classified), "transformers' BERT that classifies sentences", attends=True
    ),
    "LoRA": kept(partial(language, zoo.lora), "LoRA of peft on GPT-2", attends=True),
    "ViT": kept(
        partial(
            job,
            model=zoo.vit,
            data=zoo.Images,
            inputs=lambda batch: {"pixel_values": batch["pixel_values"]},
            loss=lambda output, batch: px.cross_entropy(output.logits, batch["label"]),
        ),
        "transformers' ViT",
        attends=True,
    ),
    "ResNet": kept(
        partial(
            job,
            model=zoo.resnet,
            data=partial(zoo.Images, torch.float64),
            inputs=lambda batch: {"pixel_values": batch["pixel_values"]},
            loss=lambda output, batch: px.cross_entropy(output.logits, batch["label"]),
            batch_statistics="global",
        ),
        "transformers' ResNet, BatchNorm over the global batch, fp64",
        refused=NO_PAIRS | ONE_PIECE,
    ),
    "torchvision, ResNet": kept(
        partial(
            job,
            model=libraries.residual_network,
            data=partial(libraries.Pictures, 8, torch.float64),
            inputs=lambda batch: {"x": batch["image"]},
            loss=libraries.picture_loss,
            batch_statistics="global",
        ),
        "torchvision's ResNet, BatchNorm over the global batch, fp64",
        refused=NO_PAIRS | ONE_PIECE,
        needs=("torchvision",),
    ),
    "torchvision, ViT": pictured(
        libraries.vision_transformer, "torchvision", shows="torchvision's ViT, of `nn.MultiheadAttention`"
    ),
    "torchvision, ConvNeXt": pictured(libraries.convnext, "torchvision", side=16, shows="torchvision's ConvNeXt"),
    "timm, ViT": pictured(libraries.timm_vit, "timm", "torchvision", shows="timm's ViT", attends=True),
    "timm, ConvNeXt": pictured(
        libraries.timm_convnext, "timm", "torchvision", side=32, shows="timm's ConvNeXt", refused=NO_PAIRS
    ),
    "diffusers, UNet": kept(
        partial(job, model=libraries.unet, data=libraries.Noised, inputs=libraries.to_unet, loss=libraries.noise_loss),
        "diffusers' UNet, which finds the noise in images",
        needs=("diffusers",),
    ),
    "diffusers, DiT": kept(
        partial(job, model=libraries.dit, data=libraries.Noised, inputs=libraries.to_dit, loss=libraries.noise_loss),
        "diffusers' transformer of images and classes",
        needs=("diffusers",),
        attends=True,
    ),
    "diffusers, DiT that guides itself": kept(
        partial(
            job,
            model=partial(libraries.dit, 0.5),
            data=libraries.Noised,
            inputs=libraries.to_dit,
            loss=libraries.noise_loss,
        ),
        "the same; each block leaves out labels that it draws",
        named=DRAWN,
        needs=("diffusers",),
        attends=True,
    ),
}
