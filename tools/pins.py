"""Writes pins/: exact versions and hashes of all that development, CI and `make audit` install.

    python tools/pins.py [--torch-builds FOLDER]

uv resolves what pyproject.toml asks for, within constraints.txt, for every platform and Python from 3.11 on, and takes
the hashes of all files of each version from the registry. Four files come of it for development:

- torch.txt: torch alone, in the registry's builds.
- torch-cpu.txt: the same version's builds for CPUs, which are found elsewhere: those in FOLDER (else, in the folders
  that pip is told of as find-links), and those that stood here of the same version before.
- cuda.txt: what the registry's build of torch for Linux loads besides, and no other build needs.
- dev.txt: everything else.

audit.txt has what `make audit` needs, in the versions of dev.txt where that names them. bench.txt has the peers that
`make bench` compares with and what they need, but torch. zoo.txt has what `make zoo` installs besides,
without what that asks for: it is there, and torch is not to be another.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "pins"
OLDEST = "3.11"
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
_CUDA = ("nvidia-", "cuda-", "triton")

HEADS = {
    "torch.txt": "torch in the registry's builds, in a file of its own: `make` takes torch-cpu.txt where pip is\n"
    "# led to such a build. Its dependencies are in dev.txt, and in cuda.txt those of the build for Linux.",
    "torch-cpu.txt": "torch in builds for CPUs, which are not the registry's: those that were at hand when this was\n"
    "# written. Its dependencies are in dev.txt.",
    "cuda.txt": "What the registry's build of torch for Linux loads; not installed where torch is a build for CPUs.",
    "dev.txt": "What development and CI install, but torch and what only its CUDA build loads.",
    "audit.txt": "What `make audit` installs.",
    "bench.txt": "What `make bench` installs besides: the peers and what they need, but torch.",
    "zoo.txt": "What `make zoo` installs besides, in a folder of its own and without what that asks for.",
}


def entries(text: str) -> dict[str, list[str]]:
    """Name → the lines that pin it, one item a version, of a file in pip's format for requirements."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", "\n" + text):
        if named := _NAMED.match(block):
            found.setdefault(named[1].lower(), []).append(block.partition("\n\n")[0].rstrip("\n"))
    return found


def version(block: str) -> str:
    """The version that an entry pins."""
    named = _NAMED.match(block)
    assert named is not None
    return named[2]


def write(name: str, found: dict[str, list[str]]) -> None:
    """Write the file ``name`` of pins/ with its head."""
    blocks = [block for each in found.values() for block in each]
    head = f"# {HEADS[name]}\n# Written by `make pins`, never by hand.\n"
    (PINS / name).write_text(head + "\n".join(blocks) + "\n")


def resolve(uv: str, *what: str, asked: str = "") -> dict[str, list[str]]:
    """What uv makes of requirements, constraints and extras given as its options; ``-`` is what is ``asked``."""
    fixed = ["--universal", "--python-version", OLDEST, "--generate-hashes", "--only-binary", ":all:", "--quiet"]
    plain = ["--no-header", "--annotation-style", "line", "--no-emit-package", "phalanx", "--no-emit-package", "pip"]
    command = [uv, "pip", "compile", *what, *fixed, *plain]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, input=asked)
    return entries(done.stdout)


def folders_of_pip() -> list[Path]:
    """Folders of wheels that pip looks into beside the registry."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    named = re.findall(r"find-links='(.*)'", shown.stdout)
    return [path for value in named for path in map(Path, value.split()) if path.is_dir()]


def builds_for_cpus(at: str, folders: list[Path]) -> str:
    """The entry of the builds for CPUs of torch's version ``at``: those in ``folders``, and those listed before."""
    listed = PINS / "torch-cpu.txt"
    before = entries(listed.read_text() if listed.exists() else "").get("torch", [])
    hashes = {one for block in before if version(block) == f"{at}+cpu" for one in _HASH.findall(block)}
    for wheel in {one.resolve() for folder in folders for one in folder.glob(f"torch-{at}+cpu-*.whl")}:
        with wheel.open("rb") as file:
            hashes.add("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
    return " \\\n    ".join([f"torch=={at}+cpu", *(f"--hash={one}" for one in sorted(hashes))])


def zoo(uv: str, asked: list[str]) -> dict[str, list[str]]:
    """The libraries of the zoo, without what they ask for."""
    return resolve(uv, "-", "--no-deps", "--constraint", "constraints.txt", asked="\n".join(asked))


def bench(uv: str, asked: list[str]) -> dict[str, list[str]]:
    """The peers and what they need, without torch: some need older versions than dev.txt has."""
    wanted = "\n".join(one for one in asked if not one.startswith("phalanx"))
    found = resolve(uv, "-", "--constraint", "constraints.txt", asked=wanted)
    return {name: blocks for name, blocks in found.items() if name != "torch" and not name.startswith(_CUDA)}


def main() -> None:
    """Resolve, and write every file of pins."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-builds", type=Path, metavar="FOLDER", help="where builds of torch for CPUs are")
    given: Path | None = parser.parse_args().torch_builds
    PINS.mkdir(exist_ok=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        subprocess.run([f"{scratch}/bin/pip", "install", "--quiet", "uv"], check=True)
        uv = f"{scratch}/bin/uv"
        everything = resolve(uv, "pyproject.toml", "--extra", "dev", "--constraint", "constraints.txt")
        torch = everything.pop("torch")
        cuda = {name: everything.pop(name) for name in list(everything) if name.startswith(_CUDA)}
        write("torch.txt", {"torch": torch})
        write("torch-cpu.txt", {"torch": [builds_for_cpus(version(torch[0]), [given] if given else folders_of_pip())]})
        write("cuda.txt", cuda)
        write("dev.txt", everything)
        write("audit.txt", resolve(uv, "-", "--constraint", "pins/dev.txt", asked="\n".join(extras["audit"])))
        write("bench.txt", bench(uv, extras["bench"]))
        write("zoo.txt", zoo(uv, extras["zoo"]))


if __name__ == "__main__":
    main()
