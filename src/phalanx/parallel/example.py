"""What a model is looked at with before it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.config.job import Cutting

if TYPE_CHECKING:  # loaded by plans that have some
    from phalanx.parallel.split_facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What a model is called with, and what becomes of its output.

    Attributes:
        args: positional arguments of forward, of one or a few samples, on the host.
        kwargs: named arguments.
        batch: what the loss is called with beside the output.
        loss: from the output and the batch to the job's loss, of whatever form.
        tensor_parallel: what the job says of how weights are cut.
        facts: what another process has found of the model with it; ``None`` where it is to be looked for.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    loss: Callable[[Any, Any], Any]
    tensor_parallel: Mapping[str, Cutting] = field(default_factory=dict[str, Cutting])
    facts: Facts | None = None
