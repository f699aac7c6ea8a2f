"""Short sweeps over the operations and collectives of training: how long each takes on this machine, by size.

Torch is imported by the functions that need it. Shapes of products are (m, n, k). Of collectives, all ranks of the
default group take part.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

from phalanx.device_kinds import kind_of

if TYPE_CHECKING:
    import torch


Kind = Literal["product", "convolution", "attention", "stream", "named", "floor", "optimizer"]

_PRODUCTS = (
    (32, 256, 64), (64, 64, 64), (8, 1024, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 768, 256),
    (512, 384, 384), (1024, 384, 384), (768, 256, 1024), (512, 2048, 512), (1024, 1024, 1024),
)  # fmt: skip
# samples, from, to, side
_CONVOLUTIONS = ((32, 1, 32, 28), (16, 16, 32, 28), (32, 32, 64, 14), (16, 64, 64, 14), (8, 64, 128, 14))
_ATTENTIONS = ((8, 4, 64, 32), (4, 4, 128, 64), (4, 6, 256, 64), (8, 8, 128, 32))  # samples, heads, tokens, width
_STREAMS = (10_000, 30_000, 100_000, 200_000, 400_000, 700_000, 1_500_000)  # elements
_LAYERS = 20
_CACHES = 8e6  # bytes that no core caches for itself
_KEPT = 4  # results that are there at once, as in training: each finds memory that was used a while ago
_ROWS, _WIDTH = 512, 384


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measurement.

    Attributes:
        name: of the operation, precision or optimizer.
        sizes: of the measured operation; see the function that made it.
        seconds: of one call.
        backward: whether it is of the backward.
    """

    kind: Kind
    name: str
    sizes: tuple[float, ...]
    seconds: float
    backward: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The duration of measurements.

    Attributes:
        rounds: number of rounds; their median counts.
        seconds: of one round at least.
        passes: over all sweeps; their mean counts.
        shapes: of each kind of operation at most.
        parameters: of each tensor that optimizers step.
    """

    rounds: int = 7
    seconds: float = 0.004
    passes: int = 2
    shapes: int = 100
    parameters: int = 600_000


QUICK = Pace(rounds=1, seconds=0.0, passes=1, shapes=3, parameters=10_000)


def sweep(pace: Pace, device: str = "cpu") -> list[Measurement]:
    """Run every sweep of one device, in about 10 s at the usual pace."""
    parts = (floors, products, convolutions, attentions, streams, named, optimizers)
    with _alone():
        passes = [[point for part in parts for point in part(pace, device)] for _ in range(pace.passes)]
    return [replace(same[0], seconds=mean(one.seconds for one in same)) for same in zip(*passes, strict=True)]


def products(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield products m x k by k x n in fp32 and bf16; sizes: m, n, k."""
    import torch

    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for m, n, k in _PRODUCTS[: pace.shapes]:
            left = torch.randn(m, k, device=device).to(dtype)
            # a step reads each weight once: by the next it has left the caches
            copies = 1 + int(_CACHES / (n * k * left.element_size()))
            weights = cycle([torch.randn(n, k, device=device).to(dtype) for _ in range(min(copies, 16))])
            seconds = seconds_of(lambda: torch.nn.functional.linear(left, next(weights)), pace, device)  # noqa: B023
            yield Measurement(kind="product", name=name, sizes=(m, n, k), seconds=seconds)


def convolutions(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield 3 x 3 convolutions; sizes: m, n, k of the equivalent product. Backward: of both gradients together."""
    import torch

    for samples, inside, out, side in _CONVOLUTIONS[: pace.shapes]:
        image = torch.randn(samples, inside, side, side, device=device, requires_grad=True)
        weight = torch.randn(out, inside, 3, 3, device=device, requires_grad=True)
        sizes = (samples * side * side, out, inside * 9)
        forward, backward = _both(
            lambda: torch.nn.functional.conv2d(image, weight, padding=1),  # noqa: B023
            (image, weight), pace, device,
        )  # fmt: skip
        yield Measurement(kind="convolution", name="fp32", sizes=sizes, seconds=forward)
        yield Measurement(kind="convolution", name="fp32", sizes=sizes, seconds=backward, backward=True)


def attentions(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield fused causal attention; sizes: samples, heads, tokens, width of a head."""
    import torch

    for sizes in _ATTENTIONS[: pace.shapes]:
        query, key, value = (torch.randn(sizes, device=device, requires_grad=True) for _ in range(3))
        forward, backward = _both(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True),  # noqa: B023
            (query, key, value), pace, device,
        )  # fmt: skip
        yield Measurement(kind="attention", name="fp32", sizes=sizes, seconds=forward)
        yield Measurement(kind="attention", name="fp32", sizes=sizes, seconds=backward, backward=True)


def streams(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield sums of two tensors; sizes: elements read and written, bytes written."""
    import torch

    for count in _STREAMS[: pace.shapes]:
        left, right = torch.randn(count, device=device), torch.randn(count, device=device)
        seconds = seconds_of(lambda: left + right, pace, device)  # noqa: B023
        yield Measurement(kind="stream", name="add", sizes=(3 * count, 4 * count), seconds=seconds)


def named(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield operations that do more than their traffic; sizes: elements read and written, elements written."""
    for name, (work, moved, written) in operations(device).items():
        yield Measurement(kind="named", name=name, sizes=(moved, written), seconds=seconds_of(work, pace, device))


Call = tuple[Callable[[], Any], float, float]
"""A call of an operation, elements it reads and writes, elements it writes."""


def operations(device: str) -> Mapping[str, Call]:
    """Return operations by the framework's name."""
    return {**_elementwise(device), **_of_rows(device), **_of_images(device)}


def _elementwise(device: str) -> dict[str, Call]:
    import torch

    aten: Any = torch.ops.aten
    x, g = torch.randn(_ROWS, _WIDTH, device=device), torch.randn(_ROWS, _WIDTH, device=device)
    whole = float(x.numel())
    return {
        "relu": (lambda: aten.relu(x), 2 * whole, whole),
        "threshold_backward": (lambda: aten.threshold_backward(g, x, 0), 3 * whole, whole),
        "gelu": (lambda: aten.gelu(x), 2 * whole, whole),
        "gelu_backward": (lambda: aten.gelu_backward(g, x), 3 * whole, whole),
        "silu": (lambda: aten.silu(x), 2 * whole, whole),
        "silu_backward": (lambda: aten.silu_backward(g, x), 3 * whole, whole),
        "tanh": (lambda: aten.tanh(x), 2 * whole, whole),
        "native_dropout": (lambda: aten.native_dropout(x, 0.1, True), 2.25 * whole, 1.25 * whole),
        "clone": (lambda: aten.clone(x.t(), memory_format=torch.contiguous_format), 2 * whole, whole),
        "stack": (lambda: aten.stack([x, g]), 4 * whole, 2 * whole),
        "sum": (lambda: aten.sum(x, [0], True), whole + _WIDTH, _WIDTH),
    }


def _of_rows(device: str) -> dict[str, Call]:
    import torch

    aten: Any = torch.ops.aten
    x, g = torch.randn(_ROWS, _WIDTH, device=device), torch.randn(_ROWS, _WIDTH, device=device)
    whole, norm = float(x.numel()), (x, [_WIDTH])
    scale, table = torch.randn(_WIDTH, device=device), torch.randn(256, _WIDTH, device=device)
    _, mean, spread = aten.native_layer_norm(*norm, scale, scale, 1e-5)
    classes = torch.randint(_WIDTH, (_ROWS,), device=device)
    ids = classes % 256
    back = (g, *norm, mean, spread, scale, scale, [True, True, True])
    softmax, picked = (g, x, -1, torch.float32), (mean.sum(), x, classes, None, 1, -100, scale[0])
    rows = (g, ids, 256, -1, False)
    return {
        "native_layer_norm": (lambda: aten.native_layer_norm(*norm, scale, scale, 1e-5), 2 * whole + 2 * _ROWS, whole),
        "native_layer_norm_backward": (lambda: aten.native_layer_norm_backward(*back), 3 * whole + 2 * _ROWS, whole),
        "_softmax": (lambda: aten._softmax(x, -1, False), 2 * whole, whole),
        "_log_softmax": (lambda: aten._log_softmax(x, -1, False), 2 * whole, whole),
        "_log_softmax_backward_data": (lambda: aten._log_softmax_backward_data(*softmax), 3 * whole, whole),
        "nll_loss_backward": (lambda: aten.nll_loss_backward(*picked), 2 * whole, whole),
        "embedding": (lambda: aten.embedding(table, ids), 2 * whole + _ROWS, whole),
        "embedding_dense_backward": (lambda: aten.embedding_dense_backward(*rows), whole + 257 * _WIDTH, 256 * _WIDTH),
    }


def _of_images(device: str) -> dict[str, Call]:
    import torch

    aten: Any = torch.ops.aten
    images, scale = torch.randn(16, 32, 28, 28, device=device), torch.randn(32, device=device)
    whole = float(images.numel())
    pool = (images, [2, 2], [2, 2])
    pooled, where = aten.max_pool2d_with_indices(*pool)
    unpool = aten.max_pool2d_with_indices_backward
    undo, out = (pooled, *pool, [0, 0], [1, 1], False, where), float(pooled.numel())
    plain = (images, scale, scale, None, None, True, 0.1, 1e-5)
    mean, spread = aten.native_batch_norm(*plain)[1:]
    back = (images, images, scale, None, None, mean, spread, True, 1e-5, [True, True, True])
    return {
        "native_batch_norm": (lambda: aten.native_batch_norm(*plain), 2 * whole, whole),
        "native_batch_norm_backward": (lambda: aten.native_batch_norm_backward(*back), 3 * whole, whole),
        "max_pool2d_with_indices": (lambda: aten.max_pool2d_with_indices(*pool), whole + 2 * out, 3.0 * out),
        "max_pool2d_with_indices_backward": (lambda: unpool(*undo), 2 * (whole + out), whole),
    }


def floors(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield a call of one operation, and an eager step of many small layers; sizes: operations of both passes."""
    import torch

    one = torch.ones(1, device=device)
    yield Measurement(kind="floor", name="call", sizes=(1.0,), seconds=seconds_of(lambda: one + one, pace, device))
    net = torch.nn.Sequential()
    for _ in range(_LAYERS):
        net.extend([torch.nn.Linear(4, 4), torch.nn.ReLU()])
    net, x = net.to(device), torch.randn(4, 4, device=device)

    def step() -> None:
        net(x).sum().backward()
        net.zero_grad()

    yield Measurement(kind="floor", name="linear", sizes=(6.0 * _LAYERS,), seconds=seconds_of(step, pace, device))


def optimizers(pace: Pace, device: str) -> Iterator[Measurement]:
    """Yield one step of each optimizer; sizes: parameters, tensors."""
    import torch

    kinds: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda found: torch.optim.AdamW(found, lr=1e-9),
        "adamw-fused": lambda found: torch.optim.AdamW(found, lr=1e-9, fused=True),
        "sgd": lambda found: torch.optim.SGD(found, lr=1e-9, momentum=0.9),
    }
    for name, make in kinds.items():
        for tensors, each in ((20, 1000), (8, pace.parameters)):
            held = [torch.nn.Parameter(torch.randn(each, device=device)) for _ in range(tensors)]
            for one in held:
                one.grad = torch.randn_like(one)
            sizes, seconds = (float(tensors * each), float(tensors)), seconds_of(make(held).step, pace, device)
            yield Measurement(kind="optimizer", name=name, sizes=sizes, seconds=seconds)


def seconds_of(work: Callable[[], Any], pace: Pace, device: str = "cpu") -> float:
    """Return the seconds of one call of ``work``, in the median of several rounds.

    On a CPU they are those of this thread alone, which other processes hardly change.
    """
    kind = kind_of(device)
    clock = time.thread_time if kind.on_host else time.perf_counter
    results = deque([work()], maxlen=_KEPT)
    begun = clock()
    results.append(work())
    kind.synchronize()
    calls = max(1, int(pace.seconds / max(clock() - begun, 1e-7)))
    rounds: list[float] = []
    for _ in range(pace.rounds):
        begun = clock()
        for _ in range(calls):
            results.append(work())
        kind.synchronize()
        rounds.append((clock() - begun) / calls)
    return median(rounds)


def _both(forward: Callable[[], Any], inputs: tuple[Any, ...], pace: Pace, device: str) -> tuple[float, float]:
    import torch

    made = forward()
    gradient = torch.randn_like(made)
    ahead = seconds_of(forward, pace, device)
    return ahead, seconds_of(lambda: torch.autograd.grad(made, inputs, gradient, retain_graph=True), pace, device)


@contextmanager
def _alone() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
WHOLE = ("all-reduce",)
"""What replicas that hold the whole model need."""

CACHED = 8_388_608  # bytes of a tensor up to which those of all ranks fit their cache
SIZES = (4_096, 65_536, 1_048_576, CACHED, 4 * CACHED)  # bytes of the whole tensor on one rank
_SIDE = 512  # of the square product before each call: some milliseconds of a CPU core
_CALLS = 4  # of a round


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredExchange:
    """One measurement.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or ``send``.
        size: bytes of the whole tensor on one rank.
    """

    kind: str
    ranks: int
    size: float
    seconds: float


def exchanges(
    kinds: tuple[str, ...] = KINDS, *, device: str = "cpu", rounds: int = 7, sizes: tuple[int, ...] = SIZES
) -> list[MeasuredExchange]:
    """Measure collectives of ``kinds`` at every size. Collective; every rank gets its own, similar times."""
    import torch
    import torch.distributed as dist

    ranks, found = dist.get_world_size(), list[MeasuredExchange]()
    for size in sizes:
        count = max(1, size // 4 // ranks) * ranks
        whole, part = torch.ones(count, device=device), torch.ones(count // ranks, device=device)
        works = _works(whole, part)
        for kind in kinds:
            fewer = 1 if size < CACHED else 2 if size == CACHED else 5
            seconds = _together(works[kind], device, max(2, rounds // fewer)) / (2 if kind == "send" else 1)
            found.append(MeasuredExchange(kind=kind, ranks=ranks, size=4.0 * count, seconds=seconds))
    return found


def _works(whole: Any, part: Any) -> dict[str, Callable[[], Any]]:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    other = whole.clone()

    def hand_on() -> None:
        # stage by stage, as pipelines do: the even ranks send to the next, and get back
        peer = rank ^ 1
        if peer >= ranks:
            return
        for sender in (0, 1):
            (dist.send if rank % 2 == sender else dist.recv)(whole, peer)

    return {
        "all-reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        "all-gather": lambda: gather(whole, part),
        "reduce-scatter": lambda: scatter(part, whole, op=dist.ReduceOp.MAX),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "send": hand_on,
    }


def _together(work: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the seconds a call adds to ranks that each compute first, as in a step, so that waiting counts.

    It is the median of the rounds, and no less than the fastest call that ranks begin together.
    """
    import torch
    import torch.distributed as dist

    kind, matrix = kind_of(device), torch.ones(_SIDE, _SIDE, device=device)
    compute = partial(torch.mm, matrix, matrix)

    def seconds(*calls: Callable[[], Any]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(_CALLS):
            for call in calls:
                call()
        kind.synchronize()
        return (time.perf_counter() - begun) / _CALLS

    seconds(compute, work)
    added = median(seconds(compute, work) - seconds(compute) for _ in range(rounds))
    return max(added, min(seconds(work) for _ in range(_CALLS)))
