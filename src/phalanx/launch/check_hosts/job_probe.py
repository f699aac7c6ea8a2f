"""The second program that one host runs: its torch and its devices, the job's file and imports, its data.

It runs by itself, beside ``host_probe``, and says what it knows line by line: user code may end it or hang it. Its text
is sent after that of ``code_files``.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib
import importlib.util
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from phalanx.launch.code_files import are_alike, state_of, unpack_files

MARK = "phalanx-check:"


def main() -> None:
    """Say what this host has for a job; stdout is for the answer alone."""
    stdout = os.dup(1)
    os.dup2(2, 1)

    def say(**told: Any) -> None:
        os.write(stdout, ("\n" + MARK + json.dumps(told) + "\n").encode())

    job = QUESTION["job"]  # pyrefly: ignore  # noqa: F821  (put there by what reads this text)
    if "digests" in job:
        alike = are_alike(job["root"], job["digests"])
        say(alike=alike)
        try:
            if not alike:
                unpack(job)
        except OSError as error:  # such as a full disk
            say(unpacked=f"{error}")
            return
    say(versions={"torch": version("torch"), "phalanx": phalanx_version()})
    if job["file"]:
        say(source={**source(job["file"]), "state": state_of(job["file"], job["stamp"])})
    if "torch" in sys.modules:
        say(**devices(job.get("kinds", {})))
    there = not job["file"] or os.path.isfile(job["file"])
    if job["reference"] and there and {"torch", "phalanx"} <= set(sys.modules):
        try:
            say(data=data(job["reference"], say))
        except Exception as error:  # of whatever Phalanx itself imports
            say(data={"error": f"{type(error).__name__}: {error}", "fix": "", "of": "job"})


def unpack(job: dict[str, Any]) -> None:
    """Put the code that came with the question into its ``room``, and have the job be that; none, without."""
    if not job["pack"]:
        job["reference"], job["file"] = "", ""
        return
    unpack_files(io.BytesIO(base64.b64decode(job["pack"])), job["room"], mode=0o755)
    file = os.path.join(job["room"], job["within"])
    job["reference"], job["file"] = file + job["reference"][len(job["file"]) :], file
    os.chdir(job["room"])


def version(name: str) -> str:
    """Its version by its own word; empty where it is not there, ``!`` and the error where it cannot be imported."""
    try:
        if importlib.util.find_spec(name) is None:
            return ""
        module = importlib.import_module(name)
    except Exception as error:  # of any make: a library that is not there, a file of another version
        return f"!{type(error).__name__}: {error}"
    own = getattr(module, "__version__", None)
    return str(own) if own else _distributed(name)


def phalanx_version() -> str:
    """As ``version``, with a digest of its code: two clones of one version may be unlike."""
    found = version("phalanx")
    if not found or found.startswith("!"):
        return found
    digest, root = hashlib.sha256(), os.path.dirname(str(sys.modules["phalanx"].__file__))
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if one != "__pycache__")
        for path in (os.path.join(folder, name) for name in sorted(names)):
            digest.update(os.path.relpath(path, root).encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(hashlib.sha256(file.read()).digest())
    return f"{found}+{digest.hexdigest()[:12]}"


def _distributed(name: str) -> str:
    """The version of what was installed; ``local`` where it was not."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    names = getattr(metadata, "packages_distributions", dict)().get(name) or []
    return metadata.version(names[0]) if names else "local"


def source(path: str) -> dict[str, Any]:
    """A job's file and those beside it that it imports: what they are, and what they import from elsewhere."""
    if not os.path.isfile(path):
        return {"missing": True, "files": {}, "imports": {}}
    folder = os.path.dirname(path)
    sys.path.insert(0, folder)
    files: dict[str, str] = {}
    found: set[str] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        text = pathlib.Path(file).read_bytes()
        files[os.path.relpath(file, folder)] = hashlib.sha256(text).hexdigest()
        for name in imported(text):
            beside = _beside(folder, name)
            if beside is None:
                found.add(name)
            elif os.path.relpath(beside, folder) not in files:
                waiting.append(beside)
    standard = getattr(sys, "stdlib_module_names", ())
    own = {"torch", "phalanx", "__future__"}
    return {"missing": False, "files": files, "imports": {n: version(n) for n in sorted(found - own - set(standard))}}


def _beside(folder: str, name: str) -> str | None:
    for path in (os.path.join(folder, name + ".py"), os.path.join(folder, name, "__init__.py")):
        if os.path.isfile(path):
            return path
    return None


def imported(text: bytes) -> list[str]:
    """The first names of all modules that a file imports and cannot do without."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # which loading it says better
        return []
    optional = (node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.If)) and _spares(node))
    spared = {id(one) for node in optional for one in _within(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in spared:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(names)


def _spares(node: Any) -> bool:
    """Whether a failed import within is taken care of, or none is made when the file runs."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return any(
        handler.type is None
        or any(
            isinstance(one, ast.Name) and one.id in ("ImportError", "ModuleNotFoundError", "Exception")
            for one in ast.walk(handler.type)
        )
        for handler in node.handlers
    )


def _within(node: Any) -> Iterator[ast.AST]:
    for statement in node.body:
        yield from ast.walk(statement)


def devices(kinds: dict[str, str]) -> dict[str, Any]:
    """What each of these kinds of device says of itself here, by the text of its ``told()``; devices of the first."""
    told: dict[str, Any] = {"kind": "", "devices": []}
    for kind, text in kinds.items():
        scope: dict[str, Any] = {}
        exec(compile(text, kind, "exec"), scope)
        found = scope["told"]()
        if found["devices"] and not told["devices"]:
            told = {**told, "kind": kind, "devices": found["devices"]}
        told = {**found, **told}
    return told


def data(reference: str, say: Any) -> dict[str, Any]:
    """Load the job, say that it is ``loaded``, make its data, and take the first sample, as a worker does."""
    from phalanx.data.map_style import is_stream
    from phalanx.errors import SpecError
    from phalanx.launch.jobfile import load_job
    from phalanx.train.build_model import make_data

    try:
        job = load_job(reference)
    except SpecError as error:
        first = error.problems[0]
        return {"error": f"{first.where}: {first.given}", "fix": first.fix, "of": "job"}
    say(loaded=True)
    try:
        made: Any = make_data(job, job.data)
        if not is_stream(made):
            if not len(made):
                return {"error": "holds no sample", "fix": "", "of": "data"}
            made[0]
            return {"error": "", "samples": len(made), "workers": job.workers}
        next(iter(made))
        return {"error": "", "workers": job.workers}
    except StopIteration:
        return {"error": "holds no sample", "fix": "", "of": "data"}
    except Exception as error:  # user code
        return {"error": f"{type(error).__name__}: {error}", "fix": "", "of": "data"}


if __name__ == "__main__":
    main()
