"""pins/ lists what development and CI install: complete, within what pyproject.toml asks for, each file by its hash."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import audit
import pins

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTED = {name: pins.entries((ROOT / "pins" / name).read_text()) for name in pins.HEADS}
TORCH = ["torch.txt", "torch-cpu.txt"]
PYTHONS = ["3.11.7", "3.12.1", "3.13.0", "3.14.0"]


def asked(*extras: str) -> Iterator[Requirement]:
    """What the project and its ``extras`` ask for, those that extras name in turn included."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            yield from asked(*sorted(requirement.extras))
        else:
            yield requirement


def versions(requirement: Requirement, *files: str) -> list[str]:
    name = canonicalize_name(requirement.name)
    return [pins.version(block) for file in files for block in LISTED[file].get(name, [])]


@pytest.mark.quick
class TestLists:
    @pytest.mark.parametrize(
        ("requirement", "files"),
        [*((one, ["dev.txt"] if one.name != "torch" else TORCH) for one in asked("dev"))]
        + [(Requirement(one), ["audit.txt"]) for one in PROJECT["optional-dependencies"]["audit"]]
        + [(Requirement(one), ["zoo.txt"]) for one in PROJECT["optional-dependencies"]["zoo"]],
        ids=str,
    )
    def test_has_what_is_asked_for_within_its_bounds(self, requirement: Requirement, files: list[str]) -> None:
        assert (found := versions(requirement, *files)), "try: make pins"
        assert [one for one in found if one not in requirement.specifier] == [], "try: make pins"

    def test_has_what_builds_the_package(self) -> None:
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
            assert versions(Requirement(text), "dev.txt")

    @pytest.mark.parametrize("file", LISTED)
    def test_every_entry_has_hashes(self, file: str) -> None:
        blocks = [block for found in LISTED[file].values() for block in found]
        assert blocks
        assert [block for block in blocks if not re.search(r" \\\n    --hash=sha256:[0-9a-f]{64}\b", block)] == []

    @pytest.mark.parametrize("file", LISTED)
    def test_nothing_stands_beside_the_entries(self, file: str) -> None:
        """No index, no link, no place of a machine: where packages come from is the installer's business."""
        strange = re.compile(r"^(?!#|[a-z0-9-]+==|    --hash=sha256:[0-9a-f]{64}( \\)?$|    # via )", re.MULTILINE)
        text = (ROOT / "pins" / file).read_text().rstrip("\n")
        assert strange.findall(text) == []
        assert not re.search(r"://|file:|/(tmp|home|opt)/", text)

    @pytest.mark.parametrize("python", PYTHONS)
    def test_each_python_has_one_version_of_each(self, python: str) -> None:
        here = {**default_environment(), "python_full_version": python, "python_version": python.rpartition(".")[0]}
        for name, blocks in LISTED["dev.txt"].items():
            serving = [Requirement(block.partition(" \\")[0]) for block in blocks]
            fitting = [one for one in serving if one.marker is None or one.marker.evaluate(here)]
            assert len(fitting) <= 1, name
            assert len(fitting) == 1 or "sys_platform" in blocks[0], name

    def test_only_its_own_files_have_torch_and_cuda(self) -> None:
        assert [list(LISTED[file]) for file in TORCH] == [["torch"], ["torch"]]
        cpu, registry = (versions(Requirement("torch"), file) for file in reversed(TORCH))
        assert cpu == [f"{registry[0]}+cpu"]
        for file in ("dev.txt", "audit.txt", "zoo.txt"):
            assert "torch" not in LISTED[file]
            assert [name for name in LISTED[file] if name.startswith(("nvidia", "cuda", "triton"))] == []

    def test_constraints_say_the_same(self) -> None:
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            if not line.startswith("#"):
                requirement = Requirement(line)
                assert versions(requirement, "dev.txt", "torch.txt", "zoo.txt") == [str(requirement.specifier)[2:]], (
                    "try: make pins"
                )

    def test_the_libraries_of_the_zoo_ask_for_nothing(self) -> None:
        assert sorted(LISTED["zoo.txt"]) == sorted(
            Requirement(one).name for one in PROJECT["optional-dependencies"]["zoo"]
        )

    def test_what_audits_changes_nothing_that_is_installed(self) -> None:
        for name, blocks in LISTED["audit.txt"].items():
            if name in LISTED["dev.txt"]:
                assert {pins.version(one) for one in blocks} <= {pins.version(one) for one in LISTED["dev.txt"][name]}


class TestAudit:
    """pip-audit itself is stood in for: what it says is what it said where the service did not answer."""

    @staticmethod
    def say(monkeypatch: pytest.MonkeyPatch, out: object, complaint: str = "") -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, 1, out if isinstance(out, str) else json.dumps(out), complaint)

        monkeypatch.setattr(audit.subprocess, "run", run)

    def test_all_is_well(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.say(monkeypatch, {"dependencies": [{"name": "rich", "version": "1", "vulns": []}]})
        assert audit.main() == 0
        assert capsys.readouterr().out == f"no vulnerability is known of {len(audit.PINS)} packages\n"

    def test_names_what_is_known(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        fault = {"id": "CVE-1", "fix_versions": ["2"]}
        self.say(monkeypatch, {"dependencies": [{"name": "rich", "version": "1", "vulns": [fault]}]})
        assert audit.main() == 1
        assert "rich 1: CVE-1, mended in 2" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("out", "complaint", "why"),
        [
            ("", "Traceback\nERROR: connection refused\n", "connection refused"),
            ("", "", "pip-audit said nothing"),
            ({"dependencies": [{"name": "rich", "skip_reason": "not found"}]}, "", "1 of 1 left out: not found"),
        ],
    )
    def test_says_in_a_line_that_it_could_not_ask(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: object, complaint: str, why: str
    ) -> None:
        self.say(monkeypatch, out, complaint)
        assert audit.main() == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert why in shown.err

    def test_does_not_wait_for_ever(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "pip_audit.py").write_text("import time\ntime.sleep(60)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"no answer within 1 s"):
            audit.audited(tmp_path / "none.txt", seconds=1)
