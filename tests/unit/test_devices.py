"""``phalanx devices``: the catalog in tables, and one device with its sources."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from generate import catalog_table
from phalanx import hardware
from phalanx.cli import main
from phalanx.hardware.catalog import HEADINGS, NARROW, cells


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, int]:
    with pytest.raises(SystemExit) as ended:
        main(["devices", *argv])
    code: Any = ended.value.code
    return capsys.readouterr().out, code


@pytest.mark.parametrize("width", [80, 120])
def test_every_device_is_listed_in_full(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out, code = printed(capsys)
    assert code == 0
    assert "…" not in out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in hardware.names())
    assert ("tf32" in out) == (width == 120)


def test_one_device_shows_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    out, code = printed(capsys, "h100-80gb-sxm")
    assert code == 0
    assert "NVLink 4, 450 GB/s, 3.4 µs a hop" in out
    assert "NVIDIA H100 whitepaper and datasheet (SXM5) (2023)" in " ".join(out.split())


def test_json_carries_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(printed(capsys, "--json")[0])["devices"]
    assert [one["name"] for one in every] == list(hardware.names())
    one = json.loads(printed(capsys, "H100", "--json")[0])
    assert one in every
    assert (one["peak"]["bf16"], one["network"]["bandwidth"], one["per_node"]) == (989.4e12, 400e9, 8)
    assert one["room"] == hardware.device("H100").room
    assert {source["figures"] for source in one["sources"]} >= {"device", "link", "host", "network", "room"}


def test_an_unknown_device_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "H1OO")[1] == 2


def test_rows_have_every_column() -> None:
    row = cells(hardware.entry("A100"))
    assert tuple(row) == HEADINGS
    assert set(NARROW) < set(HEADINGS)
    assert (row["bf16"], row["GiB"], row["link"], row["net"], row["ridge"]) == ("312", "80", "300", "25", "153")
    assert cells(hardware.entry("V100"))["bf16"] == ""
    assert catalog_table().count("| A100-80GB |") == 2
