"""The pack of `make gpu-pack` for this Python: complete, checked, and installed without a network."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_record import pack, pack_install
from gpu_record.pack_install import PackError

ROOT = Path(__file__).resolve().parents[2]
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

    def test_a_failed_build_leaves_the_pack_before(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def too_much(requirements: str, made: Path, python: str) -> None:
            with (made / "large-1-py3-none-any.whl").open("wb") as file:
                file.truncate(pack_install.LARGEST + 1)

        monkeypatch.setattr(pack, "download", too_much)
        monkeypatch.setattr(pack, "build_wheel", lambda made: None)
        with pytest.raises(PackError, match="30 MB are allowed"):
            pack.build(folder, HERE)
        assert len(pack_install.verify(folder)) == 2

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

    def test_a_wheel_for_another_python(self, folder: Path) -> None:
        (folder / "old-1-cp36-cp36m-manylinux1_x86_64.whl").touch()
        pack_install.write_sums(folder)
        with pytest.raises(PackError, match=rf"old-1.* does not fit this machine, Python {HERE}.*\n.*PACK_PYTHON"):
            pack_install.install(folder, folder / "target")

    def test_each_python_has_its_own_version(self) -> None:
        texts = {python: pack.pinned(["numpy"], python) for python in pack.PYTHONS}
        assert texts["3.11"] != texts["3.12"]
        assert all(";" not in text for text in texts.values())


def test_the_digits_are_those_of_scikit_learn() -> None:
    from phalanx.demo.jobs.digits import IMAGES

    theirs = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # what load_digits reads
    table = np.loadtxt(IMAGES, delimiter=",", dtype=np.int64)
    assert table.shape == (1797, 65)
    np.testing.assert_array_equal(table, np.loadtxt(str(theirs), delimiter=","))
