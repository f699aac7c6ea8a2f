"""The law of secrets: none that a launch is given stands in what a target writes or runs, or refuses it with."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Plan, RunSpec
from phalanx.config.run_files import LAUNCH_FILES
from phalanx.errors import SpecError
from phalanx.launch.targets import TARGETS, Prepared, Submission, find_target
from phalanx.launch.targets.option_checks import secret_names, secrets_set

MARK = "hunter2"
HOSTS = f"""folder = "/work"
environment = {{ WANDB_API_KEY = "{MARK}" }}

[[host]]
name = "n1"
devices = 2
"""
AWS = {
    "instance": "ml.g5.12xlarge",
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/train",
    "bucket": "s3://bucket/phalanx/",
}
# target → its address, and options that a run there needs
GIVEN: dict[str, tuple[str, dict[str, str]]] = {
    "ssh": ("ssh:hosts.toml", {}),
    "slurm": ("slurm", {}),
    "kubernetes": ("kubernetes", {"image": "registry/train:1", "volume": "data:{folder}"}),
    "ray": ("ray", {}),
    "sagemaker": ("sagemaker", AWS),
}
# what a user may try: what they give of options and of the run, by target; those of "" by every target
MIRROR = {"run": {"mirror": f"sftp://me:{MARK}@host/runs"}}
WAYS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {}, "") for name in GIVEN),
    *((name, MIRROR, "run.mirror") for name in GIVEN),
    ("slurm", {"setup": f"export WANDB_API_KEY={MARK}"}, "--setup"),
    ("slurm", {"setup": f"module load cuda; wandb login --api-key '{MARK}'"}, "--setup"),
    ("slurm", {"setup": "export WANDB_API_KEY=$(cat ~/.wandb)"}, ""),
    ("kubernetes", {"env-from-secret": "wandb"}, ""),
    ("kubernetes", {"env-from-secret": f"wandb,KEY={MARK}"}, "--env-from-secret"),
    ("ray", {"runtime-env": "runtime.json"}, ""),
    ("sagemaker", {"environment": f"FI_PROVIDER=efa,HF_TOKEN={MARK}"}, "--environment"),
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
    return tmp_path


def test_every_target_is_held_to_it() -> None:
    assert {*GIVEN} == {*TARGETS}


@pytest.mark.parametrize(("name", "given", "refused"), WAYS)
def test_no_secret_is_written_anywhere(name: str, given: dict[str, Any], refused: str, folder: Path) -> None:
    address, needed = GIVEN[name]
    options = {key: value.format(folder=folder) for key, value in needed.items()}
    options |= {key: value for key, value in given.items() if key != "run"}

    def prepared() -> Prepared:
        settings: dict[str, Any] = {"plan": Plan.parse("dp=2"), **given.get("run", {})}
        spec = RunSpec(job=str(folder / "train.py"), folder=folder / "run", **settings)
        return find_target(address).prepare(Submission(run=spec, name="digits", python="python", options=options))

    if not refused:
        assert MARK not in prepared().shown()
        names = [path.name for path in prepared().files if path.parent == folder / "run" / "launch"]
        assert names
        assert all(any(fnmatch(one, known) for known in LAUNCH_FILES) for one in names)
        return
    with pytest.raises(SpecError) as caught:
        prepared()
    (problem,) = caught.value.problems
    assert problem.where == refused
    assert refused == "--env-from-secret" or MARK not in str(caught.value)  # whose pattern says what was typed


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("module load cuda", []),
        ("export WANDB_API_KEY=abc", ["WANDB_API_KEY"]),
        ("HF_TOKEN='hf_x' true && export MY_SECRET=b", ["HF_TOKEN", "MY_SECRET"]),
        ("login --token hf_x", ["token"]),
        ("login --api-key=abc --verbose", ["api-key"]),
        ('export A_KEY="$(cat file)" B_KEY=$OTHER C_KEY=`cat file` D_KEY=', []),
        ("login --token $TOKEN --token-file here", []),
        ("export SSL_KEY_FILE=/etc/key.pem MONKEY=1", []),
        ("source keys/all; true --auth --verbose", []),
    ],
)
def test_what_a_line_of_shell_gives_away(line: str, names: list[str]) -> None:
    assert secrets_set(line) == names


def test_names_that_look_like_those_of_secrets() -> None:
    assert secret_names(["HF_TOKEN", "MONKEY", "AWS_SHARED_CREDENTIALS_FILE", "db-password"]) == [
        "HF_TOKEN",
        "db-password",
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mirror", "fix"),
    [
        (f"sftp://me:{MARK}@host:22/runs", 'mirror="sftp://me@host:22/runs"'),
        (f"sftp://me:{MARK}@{MARK}@host/runs", 'mirror="sftp://me@host/runs"'),
        (f"s3://AKIA:{MARK}@bucket/runs", 'mirror="s3://bucket/runs"'),
        ("sftp://me@host/runs", ""),
        ("abfs://container@account.dfs.core.windows.net/runs", ""),
        ("s3://bucket/a:b@c", ""),
    ],
)
def test_a_mirror_has_no_password_in_it(mirror: str, fix: str) -> None:
    """In no run: ``run.toml`` would show it."""

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


class Sftp:
    """fsspec's own, as far as what it takes from variables; that one needs paramiko."""

    protocol = ("sftp", "ssh")


def test_what_its_library_reads_instead() -> None:
    """The variable that the refusal names is one that fsspec takes the password from."""
    from fsspec.config import apply_config, set_conf_env

    with pytest.raises(SpecError, match="FSSPEC_SFTP_PASSWORD"):
        RunSpec(job="train.py", folder=Path("run"), plan=Plan(), mirror="sftp://me:x@host/runs")
    conf: dict[str, Any] = {}
    set_conf_env(conf, {"FSSPEC_SFTP_PASSWORD": MARK})
    assert apply_config(Sftp, {"username": "me"}, conf) == {"username": "me", "password": MARK}
