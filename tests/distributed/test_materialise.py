"""A rank makes its part of a model piece by piece: its values are one device's, bit for bit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import init

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group
from phalanx.errors import DataError
from phalanx.launch.local import launch
from phalanx.parallel import deferred_init
from phalanx.parallel.deferred_init import UnrecordedError, fill, recipes, recorded
from phalanx.parallel.local_shards.axis import kept
from phalanx.train.assembly import build
from phalanx.train.build_model import build_model

WIDTH = 24


class Drawn(nn.Module):
    """Parameters that come about in every way that people write."""

    def __init__(self) -> None:
        super().__init__()
        n = WIDTH
        self.plain = nn.Parameter(torch.randn(n, n))
        self.orthogonal = nn.Parameter(init.orthogonal_(torch.empty(n, n + 8)))
        self.truncated = nn.Linear(n, n)
        init.trunc_normal_(self.truncated.weight, std=0.02, a=-0.03, b=0.03)
        self.tied = nn.Linear(n, n)
        self.tied.weight = self.truncated.weight
        self.sparse = nn.Parameter(init.sparse_(torch.empty(n, n), 0.3))
        with torch.no_grad():
            self.truncated.weight[3].zero_()
            self.truncated.weight.copy_(self.truncated.weight.t().clone()).mul_(2.0)
        self.q, self.k = (nn.Parameter(part.clone()) for part in torch.randn(2 * n, n).chunk(2))
        self.mixed = nn.Parameter(torch.where(torch.rand(n, n) > 0.5, self.plain.detach(), torch.zeros(())))
        self.shuffled = nn.Parameter(torch.randn(n, n)[torch.randperm(n)])
        own = torch.Generator().manual_seed(7)
        self.own = nn.Parameter(torch.randn(n, n, generator=own))
        init.normal_(self.own, generator=own)
        self.given = nn.Parameter(torch.empty(n, n))
        values = torch.zeros(n, n)
        for _ in range(2):  # memory that is written into again after it was read
            values.copy_(torch.from_numpy(np.random.randn(n, n)))
            self.given.data.add_(values) if _ else self.given.data.copy_(values)
        self.scale = float(self.plain.detach().abs().max())
        self.scaled = nn.Parameter(torch.randn(n, n) * self.scale)
        weights = torch.randn(n, n)
        weights[weights < 0] = 0
        self.positive = nn.Parameter(weights, requires_grad=False)
        self.register_buffer("mask", torch.ones(n, n).tril().bool())
        self.table = torch.rand(n, n)
        self.small = nn.Parameter(torch.rand(7))


class Recurrent(nn.LSTM):
    """torch's own, which keeps a list of its weights beside their names."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 2)


def of_transformers(kind: str, **sizes: int) -> Callable[[], nn.Module]:
    """A small model of that class."""

    def make() -> nn.Module:
        import transformers

        family = next(one for one in ("GPT2", "Llama", "Bert", "T5", "Mixtral") if kind.startswith(one))
        return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(vocab_size=64, **sizes))

    make.__name__ = kind
    return make


HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
gpt2 = of_transformers("GPT2LMHeadModel", n_positions=16, n_embd=32, n_layer=2, n_head=2)
llama = of_transformers("LlamaForCausalLM", num_key_value_heads=2, pad_token_id=3, **HEADS)
bert = of_transformers("BertForMaskedLM", max_position_embeddings=12, **HEADS)
t5 = of_transformers("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
mixtral = of_transformers("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **HEADS)


def copies() -> nn.Module:
    """Blocks that torch copies from the first."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 2)


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24, 30))


def normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def halved() -> nn.Module:
    """Of another precision, in the memory of the first."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurrent()).bfloat16()


MODELS = [Drawn, Recurrent, copies, convnet, normed, halved, gpt2, llama, bert, t5, mixtral]


@pytest.fixture(autouse=True)
def _small_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "LARGE", 64)


def seeded() -> None:
    torch.manual_seed(5)
    np.random.seed(5)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (type(one), one.dtype, one.stride(), one.requires_grad) == (
        type(other),
        other.dtype,
        other.stride(),
        other.requires_grad,
    )
    return alike and torch.equal(one, other)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_parameters_are_those_of_one_device(make: Callable[[], nn.Module]) -> None:
    seeded()
    whole, after = make(), torch.get_rng_state()
    seeded()
    pieces = recorded(make)
    assert torch.equal(torch.get_rng_state(), after)
    known = recipes(pieces)
    assert any(tensor.is_meta for tensor in pieces.parameters())
    assert all(tensor.is_meta or tensor.numel() < 64 for tensor in pieces.parameters())
    fill(pieces, known)
    assert [name for name, _ in pieces.named_parameters()] == [name for name, _ in whole.named_parameters()]
    theirs, wrong = dict(pieces.named_parameters()) | dict(pieces.named_buffers()), []
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        if not same(tensor, theirs[name]):
            wrong.append(name)
    assert not wrong


def test_only_what_is_kept_is_made() -> None:
    seeded()
    whole = Drawn()
    seeded()
    pieces = recorded(Drawn)
    known = recipes(pieces)
    del pieces.orthogonal, pieces.q
    fill(pieces, known)
    assert torch.equal(pieces.k, whole.k)
    assert torch.equal(pieces.scaled, whole.scaled)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        table = torch.randn(WIDTH, WIDTH)
        self.read = lambda: table


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(part) for part in torch.randn(2, WIDTH, WIDTH).unbind())


@pytest.mark.parametrize("make", [Kept, Shared])
def test_what_cannot_be_repeated_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnrecordedError):
        recorded(make)


class Net(nn.Module):
    """Blocks for any plan; ``keep`` is what cannot be repeated."""

    def __init__(self, width: int, layers: int, keep: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 5)
        self.keep = Kept() if keep else None
        with torch.no_grad():
            for layer in self.layers:
                layer[2].weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def job(width: int = WIDTH, layers: int = 2, keep: bool = False) -> px.Job:
    generator = torch.Generator().manual_seed(1)
    table = px.Table(x=torch.randn(8, width, generator=generator), y=torch.randint(5, (8,), generator=generator))
    return px.Job(
        model=lambda: Net(width, layers, keep),
        data=lambda: table,
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        inputs=lambda batch: batch["x"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=8,
        steps=2,
    )


SLICED = ("pp=2 tp=2 micro=4", "fsdp=2 offload=parameters precision=bf16")
ALSO_SLICED = (
    *(
        "tp=2",
        "pp=2 micro=4",
        "tp=2 fsdp=2",
        "tp=2 fsdp=2 zero=2",
        "fsdp=2 zero=1",
        "fsdp=2 zero=2 offload=optimizer",
        "fsdp=3",
    ),
    "dp=2 fsdp=2 recompute=full",
)


@pytest.mark.parametrize("plan", [*SLICED, *longer(*ALSO_SLICED)])
def test_a_rank_holds_its_slices_of_one_device_s_values(plan: str) -> None:
    laid = px.Plan.parse(f"{plan} device=cpu")
    whole = dict(build_model(job()).named_parameters())

    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        with default_process_group(place, torch.device("cpu")):
            assembly = build(job(), laid, place, torch.device("cpu"))
            wrong = [note for note in assembly.notes if "piece by piece" in note]
            for name, tensor in assembly.layout.holdings.module.named_parameters():
                holding = assembly.layout.holdings.slices.get(name)
                local = kept(whole[name], holding.placed) if holding else whole[name]
                given = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                if not torch.equal(given, local):
                    wrong.append(name)
            return wrong

    assert launch(work, laid.world_size) == [[]] * laid.world_size


@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("tp=2", "fsdp=2")])
def test_a_model_that_cannot_be_repeated_is_built_whole_and_said_to_be(plan: str) -> None:
    laid = px.Plan.parse(f"{plan} device=cpu")

    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        with default_process_group(place, torch.device("cpu")):
            return build(job(keep=True), laid, place, torch.device("cpu")).notes

    for notes in launch(work, 2):
        assert any("could not be built piece by piece" in note for note in notes)


def test_ranks_that_draw_other_values_are_found_before_any_is_made() -> None:
    laid = px.Plan.parse("tp=2 device=cpu")

    def work(place: Place, report: Callable[[int], None]) -> str:
        def model() -> nn.Module:
            if place.rank:
                torch.rand(1)
            return Net(WIDTH, 2)

        changed = replace(job(), model=model)
        with default_process_group(place, torch.device("cpu")):
            try:
                build(changed, laid, place, torch.device("cpu"))
            except DataError as error:
                return str(error)
        return ""

    for said in launch(work, 2):
        assert "other initial values on rank 1" in said


def test_whoever_looks_at_this_thread_from_another_changes_nothing() -> None:
    """A probe, a profiler or a debugger holds frames for a moment, and with them what their functions had made."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            frame = sys._current_frames().get(main)
            time.sleep(0.005)
            del frame

    def make() -> nn.Module:
        module = nn.Linear(128, 64)
        weight = module.weight.clone()  # a local of this frame, until the frame goes
        time.sleep(0.006)
        assert weight.shape == (64, 128)
        return module

    main, watcher = threading.get_ident(), threading.Thread(target=look)
    watcher.start()
    try:
        assert all(recipes(recorded(make)) for _ in range(8))
    finally:
        over.set()
        watcher.join()
