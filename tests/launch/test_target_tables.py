"""Tables over all targets: what is refused, how a run stands by its engine, damaged tickets, and no secret anywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launched import submission

from law_rows import in_one_test
from phalanx.config import Plan, RunSpec
from phalanx.config.run_files import LAUNCH_FILES
from phalanx.errors import MissingExtraError, RunError, SpecError
from phalanx.launch.targets import kubernetes, ray, sky, slurm
from phalanx.launch.targets.find_target import TARGETS, find_target
from phalanx.launch.targets.handed_over import UnmarkedError, ticket_of, write_ticket
from phalanx.launch.targets.option_checks import secrets_in
from phalanx.launch.targets.sagemaker import AwsCalls
from phalanx.launch.targets.target import Prepared, QueueTarget, Submission
from phalanx.report.run_standing import run_standing


def pod_patch(folder: Path, variable: str, value: str) -> None:
    """Write ``VARIABLE.json``, by which the pods of a run have that variable."""
    container = {"name": "node", "env": [{"name": variable, "value": value}]}
    (folder / f"{variable}.json").write_text(json.dumps({"spec": {"containers": [container]}}))


def handed(name: str, folder: Path, **given: Any) -> Submission:
    (folder / "train.py").write_text("def job(): ...\n")
    return submission(name, folder, **given)


def refused(name: str, folder: Path, **given: Any) -> tuple[list[str], str]:
    """Return the fields that are refused, and what the first problem says was given."""
    with pytest.raises(SpecError) as caught:
        find_target(name).prepare(handed(name, folder, **given))
    assert not (folder / "run").exists()
    assert all(problem.fix for problem in caught.value.problems)
    return [problem.where for problem in caught.value.problems], caught.value.problems[0].given


REFUSALS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "slurm": [
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"nodes": "0"}, "--nodes", "'0'"),
        ({"time": "soon"}, "--time", "'soon'"),
        ({"time": "0"}, "--time", "'0'"),
        ({"time": "1m", "run": {"grace": 40.0}}, "--time", "last 70 seconds"),
        ({"sbatch": "--partition=a b"}, "--sbatch", "a b"),
        ({"sbatch": "--account=x\n#SBATCH --uid=0"}, "--sbatch", "uid"),
        ({"time": "30m", "run": {"grace": 0.0, "checkpoint_every": "1h"}}, "--time", "every 1h"),
        ({"sbatch": "--nodelist=n'1"}, "--sbatch", "n'1"),
    ],
    "kubernetes": [
        ({"image": ""}, "--image", "none"),
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"gpus_per_node": "-1"}, "--gpus-per-node", "'-1'"),
        ({"volume": "data:here"}, "--volume", "'data:here'"),
        ({"plan": "dp=2 device=xpu"}, "--gpus-per-node", "xpu"),
        ({"patch": "nowhere.json"}, "--patch", "No such file"),
        ({"patch": "HERE/train.py"}, "--patch", "no JSON"),
        ({"patch": "HERE/HF_TOKEN.json"}, "--patch", "HF_TOKEN"),
        ({"time": "5s"}, "--time", "grace of 10"),
        ({"queue": "team-a", "run": {"devices": "1:2"}}, "-n", "with --queue"),
        ({"plan": "dp=4", "run": {"devices": "3:4"}}, "-n", "3:4 in 2 pods"),
        ({"plan": "dp=2 tp=2", "run": {"devices": "2:5"}}, "-n", "2:5 in 2 pods, with plan dp=2 tp=2"),
        ({"run": {"folder": Path("/scratch/run")}}, "--volume", "the run folder /scratch/run"),
        ({"run": {"job": "/home/me/train.py"}}, "--volume", "the job's file /home/me/train.py"),
    ],
    "ray": [
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"cpus_per_worker": "two"}, "--cpus-per-worker", "'two'"),
        ({"gpus_per_node": "1"}, "--plan", "1 x 1 GPUs are 1"),
        ({"runtime_env": "nowhere.json"}, "--runtime-env", "No such file"),
        ({"runtime_env": "HERE/train.py"}, "--runtime-env", "no JSON"),
        ({"code": "nowhere"}, "--code", "nowhere"),
    ],
    "sagemaker": [
        ({"instance": ""}, "--instance", "none"),
        ({"bucket": ""}, "--bucket", "none"),
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"nodes": "2"}, "--nodes", "without a file system"),
        ({"bucket": "bucket"}, "--bucket", "'bucket'"),
        ({"time": "100s"}, "--time", "100s"),
        ({"patch": "nowhere.json"}, "--patch", "No such file"),
        ({"patch": "HERE/train.py"}, "--patch", "no JSON"),
        ({"code": "/usr"}, "--code", "/usr"),
        ({"run": {"devices": "1:2"}}, "-n", ""),
        ({"run": {"grace": 110.0}}, "--grace", ""),
        ({"plan": "dp=2 server=1"}, "--plan", ""),
    ],
    "sky": [
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"shared": ""}, "--nodes", "2"),
        ({"shared": "", "nodes": ""}, "--mirror", "none"),
        ({"setup": ""}, "--setup", "none"),
        ({"plan": "dp=2 device=cuda"}, "--plan", "2 x 0 GPUs are 0"),
        ({"run": {"devices": "1:2"}}, "-n", "1:2"),
        ({"patch": "HERE/train.py"}, "--patch", "no JSON"),
        ({"patch": "HERE/sky-run.json"}, "--patch", "run"),
        ({"patch": "HERE/sky-secret.json"}, "--patch", "HF_TOKEN"),
    ],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused_by_its_field(tmp_path: Path, name: str) -> None:
    pod_patch(tmp_path, "HF_TOKEN", "1")
    (tmp_path / "sky-run.json").write_text('{"run": "true"}')
    (tmp_path / "sky-secret.json").write_text('{"secrets": {"HF_TOKEN": "hf_1", "WANDB_API_KEY": null}}')
    for options, where, words in REFUSALS[name]:
        fields, given = refused(name, tmp_path, **options)
        assert {*fields} == {where}, options
        assert words in given, options


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        (
            "slurm",
            {"run": {"devices": "1:2"}, "nodes": "x", "time": "y", "sbatch": "z z"},
            "--nodes --time --sbatch -n",
        ),
        ("kubernetes", {"image": "", "nodes": "x", "time": "y", "volume": ""}, "--image --nodes --time --volume"),
        ("sagemaker", {"image": "", "role": "", "nodes": "x", "time": "y"}, "--image --role --nodes --time"),
    ],
)
def test_all_problems_are_reported_together(tmp_path: Path, name: str, options: dict[str, Any], fields: str) -> None:
    assert list(dict.fromkeys(refused(name, tmp_path, **options)[0])) == fields.split()


@pytest.mark.parametrize(
    "text",
    [
        *("slurm:gpu", "kubernetes:gpu", "sagemaker:here", "ray://head:10001", "ray:head:6379", "ray:http://:8265"),
        *("ray:http://head:port", "ray:ftp://head:1", "ray:http://me:word@head:1", "ray:a b", "shh:hosts.toml"),
        *("sky:gpu=H100:8", "sky:gpus=H1000:8", "sky:gpus=H100:0", "sky:gpus", "sky:spot=yes", "sky:spot,spot"),
    ],
)
def test_an_address_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        find_target(text)
    assert [problem.where for problem in caught.value.problems] == ["--to"]


TICKETS: dict[str, dict[str, Any]] = {
    "slurm": {"job": 7, "cluster": "far"},
    "kubernetes": {"jobset": "one", "nodes": 2, "least": 1, "context": "c", "namespace": "vision"},
    "ray": {"job": "digits-1", "address": "http://10.0.0.1:8265"},
    "sagemaker": {"job": "digits-1", "region": "us-east-1", "run": "s3://bucket/digits-1/run"},
    "sky": {"job": "run-digits-1"},
}


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{}", "{", "[" * 100_000, '{"to": 3}', '{"to": "moon"}'], ids=lambda text: text[:30]
)
def test_a_damaged_ticket_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run" / "launch" / "ticket.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        ticket_of(tmp_path / "run")
    (problem,) = caught.value.problems
    assert (problem.given, problem.fix) == (f"{path}, which is damaged", f"rm {path}")


@pytest.mark.parametrize("name", TICKETS)
def test_a_ticket_counts_with_the_mark_of_its_user_alone(tmp_path: Path, name: str) -> None:
    given = handed(name, tmp_path)
    given.folder.mkdir(parents=True)
    write_ticket(given, name, TICKETS[name])
    assert ticket_of(given.run.folder)[1] == {"to": name, **TICKETS[name]}
    own = json.loads((given.folder / "ticket.json").read_text())
    (tmp_path / "other" / "launch").mkdir(parents=True)
    bad = [{**own, "mark": mark} for mark in ("", None, [], "é", own["mark"][1:])]
    for folder, told in [(tmp_path / "other", own), *((given.run.folder, told) for told in (*bad, {**own, "x": 1}))]:
        (folder / "launch" / "ticket.json").write_text(json.dumps(told))
        with pytest.raises(UnmarkedError):
            ticket_of(folder)
        assert "no mark of yours" in run_standing(folder).detail
    key = tmp_path.parent / "phalanx" / "ticket.key"
    key.chmod(0o640)
    with pytest.raises(RunError, match="read by others"):
        write_ticket(given, name, TICKETS[name])
    key.unlink()


EVENTS = {
    "resume": {"step": 3, "path": "checkpoints/step-3"},
    "stopped": {"step": 3, "signal": "SIGTERM"},
    "error": {"rank": 0, "step": 3, "kind": "ValueError", "message": "no"},
    "end": {"step": 3, "samples": 48, "seconds": 1.0, "loss": 0.5},
}
FORGOTTEN = [(None, "", "unknown"), (None, "resume", "unknown"), (None, "stopped", "stopped")]
FORGOTTEN += [(None, "end", "ended"), (None, "error", "failed")]


def said_by_slurm(state: str, more: str = "Reason=None", code: int = 0) -> str:
    return f"JobId=7 JobState={state} {more} NodeList=n[1-2] ExitCode={code}:0"


def described(status: str, secondary: str) -> dict[str, Any]:
    said = [{"Status": secondary, "StatusMessage": "No capacity just now"}]
    return {"TrainingJobStatus": status, "SecondaryStatus": secondary, "SecondaryStatusTransitions": said}


def said_by_sky(state: str) -> str:
    others = {"job_name": "other", "status": "RUNNING"}
    return json.dumps([others, {"job_name": "run-digits-1", "status": state, "failure_reason": None}])


RAYS = [("PENDING", "waiting"), ("RUNNING", "running"), ("SUCCEEDED", "ended"), ("STOPPED", "stopped")]
RAYS += [("FAILED", "failed")]

# target → what the engine answers (None: it has forgotten the run), the run's last event, and how it then stands
STATES: dict[str, list[tuple[Any, str, str]]] = {
    "slurm": [
        *((said_by_slurm(state), "", "waiting") for state in ("PENDING", "CONFIGURING", "REQUEUED", "SPECIAL_EXIT")),
        *((said_by_slurm(state), "", "running") for state in ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")),
        (said_by_slurm("COMPLETED"), "", "ended"),
        (said_by_slurm("CANCELLED", code=1), "error", "stopped"),
        (said_by_slurm("FAILED", code=75), "stopped", "stopped"),
        (said_by_slurm("FAILED", code=75), "resume", "stopped"),
        (said_by_slurm("FAILED", code=75), "error", "failed"),
        (said_by_slurm("FAILED", code=1), "stopped", "failed"),
        (said_by_slurm("TIMEOUT"), "", "failed"),
        *FORGOTTEN,
    ],
    "ray": [
        *((SimpleNamespace(status=status, message="why", driver_exit_code=1), "", state) for status, state in RAYS),
        (SimpleNamespace(status="STOPPED", message="", driver_exit_code=None), "end", "ended"),
        (RunError("no Ray dashboard answers"), "end", "unknown"),
        *((RunError("status code 404"), last, state) for _, last, state in FORGOTTEN),
    ],
    "sagemaker": [
        *((described("InProgress", one), "", "waiting") for one in ("Starting", "Pending", "Interrupted")),
        *((described("InProgress", one), "", "running") for one in ("Training", "Uploading")),
        (described("Stopping", "Stopping"), "", "running"),
        (described("Stopped", "MaxRuntimeExceeded"), "", "stopped"),
        (described("Completed", "Completed"), "", "ended"),
        ({**described("Failed", "Failed"), "FailureReason": "AlgorithmError: no"}, "", "failed"),
        (None, "", "unknown"),
    ],
    "sky": [
        *((said_by_sky(state), "", "waiting") for state in ("PENDING", "STARTING", "RECOVERING")),
        *((said_by_sky(state), "", "running") for state in ("RUNNING", "CANCELLING")),
        (said_by_sky("SUCCEEDED"), "", "ended"),
        (said_by_sky("CANCELLED"), "", "stopped"),
        *((said_by_sky(state), "", "failed") for state in ("FAILED", "FAILED_SETUP", "FAILED_NO_RESOURCE")),
        (RunError("No in-progress managed jobs"), "", "unknown"),
        *((strange, "", "unknown") for strange in ("[1, 2]", '[{"a": 1}]', "[" * 100_000, '{"jobs": 3}')),
        *FORGOTTEN,
    ],
}


@pytest.mark.parametrize("name", STATES)
def test_how_a_run_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answer: Any = None

    def ask_slurm(*words: str, **how: Any) -> str:
        assert words == ("scontrol", "-M", "far", "show", "job", "7", "--oneliner")
        if answer is None:
            raise RunError("Slurm refuses it: Invalid job id specified")
        return answer

    def ask_aws(self: AwsCalls, service: str, operation: str, **given: Any) -> Any:
        return answer if operation == "describe_training_job" else None

    monkeypatch.setattr(slurm, "_ask", ask_slurm)

    def ask_sky(*words: str) -> str:
        if isinstance(answer, RunError):
            raise answer
        return f"Hint: sky api info\n{answer or '[]'}"

    monkeypatch.setattr(sky, "_ask", ask_sky)

    @contextmanager
    def ask_ray(address: str) -> Iterator[Any]:
        if isinstance(answer, RunError):
            raise answer
        yield SimpleNamespace(get_job_info=lambda job: answer, get_job_logs=lambda job: "phalanx: running on n0")

    monkeypatch.setattr(ray, "_client", ask_ray)
    monkeypatch.setattr(AwsCalls, "ask", ask_aws)
    target = find_target(name)
    assert isinstance(target, QueueTarget)
    for told, last, state in STATES[name]:
        answer = told
        note = json.dumps({"event": last, "time": 1.0, **EVENTS[last]}) + "\n" if last else ""
        (tmp_path / "events.jsonl").write_text(note)
        found = target.standing(TICKETS[name], tmp_path)
        assert (told, last, found.state) == (told, last, state)
        if told and not isinstance(told, RunError) and state in ("waiting", "failed"):
            assert found.detail


def test_slurm_counts_earlier_starts_and_names_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [said_by_slurm("PENDING", "Reason=Priority Restarts=2"), said_by_slurm("RUNNING")]
    monkeypatch.setattr(slurm, "_ask", lambda *words: answers.pop(0))
    target = find_target("slurm")
    assert isinstance(target, QueueTarget)
    said = [target.standing(TICKETS["slurm"], tmp_path).detail for _ in range(2)]
    assert said == ["PENDING: Priority, after 2 earlier starts", "RUNNING on n[1-2]"]


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "ray", "sagemaker", "sky"])
def test_a_machine_without_the_engines_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    target = find_target(name)
    assert isinstance(target, QueueTarget)
    prepared = target.prepare(handed(name, tmp_path))
    named = {"slurm": "sbatch", "kubernetes": "kubectl", "ray": r"phalanx\[ray\]", "sagemaker": r"phalanx\[sagemaker\]"}
    named |= {"sky": "pip install 'skypilot"}
    with pytest.raises((RunError, MissingExtraError), match=named[name]):
        target.submit(prepared)
    assert not (tmp_path / "run").exists()


def test_kubernetes_is_asked_where_the_ticket_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, ...]]()

    def ask(told: Any, *words: str, **how: Any) -> str:
        asked.append(kubernetes._kubectl(told, *words))
        return ""

    monkeypatch.setattr(kubernetes, "_ask", ask)
    target = find_target("kubernetes")
    assert isinstance(target, QueueTarget)
    assert target.standing(TICKETS["kubernetes"], tmp_path).state == "unknown"
    assert [words[:5] for words in asked] == [("kubectl", "--context", "c", "--namespace", "vision")] * 2
    target.stop(TICKETS["kubernetes"], tmp_path)
    assert not any("delete" in words for words in asked), "of a run that is forgotten nothing is taken away"


MARK = "hunter2"
HOSTS = f"""folder = "/work"
environment = {{ WANDB_API_KEY = "{MARK}" }}

[[host]]
name = "n1"
devices = 2
"""
# what a user may try: what they give of options and of the run, by target; those of "" by every target
MIRROR = {"run": {"mirror": f"sftp://me:{MARK}@host/runs"}}
WAYS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {}, "") for name in TARGETS),
    *((name, MIRROR, "run.mirror") for name in TARGETS),
    ("slurm", {"setup": f"export WANDB_API_KEY={MARK}"}, "--setup"),
    ("slurm", {"setup": f"module load cuda; wandb login --api-key '{MARK}'"}, "--setup"),
    ("slurm", {"setup": "export WANDB_API_KEY=$(cat ~/.wandb)"}, ""),
    ("kubernetes", {"patch": "WANDB_API_KEY.json"}, "--patch"),
    ("ray", {"runtime-env": "runtime.json"}, ""),
    ("sagemaker", {"patch": "environment.json"}, "--patch"),
    ("sky", {"setup": f"export WANDB_API_KEY={MARK}"}, "--setup"),
    ("sky", {"patch": "task.json"}, "--patch"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job with its secrets about it: in the environment, in ``.env``, in files that targets are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", MARK)
    Path("train.py").write_text("def job(): ...\n")
    Path(".env").write_text(f"WANDB_API_KEY={MARK}\n")
    Path("hosts.toml").write_text(HOSTS)
    Path("runtime.json").write_text(json.dumps({"env_vars": {"WANDB_API_KEY": MARK}}))
    pod_patch(tmp_path, "WANDB_API_KEY", MARK)
    Path("task.json").write_text(json.dumps({"envs": {"WANDB_API_KEY": MARK}}))
    Path("environment.json").write_text(json.dumps({"Environment": {"FI_PROVIDER": "efa", "HF_TOKEN": MARK}}))
    return tmp_path


@pytest.mark.parametrize(("name", "given", "wrong"), WAYS)
def test_no_secret_is_written_anywhere(name: str, given: dict[str, Any], wrong: str, folder: Path) -> None:
    def prepared() -> Prepared:
        return find_target("ssh:hosts.toml" if name == "ssh" else name).prepare(submission(name, folder, **given))

    if not wrong:
        assert MARK not in prepared().shown()
        names = [path.name for path in prepared().files if path.parent == folder / "run" / "launch"]
        assert names
        assert all(any(fnmatch(one, known) for known in LAUNCH_FILES) for one in names)
        return
    with pytest.raises(SpecError) as caught:
        prepared()
    (problem,) = caught.value.problems
    assert problem.where == wrong
    assert wrong == "--env-from-secret" or MARK not in str(caught.value)  # whose pattern says what was typed


def test_secrets_in_a_table_are_variables_with_their_values() -> None:
    entries = [{"name": "hf_token", "value": "x"}, {"name": "A_KEY", "valueFrom": {"secretKeyRef": {"key": "token"}}}]
    table = {"Environment": {"MY_SECRET": "x", "FI_PROVIDER": "efa"}, "Tags": [{"Key": "team"}], "env": entries}
    assert secrets_in(table) == ["MY_SECRET", "hf_token"]


@in_one_test(
    ("line", "names"),
    [
        ("export WANDB_API_KEY=abc", ["WANDB_API_KEY"]),
        ("HF_TOKEN='hf_x' true && export MY_SECRET=b", ["HF_TOKEN", "MY_SECRET"]),
        ("login --api-key=abc --verbose", ["api-key"]),
        ('export A_KEY="$(cat file)" B_KEY=$OTHER C_KEY=`cat file` D_KEY=', []),
        ("login --token $TOKEN --token-file here", []),
        ("export SSL_KEY_FILE=/etc/key.pem MONKEY=1", []),
        ("source keys/all; true --auth --verbose", []),
    ],
)
def test_what_a_line_of_shell_gives_away(line: str, names: list[str]) -> None:
    assert secrets_in(line) == names


@in_one_test(
    ("mirror", "fix"),
    [
        (f"sftp://me:{MARK}@host:22/runs", 'mirror="sftp://me@host:22/runs"'),
        (f"sftp://me:{MARK}@{MARK}@host/runs", 'mirror="sftp://me@host/runs"'),
        (f"s3://AKIA:{MARK}@bucket/runs", 'mirror="s3://bucket/runs"'),
        ("sftp://me@host/runs", ""),
        ("abfs://container@account.dfs.core.windows.net/runs", ""),
    ],
)
def test_a_mirror_has_no_password_in_it(mirror: str, fix: str) -> None:
    def made() -> RunSpec:
        return RunSpec(job="train.py", folder=Path("run"), plan=Plan(), mirror=mirror)

    if not fix:
        assert made().mirror == mirror
        return
    with pytest.raises(SpecError) as caught:
        made()
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == ("run.mirror", fix)
    assert MARK not in str(caught.value)
