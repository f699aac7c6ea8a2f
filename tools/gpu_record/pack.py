"""Build a pack of wheels for a Linux x86-64 machine that has torch and no network: `make gpu-pack`.

    python tools/gpu_record/pack.py [--python 3.12]

The folder gpu_pack/ then holds the wheel of Phalanx, its run-time dependencies, and pytest for the tests in tests/gpu.
It holds neither torch nor the packages that torch requires. Versions and hashes are those of pins/dev.txt.
`python tools/gpu_record/pack_install.py gpu_pack TARGET` installs it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_record.pack_install import PackError, check_size, last_line, write_sums
from pins import entries, version

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "gpu_pack"
PYTHONS = ("3.11", "3.12", "3.13")
FOR_TESTS = ("pytest", "pytest-timeout", "psutil")  # imported by tests/conftest.py and tests/gpu, or named in pyproject
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 16, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


class DownloadError(PackError):
    """pip found no file to download: no network, or no wheel for this Python."""


def environment(python: str) -> dict[str, str]:
    """Return the values of requirement markers on Linux x86-64 with CPython ``python``."""
    version = {"python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython"}
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
    return {**version, **system, "platform_python_implementation": "CPython", "extra": ""}


def closure(texts: Iterable[str], python: str) -> set[str]:
    """Return the names of the packages in the requirements ``texts``, and of their dependencies in turn.

    Dependencies are read from the packages installed here. A package that is not installed here counts as having none.
    """
    found = set[str]()
    left = list(texts)
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate(environment(python))):
            continue
        found.add(name)
        try:
            left += requires(name) or []
        except PackageNotFoundError:  # of torch's dependencies, the CUDA libraries
            continue
    return found


def names(python: str) -> set[str]:
    """Return the names of the packages in the pack, other than Phalanx."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return closure([*declared, *FOR_TESTS], python) - closure(["torch"], python)


def pinned(wanted: Iterable[str], python: str) -> str:
    """Return requirements with the version and hashes of each package of ``wanted``, from pins/dev.txt.

    They have no markers: pip would evaluate those for the Python it runs in, and the pack may be for another.
    """
    listed = entries((ROOT / "pins" / "dev.txt").read_text())
    lines: list[str] = []
    for name in sorted(wanted):
        blocks = {block: Requirement(block.splitlines()[0].rstrip(" \\")).marker for block in listed.get(name, [])}
        fitting = [block for block, marker in blocks.items() if not marker or marker.evaluate(environment(python))]
        if not fitting:
            raise PackError(f"pins/dev.txt has no {name} for Python {python}", "make pins")
        lines.append(" ".join([f"{name}=={version(fitting[0])}", *re.findall(r"--hash=\S+", fitting[0])]))
    return "\n".join(lines) + "\n"


def download(requirements: str, folder: Path, python: str) -> None:
    """Download a wheel for each of ``requirements`` into ``folder``.

    Raises:
        DownloadError: if pip finds no file for a requirement.
        PackError: if pip fails in another way, as with a wrong hash.
    """
    listed = folder / "requirements.txt"
    listed.write_text(requirements)
    fixed = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    target = ["--implementation", "cp", "--python-version", python, *(f"--platform={one}" for one in PLATFORMS)]
    command = [sys.executable, "-m", "pip", "download", *fixed, *target, "-r", str(listed), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed.unlink()
    if done.returncode:
        error = f"pip did not download the wheels: {last_line(done.stderr)}"
        if re.search("No matching distribution|connect|timed out|name resolution", done.stderr):
            raise DownloadError(error, "make gpu-pack, with a network")
        raise PackError(error, "make pins, then make gpu-pack")


def build_wheel(folder: Path) -> None:
    """Build the wheel of Phalanx from this clone into ``folder``, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(
            f"the wheel of Phalanx was not built: {last_line(done.stderr)}", "make clean, then make gpu-pack"
        )


def build(folder: Path, python: str) -> int:
    """Build the pack for CPython ``python`` in ``folder``, and return the bytes of its wheels.

    Wheels of an earlier pack in ``folder`` are replaced once the new ones are complete.

    Raises:
        PackError: if a wheel cannot be built or downloaded, or the pack is too large.
    """
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        build_wheel(made)
        download(pinned(names(python), python), made, python)
        total = check_size(made)
        write_sums(made)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return total


def main() -> int:
    """Build gpu_pack/, print its size, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", choices=PYTHONS, default="3.12", help="CPython of the GPU machine [3.12]")
    python: str = parser.parse_args().python
    try:
        total = build(PACK, python)
    except PackError as error:
        print(error, file=sys.stderr)
        return 2
    count = len(list(PACK.glob("*.whl")))
    print(f"{PACK.name}/ has {count} wheels, {total / 1e6:.1f} MB, for CPython {python} on Linux x86-64")
    print(f"    use: copy it with the clone, then python tools/gpu_record/pack_install.py {PACK.name} TARGET")
    return 0


if __name__ == "__main__":
    sys.exit(main())
