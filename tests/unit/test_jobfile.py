"""From a reference to a job, the values that a job declares, and what is refused."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import phalanx as px
from law_rows import in_one_test
from phalanx.cli import main
from phalanx.config.run import RunSpec
from phalanx.errors import SpecError
from phalanx.launch.jobfile import Reference, declared_values, going_on, load_function, load_job, with_values

GOOD = """
import phalanx.config as px

RUNS = []
RUNS.append(1)

class Net:
    pass

def loss(output, batch):
    return 0.0

def job():
    return px.Job(model=Net, data=list, loss=loss, optimizer=lambda params: None, batch=4, epochs=1)

def other_job():
    return px.Job(model=Net, data=list, loss=loss, optimizer=lambda params: None, batch=8, epochs=1, name="mine")
"""


@pytest.fixture(autouse=True)
def _imports_as_before() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.startswith(("phalanx_job_", "job_of_test", "sibling_of_test", "package_of_test")):
            del sys.modules[name]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def write(folder: Path, text: str, name: str = "job_of_test.py") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def problem(reference: str) -> str:
    with pytest.raises(SpecError) as raised:
        load_job(reference)
    (found,) = raised.value.problems
    assert found.fix
    return str(found)


def test_function_of_a_file_and_a_name_of_its_own(tmp_path: Path) -> None:
    job = load_job(f"{write(tmp_path, GOOD)}:other_job")
    assert (job.batch, job.name) == (8, "mine")
    text = GOOD.replace('name="mine"', 'name="job"')  # the default, in whose place the file and the function stand
    assert load_job(f"{write(tmp_path, text)}:other_job").name == "job_of_test-other_job"


def test_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD, "package_of_test/inner.py")
    monkeypatch.chdir(tmp_path)
    assert load_job("package_of_test.inner:other_job").batch == 8
    assert load_job("package_of_test.inner").name == "inner"


def test_sibling_is_importable_now_and_later(tmp_path: Path) -> None:
    write(tmp_path, "BATCH = 6\n", "sibling_of_test.py")
    write(tmp_path, "LATER = 7\n", "sibling_of_test_later.py")
    text = "import sibling_of_test\n" + GOOD.replace("batch=4", "batch=sibling_of_test.BATCH").replace(
        "model=Net, data=list", "model=lambda: __import__('sibling_of_test_later').LATER, data=list"
    )
    job = load_job(str(write(tmp_path, text)))
    assert job.batch == 6
    assert job.model() == 7


def test_file_named_like_a_loaded_module_replaces_nothing(tmp_path: Path) -> None:
    job = load_job(str(write(tmp_path, GOOD, "json.py")))
    assert job.name == "json"
    assert hasattr(sys.modules["json"], "dumps")
    assert type(pickle.loads(pickle.dumps(job.model()))) is type(job.model())


def test_file_runs_once_until_it_changes(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    load_job(str(file))
    module = sys.modules["job_of_test"]
    load_job(str(file))
    assert sys.modules["job_of_test"] is module
    file.write_text(GOOD.replace("batch=4", "batch=16"))
    assert load_job(str(file)).batch == 16


def test_no_such_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    text = problem(str(tmp_path / "job_of_tset.py"))
    assert "does not exist" in text
    assert text.endswith("job_of_test.py")


def test_no_function_names_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    text = problem(f"{file}:ohter_job")
    assert "it has: Net, job, loss, other_job" in text
    assert text.endswith(f"try: {file}:other_job")


@in_one_test("name", ["", ":training", ":xyz"])
def test_a_loop_that_is_not_named_or_not_there(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "def aid():\n    pass\n\n\ndef my_loop(steps, model):\n    pass\n")
    assert load_function(f"{path}:my_loop").__name__ == "my_loop"
    with pytest.raises(SpecError) as caught:
        load_function(f"{path}{name}")
    (found,) = caught.value.problems
    assert found.fix == f"{path}:my_loop"
    assert "it has: aid, my_loop" in found.given
    assert "job" not in str(caught.value).replace(str(path), "")


@in_one_test(
    ("text", "words"),
    [
        ("def train(): ...\n", ("no function job()", "it has: train", "def job() -> px.Job")),
        (GOOD + "\njob = job()\n", ("job is a Job, not a function",)),
        ("def job(size): ...\n", ("job() missing", "'size'")),
        ("def job():\n    pass\n", ("None", "px.Job(")),
        ("def job():\n    return {'batch': 4}\n", ("dict", "px.Job(")),
        ("def job():\n    raise KeyError('digits')\n", ("job() in ", "KeyError: 'digits'", "and there job()")),
        ("import phalanx as px\ndef job():\n    return px.Job(optimiser=None)\n", ("try: optimizer= in px.Job",)),
        ("import no_such_package_of_mine.thing\n", ("try: pip install no_such_package_of_mine",)),
        ("def job(:\n", ("SyntaxError",)),
        ("import sys\nsys.exit(3)\n", ("SystemExit: 3",)),
        ("import sys\nlr = sys.argv[1]\n", ("IndexError", "try: px.param")),
        ("import argparse as a\np = a.ArgumentParser()\np.add_argument('x')\np.parse_args()\n", ("try: px.param",)),
    ],
)
def test_what_gives_no_job_is_refused_with_a_way_out(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    found = problem(str(write(tmp_path, text, f"job_of_test_{abs(hash(text))}.py")))
    assert [word for word in words if word not in found] == []


def test_error_in_the_file_shows_the_users_lines_only(tmp_path: Path) -> None:
    file = write(tmp_path, "def broken():\n    return 1 / 0\n\nbroken()\n")
    text = problem(str(file))
    assert "ZeroDivisionError" in text
    assert "in broken" in text
    assert "importlib" not in text
    assert "jobfile.py" not in text
    assert "job_of_test" not in sys.modules


def test_spec_error_of_the_job_passes_through(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("batch=4", "batch=0"))
    with pytest.raises(SpecError) as raised:
        load_job(str(file))
    assert [found.where for found in raised.value.problems] == ["job.batch"]


@in_one_test(
    ("text", "function"), [("a/b.py", "job"), ("a/b.py:c", "c"), ("a.b", "job"), ("a.b:c", "c"), ("/x:y/b.py:c", "c")]
)
def test_reference_round_trips(text: str, function: str) -> None:
    reference = Reference.parse(text)
    assert reference.function == function
    assert Reference.parse(str(reference)) == reference


JOB = """
import torch
import phalanx as px

WIDTH = px.param("width", 4)

def job():
    lr = px.param("lr", 0.1)
    bias = px.param("bias", True)
    name = px.param("name", "mine")
    return px.Job(
        model=lambda: torch.nn.Linear(4, WIDTH, bias=bias),
        data=lambda: px.Table(input=torch.arange(64.0).reshape(16, 4) / 64),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        batch=4, steps=2, name=name,
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / f"declares_{abs(hash(tmp_path))}.py"
    path.write_text(JOB)
    return str(path)


def values(reference: str) -> dict[str, object]:
    load_job(reference)
    return {one.name: one.value for one in declared_values(reference)}


def test_values_are_of_the_type_of_their_default_also_at_the_top_level_of_a_loaded_file(file: str) -> None:
    assert values(file) == {"width": 4, "lr": 0.1, "bias": True, "name": "mine"}
    given = with_values(file, {"width": "8", "lr": "1e-3", "bias": "false", "name": "a&b = c?d"})
    assert values(given) == {"width": 8, "lr": 1e-3, "bias": False, "name": "a&b = c?d"}
    assert load_job(given).model().out_features == 8
    assert values(given) == {"width": 8, "lr": 1e-3, "bias": False, "name": "a&b = c?d"}
    assert load_job(file).model().out_features == 4
    assert str(Reference.parse(str(Reference.parse(given)))) == given.replace(file, str(Path(file).resolve()))


def test_what_nothing_declares_and_what_is_of_another_type_is_one_error(file: str) -> None:
    for words, said in {
        "lrr=1": "bias, lr, name, width",
        "width=2.5": "a whole number",
        "lr=fast": "a number",
        "bias=maybe": "true or false",
    }.items():
        with pytest.raises(SpecError, match=said):
            load_job(f"{file}?{words}")


def test_in_python_a_block_overrides_and_tells_of_what_it_did_not_read() -> None:
    with px.params(lr=1, name="x"):
        assert (px.param("lr", 0.5), px.param("name", "y"), px.param("other", 3)) == (1.0, "x", 3)
    assert px.param("lr", 0.5) == 0.5
    with pytest.raises(SpecError, match="does not declare"), px.params(lr=1.0):
        pass
    with pytest.raises(SpecError, match="whole number"), px.params(n=True):
        px.param("n", 3)
    with px.params():
        px.param("n", 3)
        with pytest.raises(SpecError, match="one default"):
            px.param("n", 4)


def test_a_run_that_goes_on_has_the_values_it_began_with(file: str) -> None:
    began = with_values(str(Path(file).resolve()), {"lr": "0.5"})
    assert going_on(file, began) == f"{file}?lr=0.5"
    assert going_on(f"{file}?lr=2", began) == f"{file}?lr=2"
    assert going_on("another.py", began) == "another.py"


def phalanx(*words: str) -> Result:
    return CliRunner().invoke(main, words, env={"COLUMNS": "100"})


def test_train_keeps_the_values_in_the_run_file_and_resumes_with_them(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ["train", file, "--run", str(folder), "--no-forecast"]
    began = phalanx(*common, "--plan", "dp=2", "--set", "lr=0.5", "--set", "width=8")
    assert began.exit_code == 0, began.stderr
    kept = Reference.parse(RunSpec.from_toml((folder / "run.toml").read_text()).job).values
    assert kept == (("lr", "0.5"), ("width", "8"))
    went_on = phalanx(*common, "--resume", "--steps", "3", "--explain")
    assert went_on.exit_code == 0, went_on.stderr
    rows = [line.split() for line in went_on.stderr.splitlines() if "set width" in line]
    assert rows == [["set", "width", "8", "run", "file"]]
    assert px.load(folder).state_dict()["weight"].shape == (8, 4)


def test_a_refused_override_names_the_option(file: str) -> None:
    for bad in (["--set", "lr"], ["--set", "lr=1", "--set", "lr=2"]):
        refused = phalanx("show", file, *bad)
        assert refused.exit_code == 2
        assert "--set" in refused.stderr
