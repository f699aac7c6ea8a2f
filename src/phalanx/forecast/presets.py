"""A framework's preset: which kernels are joined, what is overlapped, what is kept in memory in which precision.

``PHALANX`` is what this package itself does. Those of other frameworks, by which forecasts are checked against what
people have published, stand in ``tools/published/presets.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What a framework does beside the plan.

    Attributes:
        name: of the preset.
        joined: share of the way from eager elementwise kernels (0) to those that a compiler joins (1).
        attention: ``fused`` (never holds the scores) or ``scores`` (holds them: two products and a softmax).
        scores: kernels' reads and writes of a score, forward, where they are held; the backward's are as many and half.
        scores_kept: bytes of a score kept for the backward.
        launches: host launches an operation takes, against an eager one; 0 where graphs launch them.
        overlap: share of the data-parallel reduction that can hide behind backward.
        overlap_tensor: share of tensor parallelism's that can hide behind its products.
        selective: what selective recompute computes again: ``attention``, ``alternate`` blocks, ``cheap`` operations,
            or these and every ``second`` product.
        weights: bytes a parameter takes while computing.
        master: bytes of its copy that the optimizer steps, where there is another.
        gradients: bytes of a gradient while it is summed.
        sent: bytes of a gradient when it is reduced.
        update: bytes moved to step a parameter.
        speed: of its fused attention, against the best there is.
        relay: seconds of the host to hand something to another stage.
        scatter: ranks of ``tp`` each send a share of what goes to the next stage, and gather it there.
        network: bytes/s of a node that the framework's published runs are taken to have had where they state none.
        gathered: bytes of a parameter when sharded ones are gathered.
        contention: share of an exchange that runs beside computing by which it slows computing down.
        gathers_ahead: whether values stepped in shards are gathered behind the next forward.
        reach: share of what collectives can do that its gathering and reducing over replicas does: buckets, waiting.
        prints_reserved: what it prints as its peak is what the allocator reserved.
        doubt: how much further off than others forecasts of it are.
        rest: seconds of each step that no part explains: data, logging, synchronisation.
        reserved: reserved memory over allocated.
        beside: bytes that the process keeps on the device beside tensors: buffers of collectives, workspaces.
        gradients_stay: whether gradients lie in buffers that stay from step to step.
        stepping: bytes a parameter needs for the time of the optimizer's step.
        blocks_gathered: blocks whose sharded parameters are there whole at one time.
        root_gathered: whether all parameters outside of blocks are gathered from the forward's begin to its end.
        unscattered: gradients of blocks, not scattered yet, that are there at one time.
        logits: bytes a logit takes at the peak, loss and gradient included; 0 for what the profile says.
        logits_whole: bytes instead, with ``tp``, where each of its ranks gathers all classes; 0 where they divide them.
        norms_kept: bytes an element that each norm keeps beyond its input and output.
        ahead: how far zero-bubble schedules run ahead of 1F1B, in its activations.
        shards_over_cp: whether ranks of ``cp`` share out what those of ``fsdp`` do.
        gathers_kept: whether products behind sequence parallelism keep what was gathered for them.
        logits_twice: whether the loss over classes that ``tp`` has cut keeps them twice, where ``logits`` is 0.
        autocast: whether half precision casts weights where they are read, and leaves the stream in fp32 (not where
            ``zero=3`` gathers them in it).
        stops_early: whether computing a block again ends at what it saved last, before its results are added up.
        balances: whether stages of a pipeline are cut by what they cost, else by their number of blocks.
        one_memory: whether what is kept on the host is in the memory that is looked at: on CPUs.
        buffered: blocks that are there once more, in the buffers that they are gathered in.
        buckets: buckets of whole gradients under way at one time where ``zero`` is 1 or 2; 0 where that is not known.
        reducing_last: whether buffers of gathering and reducing are there beside all gradients, as the last ones come.
        whole_backwards: whether a pipeline does a backward in halves only where nothing is computed again and ``zero``
            shards no gradients, as hooks on parameters want.
        stages_whole: whether a pipeline's stages stay gathered through a step, and their gradients whole.
    """

    name: str
    joined: float = 0.0
    attention: Literal["fused", "scores"] = "fused"
    scores: float = 5.0
    scores_kept: float = 5.0
    launches: float = 1.0
    overlap: float = 0.0
    overlap_tensor: float = 0.0
    selective: Literal["attention", "alternate", "cheap", "second"] = "cheap"
    weights: float = 4.0
    master: float = 0.0
    gradients: float = 4.0
    sent: float = 4.0
    update: float = 28.0
    speed: float = 1.0
    relay: float = 0.0
    scatter: bool = False
    network: float = 0.0
    gathered: float = 4.0
    contention: float = 0.1
    gathers_ahead: bool = False
    reach: float = 1.0
    prints_reserved: bool = True
    doubt: float = 1.0
    rest: float = 2e-3
    reserved: float = 1.1
    beside: float = 0.0
    gradients_stay: bool = False
    stepping: float = 0.0
    blocks_gathered: float = 2.0
    root_gathered: bool = True
    unscattered: float = 1.0
    logits: float = 0.0
    logits_whole: float = 0.0
    norms_kept: float = 0.0
    ahead: float = 1.0
    shards_over_cp: bool = False
    one_memory: bool = True
    buffered: float = 0.0
    buckets: float = 0.0
    reducing_last: bool = False
    stages_whole: bool = False
    whole_backwards: bool = False
    gathers_kept: bool = False
    logits_twice: bool = False
    autocast: bool = False
    stops_early: bool = False
    balances: bool = False


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
