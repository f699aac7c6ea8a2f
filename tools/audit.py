"""Asks for known vulnerabilities of all that pins/ lists: `make audit`.

Exit code 0: none is known. 1: some are, each with the version that has it mended. 2: the answer is not known, because
the service could not be reached or does not know all packages; pip-audit itself leaves out what it could not ask about,
and says then that nothing was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINS = ("dev.txt", "torch.txt", "cuda.txt", "audit.txt", "zoo.txt")
PATIENCE = 240.0  # seconds for one file of pins; one request may take 15


def audited(path: Path, seconds: float = PATIENCE) -> list[dict[str, Any]]:
    """What pip-audit says of each package in the file of pins ``path``.

    Raises:
        ValueError: if it could not ask about all of them.
    """
    fixed = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--timeout", "15", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", *fixed, "--requirement", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {seconds:g} s") from None
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise ValueError(next(iter(reversed(done.stderr.strip().splitlines())), "pip-audit said nothing")) from None
    if left_out := [one for one in packages if "skip_reason" in one]:
        raise ValueError(f"{len(left_out)} of {len(packages)} left out: {left_out[0]['skip_reason']}")
    return packages


def main() -> int:
    """Ask about every file of pins, and print what is known. Returns the exit code."""
    known: list[str] = []
    count = 0
    for name in PINS:
        try:
            packages = audited(ROOT / "pins" / name)
        except ValueError as error:
            print(f"not audited: the vulnerability service was no help with pins/{name}: {error}", file=sys.stderr)
            return 2
        count += len(packages)
        for one in packages:
            for fault in one["vulns"]:
                mended = ", ".join(fault["fix_versions"]) or "no version yet"
                known.append(f"{one['name']} {one['version']}: {fault['id']}, mended in {mended}")
    print("\n".join(known) if known else f"no vulnerability is known of {count} packages")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
