"""What is proven where, and how far rounding may move a parameter, a moment or a running mean in a proof."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from in_one_test import in_one_test
from phalanx.config import Plan, RunSpec
from phalanx.errors import RefusedError
from phalanx.hardware import proven
from phalanx.hardware.proven import Ground, shipped, ships_proven, store, stored, techniques
from phalanx.launch.proof_asked import refuse_unproven
from phalanx.verify.compare import FirstGradient, Tolerance, parameters
from phalanx.verify.evidence import first_gradients
from phalanx.verify.judge import Pair, judged
from phalanx.verify.record import END, FIRST, START, RunRecord, StepRecord
from phalanx.verify.wandering import fed_by, wandering_means

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's proofs stand."""
    return tmp_path / "proofs"


def ground(words: str = "dp", **how: str) -> Ground:
    given = {"kind": "cuda", "name": "NVIDIA H100", "backend": "nccl", "torch": "2.13.0+cu130", "phalanx": "0.1.0"}
    return Ground(**{**given, **how}, techniques=words)


@in_one_test(
    ("plan", "words"),
    [
        ("single", "single"),
        ("dp=2", "dp"),
        ("fsdp=4 zero=2", "fsdp zero=2"),
        ("dp=2 tp=2 sequence=true", "dp tp sequence=true"),
        ("pp=2 micro=4 schedule=gpipe", "pp schedule=gpipe micro"),
        ("pp=2 split=layers.1", "pp split"),
        ("cp=2 attention=alltoall", "cp attention=alltoall"),
        ("dp=2 shares=auto", "dp shares"),
        ("dp=2 compress=powersgd:4", "dp compress=powersgd"),
        ("dp=2 sync=diloco every=10 outer_lr=0.5", "dp sync=diloco every outer_lr"),
        ("dp=2 server=1 staleness=4", "dp server staleness"),
        ("precision=bf16 compile=true", "precision=bf16 compile=true"),
    ],
)
def test_techniques_are_the_keys_without_their_sizes(plan: str, words: str) -> None:
    assert sorted(techniques(Plan.parse(plan)).split()) == sorted(words.split())


def test_no_version_of_torch_is_claimed_but_those_the_suite_runs() -> None:
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned
    for row in shipped():
        assert row["torch"] == [pinned[1]]
        assert (ROOT / "docs" / "reference" / row["shown"]).is_file()
    assert ships_proven("cpu", f"{pinned[1]}.7+cpu")
    assert not ships_proven("cpu", f"{pinned[1]}1.0")
    assert not ships_proven("cuda", f"{pinned[1]}.0")


def test_a_stored_proof_is_of_its_ground_alone(folder: Path) -> None:
    assert store(ground(), {"plan": "dp=2"}) == ""
    found = stored(ground())
    assert found is not None
    assert found["plan"] == "dp=2"
    other = {"kind": "xpu", "name": "NVIDIA H200", "backend": "gloo", "torch": "2.13.1+cu130", "phalanx": "0.2.0"}
    for name, value in other.items():
        assert stored(replace(ground(), **{name: value})) is None, name
    for words in ("dp tp", "tp", "dp precision=bf16", "fsdp"):
        assert stored(ground(words)) is None, words


@pytest.mark.parametrize(
    ("words", "alone"),
    [("dp", "single"), ("dp tp", "tp"), ("fsdp zero=1 precision=bf16", "precision=bf16"), ("dp fsdp", "single")],
)
def test_replicas_of_something_show_it_alone(folder: Path, words: str, alone: str) -> None:
    store(ground(words), {})
    assert stored(ground(alone)) is not None


@in_one_test(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"of": {"kind": "cuda"}}',
        b'{"of": 1, "of": 2}',
        b"[" * 10_000,
    ],
)
def test_a_damaged_proof_is_none(folder: Path, damage: bytes) -> None:
    store(ground(), {})
    for path in folder.iterdir():
        path.write_bytes(damage)
    assert stored(ground()) is None
    assert store(ground(), {}) == ""
    assert stored(ground()) is not None


def test_a_proof_of_another_ground_under_its_name_is_none(folder: Path) -> None:
    store(ground(), {})
    for path in folder.iterdir():
        path.write_text(json.dumps({"of": asdict(ground("tp"))}))
    assert stored(ground()) is None


def test_a_worker_refuses_what_nothing_has_proven_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSpec(job="a.py", plan=Plan(dp=4), folder=Path("run"))
    assert refuse_unproven(run, 4) == ""
    monkeypatch.setattr(proven, "torch_version", lambda: "9.1.0")
    with pytest.raises(RefusedError, match=r"dp=4 on cpu .* torch 9\.1\.0, where dp was never proven") as refused:
        refuse_unproven(run, 4)
    assert "unproven=True" in str(refused.value)
    assert refuse_unproven(replace(run, unproven=True), 4).startswith("not proven: dp on cpu")
    store(Ground.of(Plan(dp=2), "cpu"), {})
    assert refuse_unproven(run, 4) == ""


LR, EPS = 1e-3, 1e-8
TOLERANCE = Tolerance(loss=1e-5, gradient=1e-5, scale=1e-5, noise=1e-5, parameter=1e-4)


def adam(start: Tensor, gradient: Tensor) -> Tensor:
    """After the first step of Adam without weight decay: the moments are the gradient and its square."""
    return start - LR * gradient / (gradient.abs() + EPS)


def beyond(gradient: Tensor, off: Tensor, *, error: float = 1e-5, rounded: Tensor | None = None) -> bool:
    """Whether a step with ``gradient + off`` is told from one with ``gradient``."""
    start = torch.zeros_like(gradient)
    known = {"w": FirstGradient(values=gradient, error=error, rounded=rounded)}
    here, there = adam(start, gradient), adam(start, gradient + off)
    (found,) = parameters({"w": start}, {"w": here}, {"w": there}, known, TOLERANCE)
    return found.beyond


def gradient() -> Tensor:
    return torch.randn(2048, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4e-4


def test_a_gradient_smaller_than_adams_epsilon_turns_its_rounding_into_a_part_of_a_step() -> None:
    """As was measured: both sides err by some 2e-7 of the root mean square, where the step is g / (|g| + 1e-8)."""
    grad, off = gradient(), torch.zeros(2048, dtype=torch.float64)
    grad[7], off[7] = 5.83e-9, 4.5e-7 * 4e-4
    assert abs(adam(torch.zeros(()), grad[7] + off[7]) - adam(torch.zeros(()), grad[7])) > 5e-3 * LR
    assert not beyond(grad, off)
    off[8] = grad[8] * -2  # a sign that rounding cannot turn
    assert beyond(grad, off)


def test_a_sign_that_rounding_may_turn_makes_twice_a_step() -> None:
    grad = torch.ones(32, dtype=torch.float64)
    grad[3] = 0.02
    off = torch.zeros_like(grad)
    off[3] = -0.025
    assert beyond(grad, off, error=1e-3)
    assert not beyond(grad, off, error=0.029)  # of half precision: its own rounding is 0.029 of the root mean square


def record(first: Tensor, second: Tensor) -> RunRecord:
    """Two steps of a parameter beside a large one; after the first it has moved by a whole step."""
    large, start = torch.full((4,), 1.0), torch.zeros(4)
    values = {START: start, FIRST: adam(start, first), END: adam(adam(start, first), second)}
    others = {START: start, FIRST: adam(start, large), END: adam(adam(start, large), large)}
    return RunRecord(
        steps=[StepRecord(loss=1.0), StepRecord(loss=1.0)],
        values={moment: {"small": values[moment], "large": others[moment]} for moment in (START, FIRST, END)},
        options={"small": {"weight_decay": 0.0}, "large": {"weight_decay": 0.0}},
        reduced={0: {"small": first, "large": large}, 1: {"small": second, "large": large}},
    )


def test_what_rounding_alone_has_moved_may_be_off_by_twice_that() -> None:
    rounding, meant = torch.full((4,), 1e-7), torch.full((4,), 0.1)
    one, other = record(rounding, meant), record(-rounding, meant)
    known = first_gradients(one, TOLERANCE)
    assert known["large"].rounded is None
    assert torch.equal(known["small"].values, meant)
    moved = known["small"].rounded
    assert moved is not None
    assert torch.allclose(moved, torch.full((4,), LR * 0.909), rtol=1e-2)  # 1e-7 / (1e-7 + 1e-8)
    off = {one.name: one for one in parameters(one.values[START], one.values[END], other.values[END], known, TOLERANCE)}
    assert not off["small"].beyond
    assert off["small"].relative > 0.9
    pair = Pair(one=one, other=other, plan=Plan(), tolerance=TOLERANCE)
    assert pair.silent == ["small"]
    with pytest.MonkeyPatch.context() as patch:  # once for a proof, which asks for it several times
        patch.setattr("phalanx.verify.compare.gradients", None)
        assert pair.silent == ["small"]
    checks = {check.when: check for check in judged(pair) if check.kind == "parameter"}
    assert [one.name for one in checks["after the first update"].differences] == ["large"]
    assert not checks["after the last step"].first
    silent = record(torch.zeros(4), meant)  # no gradient at all moves nothing
    assert first_gradients(silent, TOLERANCE)["small"].rounded is None


def moments(off: float, ways: float) -> RunRecord:
    """Adam's first moment after three gradients of which the third takes back the others, but for a hundredth."""
    first, second = torch.tensor([1.0]), torch.tensor([1.0])
    third = torch.tensor([-0.9 - 0.81 + 0.01])
    last = 0.1 * (0.81 * first + 0.9 * second + third) + off
    return RunRecord(
        steps=[StepRecord(loss=1.0) for _ in range(3)],
        values={moment: {"w": torch.zeros(1)} for moment in (START, FIRST, END)},
        options={"w": {}},
        reduced={0: {"w": first}, 1: {"w": second}, 2: {"w": third}},
        used={0: {"w": first}, 1: {"w": second}, 2: {"w": third}},
        ways={"w": ways} if ways else {},
        state={FIRST: {"w.exp_avg": 0.1 * first}, END: {"w.exp_avg": last}},
    )


def test_a_moment_that_adds_up_to_nearly_nothing_may_be_off_by_what_its_terms_may_be_off_by() -> None:
    def told(off: float, ways: float = 3.7) -> bool:
        pair = Pair(one=moments(0.0, ways), other=moments(off, 0.0), plan=Plan(), tolerance=TOLERANCE)
        checks = {check.when: check for check in judged(pair) if check.kind == "state"}
        return bool(checks["after the last step"].first)

    rounding = 0.1 * 3.7 * TOLERANCE.parameter  # 0.37 beside a moment of 0.001: 370 times its own share
    assert not told(0.9 * rounding)
    assert told(1.1 * rounding)
    assert told(0.9 * rounding, ways=0.0)  # where the terms are not known, the moment's own size counts


RATE, STEPS = 0.01, 12


def record_of(**options: object) -> RunRecord:
    steps = [StepRecord(loss=1.0, rates={"0.bias": RATE}) for _ in range(STEPS)]
    return RunRecord(steps=steps, values={START: {}, END: {}}, options={"0.bias": options})


@in_one_test(("betas", "momentum"), [((0.9, 0.999), 0.1), ((0.0, 0.99), None), ((0.95, 0.95), 0.1)])
def test_no_gradients_move_a_running_mean_further(betas: tuple[float, float], momentum: float | None) -> None:
    fed = {"1.running_mean": ["0.bias", momentum]}
    allowed = wandering_means(record_of(betas=betas), ["0.bias"], fed)["1.running_mean"]
    draws, furthest = torch.Generator().manual_seed(0), 0.0
    for way in range(64):
        bias = nn.Parameter(torch.zeros(64))
        optimizer = torch.optim.Adam([bias], lr=RATE, betas=betas, eps=1e-30)
        mean = torch.zeros(64)
        for step in range(STEPS):
            share = 1 / (step + 1) if momentum is None else momentum
            mean = (1 - share) * mean + share * bias.detach()
            size = torch.exp(torch.randn(64, generator=draws) * (way % 8))  # from all alike to a few that are large
            bias.grad = size * (1.0 if way % 2 else torch.randn(64, generator=draws).sign())
            optimizer.step()
        furthest = max(furthest, float(mean.abs().max()))
    assert 2 * furthest <= allowed * (1 + 1e-5)
    assert allowed < 20 * furthest  # and is no bound that nothing reaches


def test_only_the_bias_right_before_it_feeds_a_batch_norm() -> None:
    module = nn.Sequential(
        OrderedDict(
            keys=nn.Linear(8, 8),
            values=nn.Linear(8, 8, bias=False),
            norm=nn.BatchNorm1d(8),
            conv=nn.Conv1d(8, 8, 1),
            act=nn.ReLU(),
            drop=nn.Dropout(),
            after=nn.BatchNorm1d(8, momentum=0.3),
            plain=nn.BatchNorm1d(8, track_running_stats=False),
        )
    )
    assert fed_by(module) == {"after.running_mean": ["conv.bias", 0.3]}
