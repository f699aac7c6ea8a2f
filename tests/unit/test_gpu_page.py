"""The page of GPU records, and the pack that brings a GPU machine what it needs, without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_record import pack, pack_install
from gpu_record.pack_install import PackError
from gpu_record.page import main, page, paragraph
from gpu_record.page_records import STEPS, read_records
from gpu_record.run import STEPS as PLANNED

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SMALL = "small versions on a CPU: they show that the programme works, not how fast Phalanx is"


def training(model: str, method: str, measured: float, forecast: float, **more: Any) -> dict[str, Any]:
    plain = method == "plain PyTorch"
    content = {"step_seconds": forecast, "low_seconds": 0.8 * forecast, "high_seconds": 1.2 * forecast}
    row = {
        "model": model,
        "method": method,
        "plan": "" if plain else "compile=true precision=bf16",
        "rounds": [measured, 1.01 * measured, 0.99 * measured],
        "step_seconds": measured,
        "rate": 8192 / measured,
        "rate_unit": "tokens/s",
        "mfu": 0.47,
        "peak_bytes": 40 * 2**30,
        "forecast": None if plain else {**content, "peak_bytes": 42 * 2**30, "blame": "matrix products"},
        "time_error": None if plain else forecast / measured - 1,
        "memory_error": None if plain else 0.05,
        "ratio": None if plain else 0.981,
    }
    return {**row, **more}


def step(name: str, rows: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    content = {"name": name, "status": "done", "limit": 60, "seconds": 12.5, "reason": "", "traceback": "", "facts": {}}
    return {**content, "rows": rows or [], **more}


def proof(model: str, plan: str, result: str = "equal", **more: Any) -> dict[str, Any]:
    content = {"model": model, "plan": plan, "result": result, "difference": 3.1e-7, "where": "", "reason": ""}
    return {**content, "seconds": 4.0, **more}


def record(**more: Any) -> dict[str, Any]:
    """Build a full record of a CUDA device that does not exist."""
    environment = {"gpu": "NVIDIA T1000", "gpus": 1, "memory_bytes": 80 * 2**30, "driver": "575.1", "torch": "2.13.0"}
    wait = {"steps": 50, "host_waits_per_step": 1, "ratio": 1.21}
    refused = proof("ResNet", "tp=2", "refused", difference=None, reason="no attention | nothing\nto cut")
    unequal = proof("LoRA", "micro=2", "not equal", difference=0.02, where="layer.0.weight")
    sizes = {"bytes": 4 * 10**9, "standstill_seconds": 0.033, "seconds": 2.5, "host_bytes": 5 * 2**30}
    errors = {"measured_seconds": 0.1, "forecast_catalog": 0.13, "forecast_calibrated": 0.11}
    shares = {"step_seconds": 0.21, "compute_share": 0.913, "launch_gap_share": 0.05, "host_wait_share": 0.037}
    steps = [
        step("environment", facts={**environment, "matmul_tflops": 712.0, "peak_tflops": None}),
        step("overhead", [{"model": "MLP", "method": "phalanx", "step_seconds": 2e-4, **wait}]),
        step("proof", [proof("GPT", "tp=2"), refused, unequal]),
        step(
            "llama_1b",
            [
                training("Llama 1 B", "plain PyTorch", 0.2, 0.2),
                training("Llama 1 B", "phalanx eager", 0.3, 0.39, mfu=0.31, ratio=0.66),
                training("Llama 1 B", "phalanx compiled", 0.204, 0.224),
            ],
            facts={"parameters": 1.1e9, "sequence": 2048, "note": "random tokens"},
        ),
        step("gpt2_124m", [training("GPT-2", "phalanx compiled", 0.05, 0.045)]),
        step("resnet50", [training("ResNet-50", "phalanx compiled", 0.09, 0.1, rate=711.0, rate_unit="samples/s")]),
        step("bert_base", [training("BERT", "phalanx compiled", 0.06, 0.06)]),
        step("lora_8b", [training("LoRA 8 B", "phalanx eager", 1.4, 1.5, memory_error=-0.12, ratio=None)]),
        step("checkpoint", [{**sizes, "peak_bytes_before": 2**30, "peak_bytes_during": 2**31}]),
        step(
            "calibrate",
            [{"model": "GPT-2", "method": "phalanx eager", **errors, "error_catalog": 0.3, "error_calibrated": 0.1}],
            facts={"cluster": 'name = "here"\n', "seconds": 31.0},
        ),
        step("gpu_tests", facts={"passed": 41, "failed": 0, "skipped": 3, "errors": 0, "tail": "41 passed"}),
        step("trace", [{"kernel": "gemm<128, 64>", "seconds": 0.11, "share": 0.52}], facts=shares),
    ]
    content = {"schema": 1, "started": "2026-11-28T10:00:00Z", "seconds": 512.3, "minutes": 9, "device": "cuda"}
    content |= {"small": False, "phalanx": {"version": "0.1.0", "commit": "3f7d206f"}, "complete": True, "steps": steps}
    return {**content, **more}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Build a clone with the files that the page needs."""
    (tmp_path / "docs" / "project").mkdir(parents=True)
    (tmp_path / "tools" / "published" / "gpu").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Top\n\n<!-- generated: gpu -->\nold\n<!-- end -->\n\nrest\n")
    return tmp_path


def written(root: Path, *records: dict[str, Any]) -> tuple[str, str]:
    """Return the page and the README's paragraph made of ``records``."""
    for index, one in enumerate(records):
        (root / "tools" / "published" / "gpu" / f"run{index}.json").write_text(json.dumps(one))
    assert main([], root) == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Top\n")
    assert readme.endswith("<!-- end -->\n\nrest\n")
    content = readme.partition("<!-- generated: gpu -->\n")[2].partition("<!-- end -->")[0]
    return (root / "docs" / "project" / "gpu.md").read_text(), " ".join(content.split())


def rows_of(content: str, heading: str) -> list[list[str]]:
    """Return the cells of all tables below a heading, up to the next heading."""
    part = content.partition(f"{heading}\n")[2]
    part = re.split(r"^#+ ", part, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.quick
class TestNoRecord:
    def test_page_names_the_commands_and_every_step(self, root: Path) -> None:
        content, readme = written(root)
        assert "No run on a GPU is on record yet." in content
        assert "`make gpu-pack`" in content
        assert "`make gpu-record`" in content
        assert [name for name, limit, *_ in PLANNED if f"| {STEPS[name].title} | {limit:g} s |" not in content] == []
        assert {name for name, *_ in PLANNED} == set(STEPS)
        assert "`make gpu-record`" in readme
        assert list(root.rglob("*.svg")) == []


@pytest.mark.quick
class TestFullRecord:
    def test_glance_says_met_or_missed(self, root: Path) -> None:
        content, _ = written(root, record())
        rows = {(row[0], row[1]): row[2:] for row in rows_of(content, "## At a glance")}
        assert rows["Llama 1 B", "plain PyTorch"] == ["–", "47.0 %", "–", "–"]
        missed = [f"{number}, **missed**" for number in ("0.660", "31.0 %", "+30.0 %")]
        assert rows["Llama 1 B", "phalanx eager"] == [*missed, "+5.0 %, met"]
        assert rows["Llama 1 B", "phalanx compiled"] == ["0.981, met", "47.0 %, met", "+9.8 %, met", "+5.0 %, met"]
        assert rows["LoRA 8 B", "phalanx eager"] == ["–", "47.0 %, met", "+7.1 %, met", "-12.0 %, **missed**"]
        assert content.index("## At a glance") < content.index("## NVIDIA T1000, 2026-11-28")

    def test_tables_hold_the_numbers(self, root: Path) -> None:
        content, _ = written(root, record())
        compared = ["204 ms", "224 ms", "179 ms to 269 ms", "+9.8 %", "40.0 GiB", "42.0 GiB", "+5.0 %"]
        wanted = [
            ("## NVIDIA T1000, 2026-11-28", ["commit", "3f7d206f"]),
            ("## NVIDIA T1000, 2026-11-28", ["Step overhead", "done", "12.5", "60", "–"]),
            ("### Environment", ["matrix product", "712 TFLOP/s"]),
            ("### Step overhead", ["MLP", "phalanx", "200 µs", "50", "1", "1.210"]),
            ("### Proofs", ["`tp=2`", "equal, 3.1e-07", "refused", "–"]),
            ("### Proofs", ["`micro=2`", "–", "–", "**not equal**, 2.0e-02 in `layer.0.weight`"]),
            ("### Checkpoint", ["3.7 GiB", "33 ms", "2.5 s", "1.0 GiB", "2.0 GiB", "5.0 GiB"]),
            ("### Calibration", ["GPT-2, phalanx eager", "100 ms", "130 ms", "+30.0 %", "110 ms", "+10.0 %"]),
            ("### GPU tests", ["41", "0", "3", "0"]),
            ("### Trace of one step", ["210 ms", "91.3 %", "5.0 %", "3.7 %"]),
            ("### Trace of one step", ["gemm&lt;128, 64>", "110 ms", "52.0 %"]),
            ("### Llama, 1 B parameters", ["Llama 1 B, phalanx compiled", *compared, "matrix products"]),
        ]
        assert [row for row in wanted if row[1] not in rows_of(content, row[0])] == []

    def test_readme_has_the_numbers(self, root: Path) -> None:
        _, readme = written(root, record())
        assert readme.startswith(
            "Newest full run on a GPU (NVIDIA T1000, 2026-11-28): 1 of 3 proofs equal, 1 not equal"
        )
        for number in ("0.981 times", "47.0 % MFU", "9.9 % off", "30.0 % at most", "5.0 % off", "12.0 % at most"):
            assert number in readme


@pytest.mark.quick
class TestSmallRecords:
    @pytest.mark.parametrize("change", [{"device": "cpu"}, {"small": True}, {"device": "cpu", "small": True}])
    def test_they_never_reach_readme_or_glance(self, root: Path, change: dict[str, Any]) -> None:
        content, readme = written(root, record(**change))
        assert readme.startswith("No run on a GPU is on record yet.")
        assert "At a glance" not in content
        assert ("they show that the programme works, not how fast Phalanx is") in content
        assert (SMALL in content) == (change.get("device") == "cpu")
        assert "small versions" in (root / "docs" / "project" / "gpu-time.svg").read_text()


@pytest.mark.quick
def test_a_record_without_a_newer_column_is_read(root: Path) -> None:
    for *path, key in [
        ("steps", 3, "rows", 2, "mfu"),
        ("steps", 3, "rows", 2, "forecast", "blame"),
        ("steps", 3, "rows", 2, "forecast"),
        ("steps", 1, "rows", 0, "host_waits_per_step"),
        ("steps", 2, "limit"),
        ("seconds",),
    ]:
        assert written(root, without(record(), *path, key)) == written(root, changed(record(), None, *path, key)), key


def without(content: dict[str, Any], *path: str | int) -> dict[str, Any]:
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return content


def changed(content: dict[str, Any], value: Any, *path: str | int) -> dict[str, Any]:
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


BAD: list[tuple[str | dict[str, Any], str]] = [
    ("{half", "not JSON"),
    (record(schema=2), "schema 2"),
    (without(record(), "phalanx", "commit"), "'commit'"),
    (without(record(), "steps", 4, "rows", 0, "model"), "gpt2_124m, rows[0] has no key 'model'"),
    (changed(record(), "fast", "steps", 4, "rows", 0, "rate"), "rows[0], rate is 'fast'"),
    (changed(record(), "fine", "steps", 4, "status"), "status is 'fine'"),
    (changed(record(), "trace", "steps", 0, "name"), "step trace is there twice"),
    (changed(record(), "noon", "started"), "started is no time"),
]


@pytest.mark.quick
def test_bad_files_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = root / "good.json", root / "bad.json"
    good.write_text(json.dumps(record()))
    before = (root / "README.md").read_text()
    for content, wrong in BAD:
        bad.write_text(content if isinstance(content, str) else json.dumps(content))
        assert main([str(good), str(bad)], root) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(bad) in error
        assert wrong in error
    assert (root / "README.md").read_text() == before
    assert list((root / "docs" / "project").iterdir()) == []


@pytest.mark.quick
def test_the_committed_page_and_readme_are_those_of_the_records() -> None:
    records = read_records(sorted((ROOT / "tools" / "published" / "gpu").glob("*.json")))
    content, plots = page(records)
    again = "try: python tools/gpu_record/page.py"
    assert (ROOT / "docs" / "project" / "gpu.md").read_text() == content, again
    drawn = {path.name: path.read_text() for path in (ROOT / "docs" / "project").glob("gpu-*.svg")}
    assert drawn == plots, again
    readme = (ROOT / "README.md").read_text()
    assert f"<!-- generated: gpu -->\n\n{paragraph(records)}\n\n<!-- end -->" in readme, again


HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
MODULES = {"tomli-w": "tomli_w"}  # where a package's module has another name
LOADED = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]: importlib.import_module(name)
import phalanx
for name in phalanx.__all__: getattr(phalanx, name)
for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
    if not module.name.startswith(("phalanx.__main__", "phalanx.train.keras.")): importlib.import_module(module.name)
from phalanx.demo.jobs import digits
assert len(digits.digits(training=False)) == 297
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pack for this Python once."""
    folder = tmp_path_factory.mktemp("pack")
    try:
        pack.build(folder, HERE)
    except pack.DownloadError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed") / "target"
    pack_install.install(built, target)
    return target


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link torch and its requirements into a folder that stands for a machine with torch alone."""
    folder = tmp_path_factory.mktemp("torch")
    for name in pack.closure(["torch"], HERE):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def run(*arguments: str, paths: tuple[Path, ...], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``paths`` and the standard library alone."""
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd)


def dependencies() -> list[str]:
    """Return the modules of Phalanx' own dependencies, without torch."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = [Requirement(text).name for text in declared]
    return [MODULES.get(name, name) for name in found if name != "torch"]


def lacking(target: Path) -> set[str]:
    """Return the packages that an installed pack requires, and that neither it nor torch brings."""
    found = list(distributions(path=[str(target)]))
    brought = {canonicalize_name(one.name) for one in found} | pack.closure(["torch"], HERE)
    needs = [Requirement(text) for one in found for text in one.requires or []]
    applying = [one for one in needs if not one.marker or one.marker.evaluate(pack.environment(HERE))]
    return {canonicalize_name(one.name) for one in applying} - brought


class TestInstalled:
    def test_has_the_pinned_packages_and_no_torch(self, built: Path, installed: Path) -> None:
        found = {canonicalize_name(one.name): one.version for one in distributions(path=[str(installed)])}
        assert found.keys() == pack.names(HERE) | {"phalanx"}
        assert found.keys() & pack.closure(["torch"], HERE) == set()
        assert {*pack.FOR_TESTS, "numpy", "isal", "pluggy"} <= found.keys()
        for line in pack.pinned(pack.names(HERE), HERE).splitlines():
            name, _, version = line.split()[0].partition("==")
            assert found[name] == version
        assert pack_install.check_size(built) < pack_install.LARGEST

    def test_lacks_no_dependency(self, installed: Path) -> None:
        assert lacking(installed) == set()

    def test_everything_loads_from_the_pack(self, installed: Path, torch_alone: Path) -> None:
        done = run("-c", LOADED, *dependencies(), paths=(installed, torch_alone))
        assert done.returncode == 0, done.stderr
        known = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        site = sysconfig.get_path("purelib")
        strange = {
            name: file
            for name, file in json.loads(done.stdout.splitlines()[-1]).items()
            if Path(file).is_absolute()  # torch.ops and torch.classes have no file
            and not Path(file).is_relative_to(installed)
            and not Path(file).is_relative_to(torch_alone)
            and (Path(file).is_relative_to(site) or not any(Path(file).is_relative_to(one) for one in known))
        }
        assert strange == {}


class TestRefusals:
    """Packs of small files: none is installed."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("one-1-py3-none-any.whl", "two-2-py2.py3-none-any.whl"):
            (tmp_path / name).write_bytes(name.encode())
        pack_install.write_sums(tmp_path)
        return tmp_path

    def test_a_whole_pack_passes(self, folder: Path) -> None:
        assert [wheel.name[:3] for wheel in pack_install.verify(folder)] == ["one", "two"]

    @pytest.mark.parametrize(
        ("harm", "error"),
        [
            (lambda folder: (folder / "one-1-py3-none-any.whl").write_bytes(b"0ne"), "one-1.* is damaged"),
            (lambda folder: (folder / "one-1-py3-none-any.whl").unlink(), "lacks the wheel one-1"),
            (lambda folder: (folder / "new-1-py3-none-any.whl").touch(), "new-1.* is not listed"),
            (lambda folder: (folder / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
        ],
        ids=["damaged", "missing", "not listed", "no sums"],
    )
    def test_a_harmed_pack(self, folder: Path, harm: Callable[[Path], object], error: str) -> None:
        harm(folder)
        with pytest.raises(PackError, match=error) as raised:
            pack_install.install(folder, folder / "target")
        assert str(raised.value).count("\n") == 1
        assert not (folder / "target").exists()

    @pytest.mark.parametrize(
        ("wheel", "fitting"),
        [
            ("a-1-py3-none-any.whl", True),
            ("a-1-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
            ("a-1-cp310-abi3-manylinux_2_17_x86_64.whl", True),
            ("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", False),
            ("a-1-cp313-abi3-manylinux_2_17_x86_64.whl", False),
            ("a-1-cp312-cp312-manylinux_2_17_aarch64.whl", False),
        ],
    )
    def test_which_wheels_fit(self, wheel: str, fitting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        named = {"platform": "linux", "version_info": (3, 12, 1)}
        monkeypatch.setattr(pack_install, "sys", SimpleNamespace(**named))
        monkeypatch.setattr(pack_install.platform, "machine", lambda: "x86_64")
        assert pack_install.fits(wheel) is fitting


def test_the_digits_are_those_of_scikit_learn() -> None:
    from phalanx.demo.jobs.digits import IMAGES

    theirs = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # what load_digits reads
    table = np.loadtxt(IMAGES, delimiter=",", dtype=np.int64)
    assert table.shape == (1797, 65)
    np.testing.assert_array_equal(table, np.loadtxt(str(theirs), delimiter=","))
