"""Check and install a pack of wheels on a machine without a network, with the standard library alone.

    python tools/gpu_record/pack_install.py PACK TARGET

PACK is the folder that `make gpu-pack` wrote. TARGET is a new folder for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

SUMS = "SHA256SUMS"
LARGEST = 30_000_000  # bytes of all wheels together


class PackError(Exception):
    """A pack that cannot be built or installed: one line with the error, one line with the fix."""

    def __init__(self, error: str, fix: str) -> None:
        super().__init__(f"{error}\n    try: {fix}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of the file ``path`` in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_size(folder: Path) -> int:
    """Return the bytes of all wheels in ``folder``.

    Raises:
        PackError: if they are more than ``LARGEST``.
    """
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total > LARGEST:
        largest = ", ".join(sorted(sizes, key=sizes.__getitem__)[:-4:-1])
        error = f"the pack has {total / 1e6:.1f} MB, and {LARGEST / 1e6:.0f} MB are allowed; largest: {largest}"
        raise PackError(error, "remove a dependency from pyproject.toml, or a package from tools/gpu_record/pack.py")
    return total


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of every wheel in ``folder`` to its SHA256SUMS, in the format of sha256sum."""
    lines = [f"{sha256(wheel)}  {wheel.name}\n" for wheel in sorted(folder.glob("*.whl"))]
    (folder / SUMS).write_text("".join(lines))


def verify(folder: Path) -> list[Path]:
    """Return the wheels in ``folder``, sorted, after a check of each against SHA256SUMS.

    Raises:
        PackError: if a wheel is missing, damaged or not listed.
    """
    again = "make gpu-pack, and copy the folder again"
    if not (folder / SUMS).is_file():
        raise PackError(f"{folder} has no {SUMS}", again)
    listed = {name: digest for digest, name in (line.split() for line in (folder / SUMS).read_text().splitlines())}
    found = {wheel.name: wheel for wheel in sorted(folder.glob("*.whl"))}
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            raise PackError(f"{folder} lacks the wheel {name}", again)
        if name not in listed:
            raise PackError(f"{folder / name} is not listed in {SUMS}", again)
        if sha256(found[name]) != listed[name]:
            raise PackError(f"{folder / name} is damaged: its SHA-256 is not that in {SUMS}", again)
    return list(found.values())


def fits(wheel: str) -> bool:
    """Return True if the wheel with this file name is for this Python and this kind of machine.

    pip decides about the version of the C library.
    """
    pythons, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    here = sys.version_info[:2]
    minors = [int(tag[3:]) for tag in pythons.split(".") if tag.startswith("cp3") and len(tag) > 3]
    python_fits = any(3 <= minor <= here[1] if "abi3" in abi else minor == here[1] for minor in minors)
    pure = any(tag in ("py3", f"py3{here[1]}") for tag in pythons.split("."))
    machine = sys.platform == "linux" and platform.machine() in platforms
    return (pure or python_fits) and (platforms == "any" or machine)


def install(folder: Path, target: Path) -> list[str]:
    """Verify the pack ``folder``, install it into ``target``, and return the names of its wheels.

    Needs pip and no network. Set PYTHONPATH to ``target`` to use what was installed.

    Raises:
        PackError: if a wheel is damaged, or does not fit this Python or this machine.
    """
    wheels = verify(folder)
    here = f"Python {platform.python_version()} on {sys.platform} {platform.machine()}"
    another = f"make gpu-pack PACK_PYTHON={sys.version_info[0]}.{sys.version_info[1]}"
    if misfits := [wheel.name for wheel in wheels if not fits(wheel.name)]:
        raise PackError(f"{misfits[0]} does not fit this machine, {here}", another)
    fixed = ["--isolated", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *fixed, "--upgrade", "--target", str(target), *map(str, wheels)]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        fix = f"{sys.executable} -m ensurepip" if "No module named pip" in done.stderr else another
        raise PackError(f"pip did not install the pack into {here}: {last_line(done.stderr)}", fix)
    return [wheel.name for wheel in wheels]


def last_line(text: str) -> str:
    """Return the last error that pip printed, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1].removeprefix("ERROR: ")


def main() -> int:
    """Install a pack from the command line, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pack", type=Path, metavar="PACK")
    parser.add_argument("target", type=Path, metavar="TARGET")
    given = parser.parse_args()
    try:
        wheels = install(given.pack, given.target)
    except PackError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"installed {len(wheels)} wheels\n    use: export PYTHONPATH={given.target.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
