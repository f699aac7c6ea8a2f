"""What a proof has to know of a model before it runs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import nn

from phalanx.config import Job
from phalanx.launch.side_process import Aside, Say
from phalanx.parallel import batch_statistics, dropouts
from phalanx.train.assembly import build_model
from phalanx.verify.dropout import off_by_sample

_PATIENCE = 600.0  # seconds to build a model in


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Of one model.

    Attributes:
        layers: modules with parameters of their own.
        dropouts: names of modules that drop elements.
        off_by_sample: those of them that stay off where masks are drawn by sample and layer.
        batch_statistics: names of modules that take statistics of their micro-batch.
    """

    layers: int = 1
    dropouts: list[str] = field(default_factory=list[str])
    off_by_sample: list[str] = field(default_factory=list[str])
    batch_statistics: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, module: nn.Module) -> ModelFacts:
        """The facts of ``module``."""
        return cls(
            layers=sum(1 for one in module.modules() if next(one.parameters(recurse=False), None) is not None),
            dropouts=list(dict.fromkeys([*dropouts(module), *recurrent_dropouts(module)])),
            off_by_sample=list(off_by_sample(module)),
            batch_statistics=list(batch_statistics(module)),
        )

    def notes(self, *, dropout: bool) -> list[str]:
        """What is said of them before a proof, with dropout on or off."""
        found: list[str] = []
        if names := self.off_by_sample if dropout else self.dropouts:
            then = "" if dropout else ", then measured with it on"
            many = f"{len(names)} modules, {names[0]} the first"
            found.append(f"dropout is switched off for the comparison ({many}){then}")
        if names := self.batch_statistics:
            what = "BatchNorm takes statistics of each micro-batch and is not equal when one is split"
            found.append(f"{what} ({names[0]})")
        return found


def facts_of(job: Job) -> ModelFacts:
    """The facts of the job's model, which a process of its own builds: this one is to stay as it was.

    Building draws random numbers, and may touch CUDA, which workers are forked without. Of a model that cannot be
    built, nothing: the run says why.
    """

    def work(say: Say) -> None:
        say(asdict(ModelFacts.of(build_model(job))))

    with Aside(work) as aside:
        told = aside.next(_PATIENCE)
    return ModelFacts(**told) if told else ModelFacts()


def recurrent_dropouts(module: nn.Module) -> list[str]:
    """Names of LSTM, GRU and RNN modules that drop between their layers."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.RNNBase) and child.dropout > 0]
