"""A framework's preset: its fused kernels, overlaps, and the precision of its memory.

``PHALANX`` describes this package. Presets of other frameworks, by which forecasts are checked against published runs,
are in ``tools/published/presets.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The properties of a framework beside the plan."""

    name: str
    joined: float = 0.0  # share of the way from eager elementwise kernels (0) to those that a compiler joins (1)
    # ``fused`` (never holds the scores) or ``scores`` (holds them: two products and a softmax)
    attention: Literal["fused", "scores"] = "fused"
    # kernels' reads and writes of a score, forward, where they are held; the backward's are as many and half
    scores: float = 5.0
    scores_kept: float = 5.0  # bytes of a score kept for the backward
    launches: float = 1.0  # host launches an operation takes, against an eager one; 0 if graphs launch them
    overlap: float = 0.0  # share of the data-parallel reduction that can hide behind backward
    overlap_tensor: float = 0.0  # share of tensor parallelism's that can hide behind its products
    # what selective recompute computes again: ``attention``, ``alternate`` blocks, ``cheap`` operations, or these and
    # every ``second`` product
    selective: Literal["attention", "alternate", "cheap", "second"] = "cheap"
    weights: float = 4.0  # bytes a parameter takes while computing
    master: float = 0.0  # bytes of its copy that the optimizer steps, where there is another
    gradients: float = 4.0  # bytes of a gradient while it is summed
    sent: float = 4.0  # bytes of a gradient when it is reduced
    update: float = 28.0  # bytes moved to step a parameter
    speed: float = 1.0  # of its fused attention, against the best there is
    relay: float = 0.0  # seconds of the host to hand something to another stage
    scatter: bool = False  # ranks of ``tp`` each send a share of what goes to the next stage, and gather it there
    # bytes/s of a node that the framework's published runs are taken to have had where they state none
    network: float = 0.0
    gathered: float = 4.0  # bytes of a parameter when sharded ones are gathered
    contention: float = 0.1  # share of an exchange that runs beside computing by which it slows computing down
    gathers_ahead: bool = False  # whether values stepped in shards are gathered behind the next forward
    # share of what collectives can do that its gathering and reducing over replicas does: buckets, waiting
    reach: float = 1.0
    doubt: float = 1.0  # how much further off than others forecasts of it are
    rest: float = 2e-3  # seconds of each step that no part explains: data, logging, synchronisation
    reserved: float = 1.1  # reserved memory over allocated
    beside: float = 0.0  # bytes that the process keeps on the device beside tensors: buffers of collectives, workspaces
    gradients_stay: bool = False  # whether gradients lie in buffers that stay from step to step
    stepping: float = 0.0  # bytes a parameter needs for the time of the optimizer's step
    blocks_gathered: float = 2.0  # blocks whose sharded parameters are there whole at one time
    # whether all parameters outside of blocks are gathered from the forward's begin to its end
    root_gathered: bool = True
    unscattered: float = 1.0  # gradients of blocks, not scattered yet, that are there at one time
    logits: float = 0.0  # bytes a logit takes at the peak, loss and gradient included; 0 for what the profile says
    # bytes instead, with ``tp``, where each of its ranks gathers all classes; 0 if they divide them
    logits_whole: float = 0.0
    norms_kept: float = 0.0  # bytes an element that each norm keeps beyond its input and output
    ahead: float = 1.0  # how far zero-bubble schedules run ahead of 1F1B, in its activations
    shards_over_cp: bool = False  # whether ranks of ``cp`` share out what those of ``fsdp`` do
    one_memory: bool = True  # whether what is kept on the host is in the memory that is looked at: on CPUs
    buffered: float = 0.0  # blocks that are there once more, in the buffers that they are gathered in
    # buckets of whole gradients under way at one time where ``zero`` is 1 or 2; 0 if unknown
    buckets: float = 0.0
    # whether buffers of gathering and reducing are there beside all gradients, as the last ones come
    reducing_last: bool = False
    stages_whole: bool = False  # whether a pipeline's stages stay gathered through a step, and their gradients whole
    # whether a pipeline does a backward in halves only where nothing is computed again and ``zero`` shards no
    # gradients, as hooks on parameters want
    whole_backwards: bool = False
    gathers_kept: bool = False  # whether products behind sequence parallelism keep what was gathered for them
    # whether the loss over classes that ``tp`` has cut keeps them twice, where ``logits`` is 0
    logits_twice: bool = False
    # whether half precision casts weights where they are read, and leaves the stream in fp32 (not where ``zero=3``
    # gathers them in it)
    autocast: bool = False
    # whether computing a block again ends at what it saved last, before its results are added up
    stops_early: bool = False
    balances: bool = False  # whether stages of a pipeline are cut by what they cost, else by their number of blocks


PHALANX = Preset(
    name="phalanx",
    gathers_kept=True,
    logits_twice=True,
    autocast=True,
    stops_early=True,
    balances=True,
    whole_backwards=True,
    blocks_gathered=1.0,
    buffered=1.0,
    buckets=4.0,
    reducing_last=True,
)
