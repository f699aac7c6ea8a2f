"""From a reference to a job, and every way in which that goes wrong."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.config import Job
from phalanx.errors import SpecError
from phalanx.launch.jobfile import Reference, load_function, load_job

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


def test_file(tmp_path: Path) -> None:
    job = load_job(str(write(tmp_path, GOOD)))
    assert isinstance(job, Job)
    assert (job.batch, job.name) == (4, "job_of_test")


def test_function_of_a_file_and_a_name_of_its_own(tmp_path: Path) -> None:
    job = load_job(f"{write(tmp_path, GOOD)}:other_job")
    assert (job.batch, job.name) == (8, "mine")


def test_a_job_without_a_name_has_its_files_and_its_functions(tmp_path: Path) -> None:
    text = GOOD.replace('name="mine"', 'name="job"')
    assert load_job(f"{write(tmp_path, text)}:other_job").name == "job_of_test-other_job"


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_job("job_of_test.py").batch == 4


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


def test_what_the_file_defines_can_be_pickled(tmp_path: Path) -> None:
    net = load_job(str(write(tmp_path, GOOD))).model()
    assert type(net).__module__ == "job_of_test"
    assert type(pickle.loads(pickle.dumps(net))) is type(net)


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


def test_cuda_is_asked_about_without_initialising_it(tmp_path: Path) -> None:
    text = "import os\nCHECK = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n" + GOOD
    load_job(str(write(tmp_path, text)))
    assert sys.modules["job_of_test"].CHECK == "1"


def test_no_such_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    text = problem(str(tmp_path / "job_of_tset.py"))
    assert "does not exist" in text
    assert text.endswith("job_of_test.py")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    assert "which is a folder" in problem(f"{tmp_path}/")


def test_no_such_module() -> None:
    text = problem("no_such_package_of_mine.jobs:job")
    assert "no module 'no_such_package_of_mine.jobs'" in text
    assert "path/to/file.py" in text


def test_no_function_names_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    text = problem(f"{file}:ohter_job")
    assert "no function ohter_job() in it; it has: Net, job, loss, other_job" in text
    assert text.endswith(f"try: {file}:other_job")


def test_file_without_job(tmp_path: Path) -> None:
    text = problem(str(write(tmp_path, "def train(): ...\n")))
    assert "no function job() in it; it has: train" in text
    assert "def job() -> px.Job" in text


@pytest.mark.parametrize("name", ["", ":training", ":xyz"])
def test_a_loop_that_is_not_named_or_not_there(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "def aid():\n    pass\n\n\ndef my_loop(steps, model):\n    pass\n")
    assert load_function(f"{path}:my_loop").__name__ == "my_loop"
    with pytest.raises(SpecError) as caught:
        load_function(f"{path}{name}")
    (found,) = caught.value.problems
    assert found.fix == f"{path}:my_loop"
    assert "it has: aid, my_loop" in found.given
    assert "job" not in str(caught.value).replace(str(path), "")


def test_job_in_place_of_a_function(tmp_path: Path) -> None:
    assert "job is a Job, not a function" in problem(str(write(tmp_path, GOOD + "\njob = job()\n")))


def test_function_with_arguments(tmp_path: Path) -> None:
    assert "job(size): missing a required argument: 'size'" in problem(str(write(tmp_path, "def job(size): ...\n")))


@pytest.mark.parametrize(("result", "word"), [("", "None"), ("return {'batch': 4}", "dict")])
def test_function_that_returns_no_job(result: str, word: str, tmp_path: Path) -> None:
    text = problem(str(write(tmp_path, f"def job():\n    {result or 'pass'}\n")))
    assert word in text
    assert "px.Job(" in text


def test_error_in_the_file_shows_the_users_lines_only(tmp_path: Path) -> None:
    file = write(tmp_path, "def broken():\n    return 1 / 0\n\nbroken()\n")
    text = problem(str(file))
    assert "ZeroDivisionError: division by zero" in text
    assert "in broken" in text
    assert "importlib" not in text
    assert "jobfile.py" not in text
    assert "job_of_test" not in sys.modules


def test_error_in_the_function(tmp_path: Path) -> None:
    text = problem(str(write(tmp_path, "def job():\n    raise KeyError('digits')\n")))
    assert "job() in " in text
    assert "KeyError: 'digits'" in text
    assert text.endswith("job_of_test.py, and there job()")


def test_a_field_that_a_job_does_not_have(tmp_path: Path) -> None:
    text = problem(str(write(tmp_path, "import phalanx as px\ndef job():\n    return px.Job(optimiser=None)\n")))
    assert "try: optimizer= in px.Job, whose fields are model, data, loss" in text


def test_missing_package_names_what_to_install(tmp_path: Path) -> None:
    text = problem(str(write(tmp_path, "import no_such_package_of_mine.thing\n")))
    assert text.endswith("try: pip install no_such_package_of_mine")


def test_syntax_error(tmp_path: Path) -> None:
    assert "SyntaxError" in problem(str(write(tmp_path, "def job(:\n")))


def test_script_that_exits(tmp_path: Path) -> None:
    assert "SystemExit: 3" in problem(str(write(tmp_path, "import sys\nsys.exit(3)\n")))


def test_spec_error_of_the_job_passes_through(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("batch=4", "batch=0"))
    with pytest.raises(SpecError) as raised:
        load_job(str(file))
    assert [found.where for found in raised.value.problems] == ["job.batch"]


@pytest.mark.parametrize(
    ("text", "function"), [("a/b.py", "job"), ("a/b.py:c", "c"), ("a.b", "job"), ("a.b:c", "c"), ("/x:y/b.py:c", "c")]
)
def test_reference_round_trips(text: str, function: str) -> None:
    reference = Reference.parse(text)
    assert reference.function == function
    assert Reference.parse(str(reference)) == reference
