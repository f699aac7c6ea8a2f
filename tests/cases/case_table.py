"""Which jobs are held against which plans, and what must come of each: worked out from what the job means.

A plan that computes a batch in one piece (``tp=2``, ``pp=2``) cannot change what depends on the pieces; one that cuts
it (``CUTS``) must. Ranks of ``fsdp`` and ``tp`` hold parts of weights, those of ``pp`` and ``dp`` whole ones: what an
optimizer does with parts decides there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import case_jobs as jobs
import case_models as models
import torch
import torch.nn.functional as F
from case_jobs import job, sentences

import phalanx as px

PLANS = ("dp=2", "fsdp=2 zero=1", "fsdp=2", "tp=2", "pp=2", "pp=2 micro=4")
CUTS = ("dp=2", "fsdp=2 zero=1", "fsdp=2", "pp=2 micro=4")
ROWS = ("fsdp=2 zero=1", "fsdp=2")

Outcome = Literal["equal", "named", "near", "refused", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What must come of a job under a plan.

    Attributes:
        outcome: ``equal``: to one device, and nothing is said against it. ``named``: not equal, for a cause said before
            the run and by the proof. ``near``: a cause said before the run decides whether it is equal. ``refused``:
            before any worker starts. ``stopped``: the run ends with an error of the job's own making, as on one device.
        words: the beginning of the cause; or what the refusal or the error says.
        where: the field that a refusal names; any where empty.
    """

    outcome: Outcome
    words: str = ""
    where: str = ""


EQUAL = Expected(outcome="equal")


def named(words: str) -> Expected:
    return Expected(outcome="named", words=words)


def near(words: str) -> Expected:
    return Expected(outcome="near", words=words)


def refused(words: str, where: str = "") -> Expected:
    return Expected(outcome="refused", words=words, where=where)


def stopped(words: str) -> Expected:
    return Expected(outcome="stopped", words=words)


def where(plans: Iterable[str], then: Expected, otherwise: Mapping[str, Expected] | Expected = EQUAL) -> Plans:
    """``then`` under these plans, something else under the others."""
    others = dict.fromkeys(PLANS, otherwise) if isinstance(otherwise, Expected) else otherwise
    return {plan: then if plan in plans else others[plan] for plan in PLANS}


Plans = Mapping[str, Expected]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job, what it shows, and what must come of it under each plan.

    Attributes:
        job: makes it; a loop of one's own around ``px.build`` is that of the case's name in ``own_loop.py``.
        steps: that are compared; ``None``: those of the job.
        needs: libraries that have to be there.
    """

    job: Callable[[], px.Job] | None
    shows: str
    expected: Plans
    steps: int | None = None
    needs: tuple[str, ...] = ()


def case(shows: str, make: Callable[[], Any], expected: Plans | Expected = EQUAL) -> Case:
    return Case(job=make, shows=shows, expected=where(PLANS, expected) if isinstance(expected, Expected) else expected)


NO_PAIRS = refused("no two layers can share out their weights", "plan.tp")

WRITTEN: dict[str, Case] = {
    "residual": case("a stack of residual blocks", job),
    "keywords": case("`forward(**given)`", partial(job, model=models.ByKeyword)),
    "scalar": case("a parameter without dimensions", partial(job, model=models.Tempered)),
    "outputs": case(
        "a tuple with a dict, a list and a `None` as output",
        partial(job, model=models.ManyOutputs, loss=jobs.with_penalty),
    ),
    "recurrent": case(
        "an LSTM with dropout, and one linear layer", partial(job, model=models.Recurrent), where(["tp=2"], NO_PAIRS)
    ),
    "named blocks": case("blocks in a `ModuleDict`", partial(job, model=models.Named)),
    "opened": case(
        "children of a block called by the model, and an autograd function between them",
        partial(job, model=models.Opened),
        where(["tp=2"], NO_PAIRS),  # what such a function makes of slices, nobody can tell
    ),
    "recomputing": case(
        "`torch.utils.checkpoint` in the model, `use_reentrant=False`", partial(job, model=models.Recomputing)
    ),
    "reentrant": case(
        "`torch.utils.checkpoint` in the model, `use_reentrant=True`",
        partial(job, model=partial(models.Recomputing, reentrant=True)),
    ),
    "distilled": case(
        "a frozen teacher in evaluation mode before a student", partial(job, model=models.Taught, loss=jobs.distilled)
    ),
    "adapters": case("LoRA: frozen layers, branches that begin at zero", partial(job, model=models.Adapters)),
    "frozen table": case(
        "an embedding tied to the head, both frozen",
        partial(
            job,
            model=models.FrozenTable,
            inputs=lambda batch: batch["ids"],
            loss=lambda output, batch: px.next_token_loss(output, batch["ids"]),
        ),
    ),
    "encoder": case("BERT: padding masks, a tied head, recomputed layers", partial(sentences, model=models.Encoder)),
    "tables": case("buffers that stay, one in no checkpoint", partial(job, model=models.Tabled)),
    "forgotten": case(
        "a layer that nothing calls", partial(job, model=models.LeftOver), refused("forgotten.weight", "")
    ),
    "forgotten, allowed": case(
        'a layer that nothing calls, with `unused="allow"`', partial(job, model=models.LeftOver, unused="allow")
    ),
}

SPARSE = partial(
    job, model=models.Bags, inputs=lambda batch: batch["ids"], optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
)

OPTIMIZED: dict[str, Case] = {
    "sparse": case(
        "an embedding with sparse gradients, clipped",
        partial(SPARSE, clip=0.1),
        where(["tp=2"], NO_PAIRS, where(ROWS, refused("sparse gradients of words", "job.model"))),
    ),
    "groups": case("two groups of parameters, by shape", partial(job, optimizer=jobs.by_dimensions)),
    "averaging": case(
        "an optimizer that keeps an average of the parameters",
        partial(job, optimizer=lambda params: jobs.Averaging(params, lr=1e-2)),
    ),
    "fused": case("`fused=True`", partial(job, optimizer=lambda params: torch.optim.AdamW(params, fused=True))),
    "momentum": case(
        "Nesterov momentum, weight decay, clipping",
        partial(
            job,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
            clip=0.3,
        ),
    ),
    "adafactor": case(
        "Adafactor, whose moments are of whole rows and columns",
        partial(job, optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-2)),
        where([*ROWS, "tp=2"], refused("Adafactor", "job.optimizer")),
    ),
    "muon": case(
        "Muon, which iterates on whole matrices in bfloat16",
        partial(job, model=jobs.Matrices, optimizer=lambda params: torch.optim.Muon(params, lr=1e-2)),
        where(["tp=2"], refused("Muon", "job.optimizer"), near("Muon computes its step in bfloat16")),
    ),
    "scheduler": case("one of torch's schedulers, stepped by a hook", partial(job, optimizer=jobs.cyclic)),
    "scheduler, idle": case(
        "one of torch's schedulers that nothing steps",
        partial(job, optimizer=partial(jobs.cyclic, hooked=False)),
        refused("on the optimizer that nobody steps", "job.optimizer"),
    ),
    "scheduler, twice": case(
        "one of torch's schedulers beside the job's schedule",
        partial(job, optimizer=jobs.cyclic, schedule=px.Schedule(decay="cosine")),
        refused("OneCycleLR on the optimizer and", "job.optimizer"),
    ),
    "closure": case(
        "LBFGS, which evaluates the model itself",
        partial(job, optimizer=lambda params: torch.optim.LBFGS(params)),
        refused("LBFGS", "job.optimizer"),
    ),
    "bfloat16": case(
        "a model that comes in bfloat16",
        partial(job, model=lambda: models.Residual().to(torch.bfloat16)),
        refused("trainable parameters in bfloat16", "job.model"),
    ),
}

LOADED: dict[str, Case] = {
    "stream": case("a stream, read for two epochs", partial(job, data=jobs.Stream, steps=None, epochs=2)),
    "stream, workers": case(
        "a stream read by two processes", partial(job, data=jobs.Stream, steps=None, epochs=2, workers=2)
    ),
    "resampled": case("`WeightedRandomSampler` as a stream", partial(job, data=jobs.Resampled, steps=None, epochs=1)),
    "tuples": case(
        "samples that are tuples",
        partial(job, data=jobs.tuples, loss=lambda output, batch: px.cross_entropy(output, batch[1])),
    ),
    "noisy": case("samples that draw from torch, numpy and `random`", partial(job, data=jobs.Noisy)),
    "noisy, workers": case("the same, read by two processes", partial(job, data=jobs.Noisy, workers=2)),
    "one rank's share": case("a `DistributedSampler` within the data", partial(job, data=jobs.OneRanksShare)),
    "padded": case("sentences padded by `collate`, tokens counted", sentences),
    "larger batch": case("a batch larger than the data", partial(job, batch=4 * jobs.SAMPLES)),
}

SPLIT: dict[str, Case] = {
    "class weights": case(
        "`cross_entropy(weight=...)`", partial(job, loss=jobs.by_class), where(CUTS, named("weighted mean: "))
    ),
    "class weights, counted": case("the same as a sum and a count", partial(job, loss=jobs.by_class_counted)),
    "mean over tokens": case(
        "`cross_entropy` over labels with -100",
        partial(sentences, loss=jobs.mean_over_tokens),
        where(CUTS, named("mean over tokens: ")),
    ),
    "mean over padding": case(
        "`cross_entropy` over padding as well",
        partial(sentences, loss=jobs.mean_over_padding),
        where(CUTS, named("padded mean: ")),
    ),
    "contrastive": case(
        "each sample against the others of its batch",
        partial(job, model=models.Views, loss=jobs.contrastive),
        where(CUTS, named("the loss couples samples")),
    ),
    "running mean": case(
        "a buffer that forward moves",
        partial(job, model=models.Centred),
        where(CUTS, named("buffers updated in forward: centre")),
    ),
    "batch norm": case("statistics of the batch", partial(job, model=models.Normed), where(CUTS, named("BatchNorm"))),
    "jitter": case(
        "noise drawn in forward",
        partial(job, model=models.Jittered),
        where(CUTS, named("random numbers drawn in forward")),
    ),
    "masked": case(
        "masks drawn in `collate`",
        partial(job, data=lambda: [jobs.rows()[i] for i in range(jobs.SAMPLES)], collate=jobs.masked),
        where(CUTS, named("random collate: ")),
    ),
}


def no_data() -> px.Table:
    return px.Table(x=torch.zeros(0, models.FEATURES), y=torch.zeros(0, dtype=torch.long))


MISTAKEN: dict[str, Case] = {
    "no mean": case(
        "a loss for each sample",
        partial(job, loss=lambda output, batch: F.cross_entropy(output, batch["y"], reduction="none")),
        refused("the loss function gave a tensor of shape"),
    ),
    "number": case(
        "a loss that is a Python number",
        partial(job, loss=lambda output, batch: F.cross_entropy(output, batch["y"]).item()),
        refused("the loss function gave a float"),
    ),
    "detached": case(
        "a loss without a graph",
        partial(job, loss=lambda output, batch: F.cross_entropy(output, batch["y"]).detach()),
        refused("depends on no parameter"),
    ),
    "other names": case(
        "a batch without what forward names",
        partial(job, model=models.Encoder),
        refused("missing 1 required positional argument: 'mask'", "job.model"),
    ),
    "no such key": case(
        "a key that the batch does not have",
        partial(job, loss=lambda output, batch: px.cross_entropy(output, batch["label"])),
        refused("KeyError: 'label'"),
    ),
    "labels out of range": case(
        "classes that the model does not have",
        partial(job, loss=lambda output, batch: px.cross_entropy(output, batch["y"] + CLASSES_TOO_MANY)),
        refused("for logits of 4 classes; allowed: 0 to 3"),
    ),
    "not a number": case(
        "a loss that is not a number",
        partial(job, loss=lambda output, batch: px.Loss(output.sum() * float("nan"), 1)),
        stopped("the loss of step 0 is nan"),
    ),
    "module": case("a module in place of a function", partial(job, model=models.Residual()), refused("job.model")),
    "table": case("data in place of a function", partial(job, data=jobs.rows()), refused("a function", "job.data")),
    "other parameters": case(
        "an optimizer over another model", partial(job, optimizer=jobs.of_a_stranger), refused("it was not given")
    ),
    "some parameters": case(
        "an optimizer over some parameters",
        partial(job, optimizer=lambda params: torch.optim.SGD(list(params)[:4], lr=0.1)),
        refused("the optimizer holds not"),
    ),
    "metrics": case(
        "metrics that are plain means",
        partial(
            job,
            evaluate=jobs.rows,
            metrics=lambda output, batch: {"hits": (output.argmax(-1) == batch["y"]).float().mean()},
        ),
        refused("metric"),
    ),
    "loader": case(
        "a `DataLoader` in place of data",
        partial(job, data=lambda: torch.utils.data.DataLoader(jobs.tuples(), batch_size=4)),
        refused("a DataLoader, which makes batches of its own", "job.data"),
    ),
    "evaluated stream": case(
        "evaluation data that are a stream", partial(job, evaluate=jobs.Stream), refused("a stream", "job.evaluate")
    ),
    "shuffled stream": case(
        "a stream to be shuffled", partial(job, data=jobs.Stream, shuffle=True), refused("shuffle=True", "job.shuffle")
    ),
    "no data": case("data without samples", partial(job, data=no_data), refused("", "job.data")),
    "no batch": case(
        "a batch of nothing", partial(job, batch=0), refused("samples in one optimizer step", "job.batch")
    ),
    "steps and epochs": case("both of the two", partial(job, epochs=2), refused("one of the two", "job.epochs")),
}
CLASSES_TOO_MANY = models.CLASSES

LOOPS: dict[str, Case] = {
    "two builds": Case(
        job=None,
        shows="a GAN in a loop of one's own: two builds in turn, one of which calls the other's model",
        expected=where(["pp=2", "pp=2 micro=4"], refused("a pipeline has cut", "job.inputs")),
    ),
    "gradients left behind": Case(
        job=None,
        shows="`px.build`: gradients of something else lie where a step begins",
        expected=dict.fromkeys(PLANS, EQUAL),
    ),
}

CASES: dict[str, Any] = {**WRITTEN, **OPTIMIZED, **LOADED, **SPLIT, **MISTAKEN, **LOOPS}
