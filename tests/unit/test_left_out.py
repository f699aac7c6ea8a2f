"""Forecasts of a source that no constant has seen: fitted without it, judged by all others' errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_profiles import transformer

from phalanx.forecast.uncertainty import measured
from published import Row, forecast_rows, left_out
from published.accuracy import Comparison
from published.left_out import CONSTANTS, Fit, LeftOut, Without, coverage, framework, known, spread
from published.page import left_out_page, write_spread
from published.subject import NAMED

FREE = ("product", "stream", "eager", "fused")
TRUE = {"ampere.product": 0.6, "ampere.stream": 0.5, "eager": -1.0, "fused": 0.5}
FRAMEWORKS = ("Megatron-LM", "InternEvo", "torchtitan", "ZeroBubble-Megatron")
MICROS = (1, 2, 8)
PROFILE = transformer(layers=8, width=2048, heads=16)


def row(framework: str, micro: int, seconds: float = 1.0) -> Row:
    cells = {
        "id": f"{framework}-{micro}",
        "kind": "transformer",
        "framework": framework,
        "source": "",
        "layers": "8",
        "hidden": "2048",
        "heads": "16",
        "seq": "512",
        "vocab": "1000",
        "device": "A100-80GB-SXM",
        "devices": "8",
        "per_node": "8",
        "batch": "64",
        "dp": "8",
        "micro": str(micro),
        "precision": "bf16",
        "step_s": str(seconds),
    }
    return Row(id=cells["id"], cells=cells)


@pytest.fixture(autouse=True)
def few_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that the rows here can tell are fitted, and the few rows outweigh what they start from."""
    free = [one.name in FREE and one.family != "hopper" for one in CONSTANTS]
    kept = [replace(one, spread=3 * one.spread if wide else 0.0) for one, wide in zip(CONSTANTS, free, strict=True)]
    monkeypatch.setattr(left_out, "CONSTANTS", tuple(kept))


def rows(*, slow: str = "") -> list[Row]:
    """Runs whose times follow the model with constants ``TRUE``; those of ``slow`` take three times as long."""
    steps = forecasts_with(TRUE, FRAMEWORKS)
    asked = [(name, micro) for name in FRAMEWORKS for micro in MICROS]
    return [row(name, micro, steps[f"{name}-{micro}"] * (3.0 if name == slow else 1.0)) for name, micro in asked]


def forecasts_with(values: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """Seconds of a step by row, with ``values`` and else what constants start from."""
    start = {f"{one.family}.{one.name}" if one.family else one.name: one.start for one in CONSTANTS}
    found: dict[str, float] = {}
    for one in (row(name, micro) for name in names for micro in MICROS):
        there = left_out.replace_constants(left_out.subject(one, network=False), {**start, **values})
        work = left_out.Work(profile=PROFILE, batch=there.batch, length=there.length)
        (forecast,) = left_out.forecasts(work, [there.plan], there.cluster, there.preset)
        found[one.id] = forecast.step
    return found


class TestFit:
    def test_sources_that_follow_the_model_are_forecast_unseen(self) -> None:
        there = rows()
        fit, unfitted = Fit(there, lambda _: PROFILE), forecasts_with({}, FRAMEWORKS)
        for one in fit.without(framework):
            worst = max(abs(each.error) for each in one.found)
            before = max(abs(unfitted[each.row.id] / each.row.step - 1) for each in one.found)
            assert worst < before / 2, one.source
            assert worst < 0.1

    def test_what_is_left_out_has_no_say(self) -> None:
        plain, odd = Fit(rows(), lambda _: PROFILE), Fit(rows(slow="torchtitan"), lambda _: PROFILE)
        assert plain.values() != pytest.approx(odd.values(), rel=0.05)  # where it is not left out, it has
        before, after = (
            next(one for one in fit.without(framework) if one.source == "torchtitan") for fit in (plain, odd)
        )
        steps = [[each.forecast.step for each in one.found] for one in (before, after)]
        assert steps[1] == pytest.approx(steps[0], rel=0.02)

    def test_of_a_framework_only_facts_are_used(self) -> None:
        values = {one.name: 0.3 for one in CONSTANTS if not one.family}
        fitted = {"joined", "overlap", "scores", "speed", "reach", "relay", "network", "launches", "rest", "contention"}
        one, other = (known(NAMED[name], values) for name in ("megatron-2021", "megatron-deepspeed"))
        assert all(getattr(one, name) == getattr(other, name) for name in fitted)
        assert (one.attention, one.sent, one.scatter) == (NAMED[one.name].attention, 2.0, True)


def off(source: str, *sizes: float) -> Without:
    """A source whose forecasts are off by these logarithms."""
    (one,) = forecast_rows([row("Megatron-LM", 1)], lambda _: PROFILE).found
    found = [replace(one, row=row("Megatron-LM", 1, one.forecast.step * math.exp(size))) for size in sizes]
    return Without(source=source, found=tuple[Comparison, ...](found))


class TestSpread:
    def test_each_source_counts_the_same(self) -> None:
        many, one, other = off("many", *[0.1] * 50), off("one", 0.2), off("other", -0.4)
        assert spread([many, one, other]) == pytest.approx(0.4)  # 2.4 of 3 sources
        assert spread([many, one, other], share=0.6) == pytest.approx(0.2)
        assert coverage([many, one, other]) == {"many": 1.0, "one": 1.0, "other": 0.0}

    def test_what_is_written_leaves_own_runs_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "spread.toml"
        path.write_text("[own]\nruns = 3\n")
        groups = (off("one", 0.2), off("other", -0.3, 0.1))
        write_spread(path, LeftOut(sources=groups, devices=groups[:1], constants={}))
        text = path.read_text()
        assert "[own]\nruns = 3" in text
        assert "[published]\nruns = 3\ngroups = 2" in text
        assert "all = 0.3" in text

    def test_the_page_says_medians_and_shares(self) -> None:
        groups = (off("one", 0.2), off("other", -0.3, 0.1))
        text = left_out_page(LeftOut(sources=groups, devices=groups, constants={}), groups[0].found)
        assert "| one | 1 | 18.1% | 18.1% | -18.1% | 100% |" in text
        assert "| other | 2 |" in text

    def test_every_kind_of_evidence_is_there(self) -> None:
        assert all(0 < found["four_of_five"]["all"] < 3 for found in measured().values())
        assert set(measured()) == {"own", "catalog", "published", "unknown"}
