"""House rules that a program can check: small files and functions, no forbidden names, no pickles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from parsed_source import nodes_of, parsed
from phalanx.config.run_files import CHECKPOINTS, EVENTS, LEDGER, RUN_TOML

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
FILES = sorted(SOURCE.rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
MOST_ARGUMENTS, MOST_OPTIONS = 6, 9  # without, and with, those that have a default


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE if SOURCE in path.parents else ROOT))


FUNCTIONS = [
    (f"{name_of(path)}: {node.name}", node)
    for path in [*FILES, *TOOLS]
    for node in nodes_of(path)
    if isinstance(node, ast.FunctionDef)
]


def test_no_two_scripts_have_one_name() -> None:
    """Benches, tools and tests are found by bare names: of two that are alike one would hide the other."""
    folders = [ROOT / "bench", ROOT / "tools", *(path for path in (ROOT / "tests").iterdir() if path.is_dir())]
    stems = [path.stem for folder in folders for path in folder.glob("*.py") if path.stem != "__init__"]
    assert sorted(stem for stem in set(stems) if stems.count(stem) > 1) == []


def test_public_names_are_there() -> None:
    code = "import phalanx\nfor name in phalanx.__all__: getattr(phalanx, name)\nprint(len(phalanx.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


@pytest.mark.quick
def test_every_file_says_what_it_is_for() -> None:
    assert [name_of(path) for path in [*FILES, *TOOLS] if not ast.get_docstring(parsed(path))] == []


@pytest.mark.quick
def test_files_are_small() -> None:
    assert [name_of(path) for path in [*FILES, *TOOLS] if len(path.read_text().splitlines()) > MOST_LINES] == []


@pytest.mark.quick
def test_few_tests_hold_something_to_real_seconds() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    reasons = re.findall(r"^ *@pytest\.mark\.realtime\((.*)\)$", text, re.MULTILINE)
    assert 0 < len(reasons) <= 15
    assert all(re.fullmatch(r'"[^"]{10,}"', reason) for reason in reasons)


def test_functions_are_small() -> None:
    assert [where for where, function in FUNCTIONS if _lines(function) > MOST_FUNCTION_LINES] == []


@pytest.mark.quick
def test_functions_take_few_arguments() -> None:
    # A command's arguments are its options, and click needs each as one of its own.
    many = [
        where for where, function in FUNCTIONS if not _is_command(function) and _required(function) > MOST_ARGUMENTS
    ]
    many += [where for where, function in FUNCTIONS if not _is_command(function) and _all(function) > MOST_OPTIONS]
    assert many == []


@pytest.mark.quick
def test_public_names_have_docstrings() -> None:
    bare = [
        f"{name_of(path)}: {node.name}"
        for path in [*FILES, *TOOLS]
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


@pytest.mark.quick
def test_names_say_something() -> None:
    names = [name_of(path) for path in [*FILES, *TOOLS]]
    assert [name for name in names if {Path(name).stem, *Path(name).parts} & FORBIDDEN_NAMES] == []


@pytest.mark.quick
def test_environment_is_read_in_launch_only() -> None:
    readers = [name_of(path) for path in FILES if re.search(r"os\.(environ|getenv|putenv)", path.read_text())]
    assert [name for name in readers if not name.startswith("launch/")] == []


@pytest.mark.quick
def test_nothing_that_is_started_reads_pickles_or_words_for_a_shell() -> None:
    """torchrun's rendezvous named c10d reads pickles that anybody may have written."""
    pattern = re.compile(r"""["']c10d["']|shell=True|os\.(system|popen)\(""")
    assert [name_of(path) for path in FILES if pattern.search(path.read_text())] == []


_PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
_OBJECTS = {
    *("all_gather_object", "gather_object", "gather_object_list", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_object", "scatter_object"),
}


def pickled(path: Path) -> set[str]:
    """Modules that pickle, collectives of objects, and reads of a whole pickle, as a file names them."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names = [one.name for one in node.names]
            found |= {one for one in (*module, *names) if one.partition(".")[0] in _PICKLES or one in _OBJECTS}
        elif isinstance(node, ast.Attribute) and node.attr in _OBJECTS:
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func) == "torch.load"
        ):
            safe = [one for one in node.keywords if one.arg == "weights_only" and ast.unparse(one.value) == "True"]
            found |= set() if safe else {"torch.load"}
    return found


@pytest.mark.quick
def test_nothing_is_pickled_or_read_from_a_pickle() -> None:
    assert {f"{name_of(path)}: {what}" for path in FILES for what in pickled(path)} == set()


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from torch.distributed import broadcast_object_list",
        "dist.all_gather_object(values, value)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_pickles_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.py").write_text(text)
    assert pickled(tmp_path / "some.py")


@pytest.mark.quick
def test_init_only_reexports() -> None:
    lazily = (SOURCE,)  # what it offers is slow to load, and is fetched when first used
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    others = [
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        if path.name == "__init__.py" and path.parent not in lazily
        for node in parsed(path).body
        if not isinstance(node, allowed)
    ]
    assert others == []


@pytest.mark.quick
def test_every_package_imported_is_declared_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = ("tensorboard", "transformers", "peft", "keras", "page", "pandas", "parquet", "ray", "sagemaker")
    lines = [*project["dependencies"], *(line for extra in used for line in extras[extra])]
    declared = {re.split(r"[<>=\[~! ]", line)[0] for line in lines}
    called = {"tomli_w": "tomli-w", "botocore": "boto3"}  # the last: a part of it
    known = {"phalanx", *sys.stdlib_module_names}
    imported = {called.get(name, name) for path in FILES for name in _imports(path) if name not in known}
    assert imported - declared == set()
    explained = (ROOT / "docs" / "explanation" / "dependencies.md").read_text()
    assert [name for name in declared if name not in explained] == []


@pytest.mark.quick
def test_no_package_with_stolen_credentials_is_asked_for() -> None:
    """Releases of `lightning` stole credentials: bench/ uses `pytorch-lightning` and `lightning-fabric`."""
    asked = (ROOT / "pyproject.toml").read_text()
    pinned = "".join(path.read_text() for path in (ROOT / "pins").glob("*.txt"))
    scripts = [path for folder in ("bench", "tests", "src", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert re.findall(r'"lightning[<>=\[~! "]', asked) + re.findall(r"^lightning[=<> ]", pinned, re.MULTILINE) == []
    imports = re.compile(r"^\s*(import|from) lightning\b", re.MULTILINE)
    assert [str(path) for path in scripts if imports.search(path.read_text())] == []


def test_wheel_carries_the_demo_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert any(name.startswith("phalanx/demo/jobs/") for name in names)
    assert all(name.startswith(("phalanx/", "phalanx-")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [name for name in names if {"tools", "published"} & set(Path(name).parts)] == []


def _imports(path: Path) -> set[str]:
    nodes = nodes_of(path)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _lines(function: ast.FunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def _all(function: ast.FunctionDef) -> int:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _required(function: ast.FunctionDef) -> int:
    defaults = [*function.args.defaults, *(default for default in function.args.kw_defaults if default is not None)]
    return _all(function) - len(defaults)


def _is_command(function: ast.FunctionDef) -> bool:
    return any("command(" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.quick
def test_private_names_stay_in_their_file() -> None:
    imports = [
        (name_of(path), node.module, alias.name)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phalanx")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert imports == []


@pytest.mark.quick
def test_a_name_stands_once_in_a_file() -> None:
    for path in FILES:
        names = [
            node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.unparse(target)
            for node in parsed(path).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
            if isinstance(node, ast.FunctionDef | ast.ClassDef) or isinstance(target, ast.Name)
        ]
        assert len(names) == len(set(names)), (
            f"{name_of(path)}: {sorted({one for one in names if names.count(one) > 1})}"
        )


MUTABLE = {
    "checkpoint/background.py: _writers",  # threads that a fork has to wait for
    "comm/mesh.py: _joins",
    "comm/process_group.py: _joins",
    "comm/process_group.py: _left",  # groups that outlive whoever used them
    "comm/process_group.py: _stores",  # as there is one default process group in a process
    "comm/roll_call.py: _words",  # of those stores, by rank, also in processes that are forked
    "data/streams.py: _begun",  # where the first pass over nodes began, for as long as they live
    "device_kinds/registry.py: _added",  # kinds of devices that a program or a package brings
    "files/single_writer.py: _held",  # locks that this process holds, as the kernel knows them
    "launch/jobfile.py: _stamps",  # as Python keeps what it has imported
    "launch/jobfile.py: _declared_by",  # what those imports declared
    "launch/jobfile.py: _values_of",  # and what a job declared that was loaded last
    "launch/side_process.py: _live",  # runs that end with this process
    "preflight/own_run.py: _group",  # the process group that build() joins, till the process ends
    "preflight/own_run.py: _open",  # runs of loops of one's own, till they or the process end
    "launch/worker.py: _runs",
    "parallel/global_batch_norm.py: _EXCHANGES",  # of layers whose replicas are joined, for as long as they live
    "parallel/local_shards/tensor.py: RULES",  # filled where operations on shards are defined, while they are loaded
    "train/keras/layer_modules.py: _KINDS",  # of each kind of layer the one that is a torch module, made once
    "trace/blocks.py: _opened",  # models that are looked into, for as long as they live
}
"""What a module keeps and changes; without a comment: a counter, by which names differ."""


@pytest.mark.quick
def test_names_in_the_run_folder_stand_in_one_file() -> None:
    """But for what is sent to a host as text, with the standard library alone."""
    named = re.compile("|".join(f'/ "{re.escape(name)}"' for name in (RUN_TOML, EVENTS, CHECKPOINTS, LEDGER)))
    assert [name_of(path) for path in FILES if named.search(path.read_text())] == []


@pytest.mark.quick
def test_nothing_else_is_kept_in_modules() -> None:
    made = {
        "list",
        "dict",
        "set",
        "deque",
        "count",
        "defaultdict",
        "ExitStack",
        "WeakSet",
        "WeakKeyDictionary",
        "local",
    }
    found = set[str]()
    for path in FILES:
        assert not [node for node in nodes_of(path) if isinstance(node, ast.Global)], name_of(path)
        for node in parsed(path).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            match node.value:
                case ast.List(elts=[]) | ast.Dict(keys=[]):
                    pass
                case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in made:
                    pass
                case _:
                    continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found.add(f"{name_of(path)}: {ast.unparse(target)}")
    assert found == MUTABLE
