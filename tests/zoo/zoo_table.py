"""Jobs as people write them × fourteen plans: what each job shows, and which plans refuse it, by which words.

A cell without an entry must be equal to a plain PyTorch loop on one device. Which plans refuse follows from what the
job means: a plan cannot cut what has no two layers to share, nor attend in pieces where nothing attends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import case_models as models
import torch
import zoo_libraries as libraries
import zoo_models as zoo
from case_jobs import BATCH, job, rows
from case_table import CASES
from grid import Came

import phalanx as px

PLANS = (
    "dp=2",
    "dp=2 micro=4",
    "dp=4",
    "threads=2",
    "fsdp=2 zero=1",
    "fsdp=2 zero=2",
    "fsdp=2",
    "dp=2 fsdp=2",
    "tp=2",
    "pp=2",
    "pp=2 micro=4",
    "dp=2 tp=2",
    "cp=2",
    "dp=2 server=1",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A job of the zoo.

    Attributes:
        shows: what is in it.
        refused: a plan, or the key of one → the words that its refusal must have.
        named: a plan, or the key of one → the beginning of the cause, said before the run, for which it is not equal.
        steps: that are compared.
        needs: libraries that only `make zoo` installs.
    """

    job: Callable[[], px.Job]
    shows: str
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    steps: int = 3
    needs: tuple[str, ...] = ()


def fits(table: Mapping[str, str], plan: str) -> str | None:
    """What ``table`` says of ``plan``: of it as a whole, else of one of its keys, such as ``tp``; ``None``: nothing."""
    keys = [one.partition("=")[0] for one in plan.split()]
    return next((table[key] for key in (plan, *keys) if key in table), None)


def wrong(kept: Kept, plan: str, found: Came) -> str:
    """In which way ``found`` is not what must come; empty where it is."""
    refusal, cause = fits(kept.refused, plan), fits(kept.named, plan)
    if refusal is not None:
        must, right = f"refused ({refusal})", found.outcome == "refused" and refusal in found.said
    elif cause is not None:
        told = any(note.startswith(cause) for note in found.before)
        must, right = f"named ({cause})", found.outcome == "unequal" and told and found.said.startswith(cause)
    else:
        must, right = "equal", found.outcome == "equal"
    return "" if right else f"{must} must come, and {found.outcome} came: {found.said} {list(found.before)}"


def of_case(name: str, **how: Any) -> Kept:
    """A job of the other grid."""
    return Kept(job=CASES[name].job, shows=CASES[name].shows, **how)


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


def pictured(model: Callable[[], Any], *needs: str, side: int = 8, shows: str, **how: Any) -> Kept:
    """A model of images of another library."""
    given = {"data": partial(libraries.Pictures, side), "loss": libraries.picture_loss}
    given["inputs"] = lambda batch: {"x": batch["image"]}
    return Kept(job=partial(job, model=model, **given), shows=shows, needs=needs, **how)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def phase(name: str, parameters: Any, loss: Any, every: int = 1) -> px.Phase:
    return px.Phase(name=name, parameters=parameters, loss=loss, optimizer=adam, every=every)


NO_ATTENTION = {"cp": "cp"}
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

ZOO: dict[str, Kept] = {
    "residual": of_case("residual", refused=NO_ATTENTION),
    "outputs": of_case("outputs", refused=NO_ATTENTION),
    "recurrent": of_case("recurrent", refused=NO_ATTENTION | NO_PAIRS),
    "named blocks": of_case("named blocks", refused=NO_ATTENTION),
    "recomputing": of_case("recomputing", refused=NO_ATTENTION),
    "distilled": of_case("distilled", refused=NO_ATTENTION),
    "frozen table": of_case("frozen table", refused=NO_ATTENTION),
    "encoder": of_case("encoder", refused={}),
    "tables": of_case("tables", refused=NO_ATTENTION),
    "forgotten, allowed": of_case("forgotten, allowed", refused=NO_ATTENTION),
    "groups": of_case("groups", refused=NO_ATTENTION),
    "scheduler": of_case("scheduler", refused=NO_ATTENTION | NO_SERVERS),
    "stream": of_case("stream", refused=NO_ATTENTION | NO_STREAMS),
    "noisy, workers": of_case("noisy, workers", refused=NO_ATTENTION),
    "padded": of_case("padded", refused=NO_ATTENTION),
    "class weights, counted": of_case("class weights, counted", refused=NO_ATTENTION),
    "EMA": Kept(
        job=partial(job, average=px.Average(decay=0.9), evaluate=rows, evaluate_every=2),
        shows="`average=px.Average(decay=0.9)`, evaluated",
        refused=NO_ATTENTION | NO_SERVERS,
    ),
    "SWA": Kept(
        job=partial(job, average=px.Average(kind="mean", start=1), evaluate=rows),
        shows='`average=px.Average(kind="mean", start=1)`, evaluated',
        refused=NO_ATTENTION | NO_SERVERS,
    ),
    "groups by name": Kept(
        job=partial(job, optimizer=zoo.grouped), shows="`px.groups`: biases and the head", refused=NO_ATTENTION
    ),
    "no decay": Kept(
        job=partial(job, optimizer=lambda params: torch.optim.AdamW(px.no_decay(params, 0.1), lr=1e-3)),
        shows="`px.no_decay`",
        refused=NO_ATTENTION,
    ),
    "clip by value": Kept(
        job=partial(job, clip=px.Clip(value=0.01)), shows="`clip=px.Clip(value=0.01)`", refused=NO_ATTENTION
    ),
    "clip by group": Kept(
        job=partial(job, clip=px.Clip(norm=0.1, per="group"), optimizer=zoo.grouped),
        shows='`clip=px.Clip(norm=0.1, per="group")`',
        refused=NO_ATTENTION | {"server": "px.Clip(value=...)"},
    ),
    "plateau": Kept(
        job=partial(job, optimizer=zoo.plateau, evaluate=rows, evaluate_every=1),
        shows="`ReduceLROnPlateau` beside the optimizer",
        refused=NO_ATTENTION | NO_SERVERS,
    ),
    "schedule": Kept(
        job=partial(job, schedule=lambda step: 1 / (1 + step), clip=1.0),
        shows="a schedule of one's own, clipping",
        refused=NO_ATTENTION,
    ),
    "metrics": Kept(
        job=partial(
            job,
            evaluate=rows,
            evaluate_every=2,
            metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
            best=px.Best("accuracy", mode="max"),
        ),
        shows="evaluations with accuracy, the best one's checkpoint",
        refused=NO_ATTENTION,
    ),
    "smoothing": Kept(
        job=partial(job, loss=lambda output, batch: px.cross_entropy(output, batch["y"], label_smoothing=0.1)),
        shows="label smoothing",
        refused=NO_ATTENTION,
    ),
    "losses of one count": Kept(
        job=partial(job, loss=px.Losses(zoo.of_samples, weights={"class": 1.0, "size": 0.1})),
        shows="`px.Losses` of two means over samples",
        refused=NO_ATTENTION,
    ),
    "losses of unlike counts": Kept(
        job=partial(
            CASES["padded"].job,
            loss=px.Losses(zoo.of_words, weights={"words": 1.0, "size": 0.1}, counts=zoo.words),
            evaluate=CASES["padded"].job().data,
            evaluate_every=2,
        ),
        shows="`px.Losses` over words and over sentences, with `counts`, evaluated",
        refused=NO_ATTENTION | NO_SERVERS,
    ),
    "GAN": Kept(
        job=partial(
            phased,
            zoo.Gan,
            phase("critic", "critic.*", zoo.critic_loss),
            phase("generator", "generator.*", zoo.generator_loss, every=2),
        ),
        shows="a GAN, its generator every second step",
        refused=NO_ATTENTION | PHASES,
    ),
    "GAN with penalty": Kept(
        job=partial(
            phased,
            zoo.Gan,
            phase("critic", "critic.*", zoo.penalised_loss),
            phase("generator", "generator.*", zoo.generator_loss),
        ),
        shows="a GAN with gradient penalty: a gradient of a gradient",
        refused=NO_ATTENTION | PHASES | dict.fromkeys(("fsdp=2", "dp=2 fsdp=2"), "gradients of gradients"),
    ),
    "actor and critic": Kept(
        job=partial(
            phased,
            zoo.TwoHeads,
            phase("critic", ["stem.*", "body.*", "value.*"], zoo.value_loss),
            phase("actor", "actor.*", zoo.actor_loss),
        ),
        shows="actor and critic, one loss each",
        refused=NO_ATTENTION | PHASES,
    ),
    "teacher": Kept(
        job=partial(
            phased,
            models.Taught,
            px.Phase(name="student", parameters="*", loss=CASES["distilled"].job().loss, optimizer=adam),
        ),
        shows="distillation from a frozen teacher, as a phase",
        refused=NO_ATTENTION | PHASES,
    ),
    "shaken blocks": Kept(
        job=partial(job, model=zoo.Shaken),
        shows="noise that each block draws",
        refused=NO_ATTENTION,
        named=DRAWN,
    ),
    "batch norm": Kept(
        job=partial(job, model=zoo.Normed, batch_statistics="global"),
        shows='BatchNorm with `batch_statistics="global"`',
        refused=NO_ATTENTION | NO_PAIRS | ONE_PIECE,
    ),
    "contrastive": Kept(
        job=partial(job, model=models.Views, loss=zoo.contrastive, loss_over="batch"),
        shows='each sample against all others, `loss_over="batch"`',
        refused=NO_ATTENTION | dict.fromkeys(("pp", "server"), "needs the outputs of the whole global batch"),
    ),
    "weighted": Kept(
        job=partial(job, sampler=px.weighted(torch.arange(1, 97).tolist())),
        shows="`sampler=px.weighted(...)`",
        refused=NO_ATTENTION,
    ),
    "buckets": Kept(
        job=partial(CASES["padded"].job, sampler=px.buckets([(index * 7) % 12 for index in range(64)])),
        shows="`sampler=px.buckets(...)`, padded sentences",
        refused=NO_ATTENTION,
    ),
    "mixture": Kept(
        job=partial(job, data=lambda: zoo.MIXTURE, sampler=zoo.MIXTURE.sampler),
        shows="`px.Mixture` of two tables",
        refused=NO_ATTENTION,
    ),
    "batch ramp": Kept(
        job=partial(job, batch_ramp={0: 4, 1: 7, 2: BATCH}),
        shows="`batch_ramp`, a batch that grows",
        refused=NO_ATTENTION,
    ),
    "short texts first": Kept(
        job=partial(language, zoo.gpt2, data=zoo.texts_by_step),
        shows="`px.Curriculum`, texts of 8 tokens and then of 12",
    ),
    "packed tokens": Kept(
        job=partial(
            job,
            model=zoo.Packed,
            data=zoo.token_file,
            loss=lambda output, batch: px.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()),
        ),
        shows="`px.TokenFile` with documents, attention within each",
    ),
    "tar files": Kept(
        job=partial(
            job,
            data=zoo.tar_files,
            inputs=lambda batch: batch["npy"],
            loss=lambda output, batch: px.cross_entropy(output, batch["cls"]),
        ),
        shows="`px.TarFiles`, an archive of arrays",
        refused=NO_ATTENTION,
    ),
    "Parquet files": Kept(job=by_row_groups, shows="`px.ParquetFiles`, two row groups at a time", refused=NO_ATTENTION),
    "datasets": Kept(job=partial(job, data=zoo.huggingface), shows="a Hugging Face `Dataset`", refused=NO_ATTENTION),
    "datasets, stream": Kept(
        job=partial(job, data=zoo.huggingface_stream),
        shows="a Hugging Face `IterableDataset`",
        refused=NO_ATTENTION | NO_STREAMS,
    ),
    "GPT-2": Kept(job=partial(language, zoo.gpt2), shows="transformers' GPT-2 with its own loss over uneven labels"),
    "Llama": Kept(job=partial(language, zoo.llama), shows="transformers' Llama, grouped heads, its own loss"),
    "T5": Kept(
        job=partial(
            language,
            zoo.t5,
            loss=px.model_loss(count=lambda batch: (batch["labels"] != -100).sum()),
        ),
        shows="transformers' T5, encoder and decoder",
    ),
    "BERT": Kept(
        job=partial(language, zoo.bert, data=zoo.Classified), shows="transformers' BERT that classifies sentences"
    ),
    "LoRA": Kept(job=partial(language, zoo.lora), shows="LoRA of peft on GPT-2"),
    "ViT": Kept(
        job=partial(
            job,
            model=zoo.vit,
            data=zoo.Images,
            inputs=lambda batch: {"pixel_values": batch["pixel_values"]},
            loss=lambda output, batch: px.cross_entropy(output.logits, batch["label"]),
        ),
        shows="transformers' ViT",
    ),
    "ResNet": Kept(
        job=partial(
            job,
            model=zoo.resnet,
            data=partial(zoo.Images, torch.float64),
            inputs=lambda batch: {"pixel_values": batch["pixel_values"]},
            loss=lambda output, batch: px.cross_entropy(output.logits, batch["label"]),
            batch_statistics="global",
        ),
        shows="transformers' ResNet, BatchNorm over the global batch, fp64",
        refused=NO_ATTENTION | NO_PAIRS | ONE_PIECE,
    ),
    "torchvision, ResNet": Kept(
        job=partial(
            job,
            model=libraries.residual_network,
            data=partial(libraries.Pictures, 8, torch.float64),
            inputs=lambda batch: {"x": batch["image"]},
            loss=libraries.picture_loss,
            batch_statistics="global",
        ),
        shows="torchvision's ResNet, BatchNorm over the global batch, fp64",
        refused=NO_ATTENTION | NO_PAIRS | ONE_PIECE,
        needs=("torchvision",),
    ),
    "torchvision, ViT": pictured(
        libraries.vision_transformer,
        "torchvision",
        shows="torchvision's ViT, of `nn.MultiheadAttention`",
        refused=NO_ATTENTION,
    ),
    "torchvision, ConvNeXt": pictured(
        libraries.convnext, "torchvision", side=16, shows="torchvision's ConvNeXt", refused=NO_ATTENTION
    ),
    "timm, ViT": pictured(libraries.timm_vit, "timm", "torchvision", shows="timm's ViT"),
    "timm, ConvNeXt": pictured(
        libraries.timm_convnext,
        "timm",
        "torchvision",
        side=32,
        shows="timm's ConvNeXt",
        refused=NO_ATTENTION | NO_PAIRS,
    ),
    "diffusers, UNet": Kept(
        job=partial(
            job, model=libraries.unet, data=libraries.Noised, inputs=libraries.to_unet, loss=libraries.noise_loss
        ),
        shows="diffusers' UNet, which finds the noise in images",
        refused=NO_ATTENTION,
        needs=("diffusers",),
    ),
    "diffusers, DiT": Kept(
        job=partial(
            job, model=libraries.dit, data=libraries.Noised, inputs=libraries.to_dit, loss=libraries.noise_loss
        ),
        shows="diffusers' transformer of images and classes",
        needs=("diffusers",),
    ),
    "diffusers, DiT that guides itself": Kept(
        job=partial(
            job,
            model=partial(libraries.dit, 0.5),
            data=libraries.Noised,
            inputs=libraries.to_dit,
            loss=libraries.noise_loss,
        ),
        shows="the same; each block leaves out labels that it draws",
        named=DRAWN,
        needs=("diffusers",),
    ),
}
