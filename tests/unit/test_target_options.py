"""Options of launch targets: given twice, mistyped, for too few GPUs or too little time; and what they say is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.launch.targets.find_target import TARGETS, find_target, settled_options
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.slurm import SlurmTarget
from phalanx.launch.targets.target import Submission, Target

pytestmark = pytest.mark.quick
QUEUES = {
    "slurm": {"nodes": "2", "gpus-per-node": "8"},
    "kubernetes": {"nodes": "2", "gpus-per-node": "8", "image": "train:1"},
    "sagemaker": {
        "instance": "ml.g5.12xlarge",
        "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
        "role": "arn:aws:iam::123456789012:role/train",
        "bucket": "s3://bucket/phalanx",
    },
}


def prepared(name: str, folder: Path, *, plan: str = "dp=4", run: dict[str, Any] | None = None, **options: str) -> str:
    """What a launch to a queue would write, as text. ``options``: in place of those that it needs; empty: without."""
    (folder / "job").mkdir(exist_ok=True)
    (folder / "job" / "train.py").write_text("def job(): ...\n")
    spec = RunSpec(
        **{"job": str(folder / "job" / "train.py"), "plan": Plan.parse(plan), "folder": folder / "run", **(run or {})}
    )
    named = {one.replace("_", "-"): value for one, value in options.items()}
    own = {**QUEUES[name], **({"volume": f"data:{folder}"} if name == "kubernetes" else {}), **named}
    given = {one: value for one, value in own.items() if value}
    return find_target(name).prepare(Submission(run=spec, name="train", python="python", options=given)).shown()


def problem_of(name: str, folder: Path, **given: Any) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        prepared(name, folder, **given)
    (problem,) = caught.value.problems
    return problem.where, problem.given, problem.fix


def settled(to: str, *words: str) -> dict[str, str]:
    return settled_options(find_target(to), list(words))


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "n1"\naddress = "127.0.0.1"\n')
    return find_target(f"ssh:{tmp_path}/hosts.toml" if request.param == "ssh" else request.param)


class TestGivenTwice:
    def test_an_option_is_refused_or_has_both_values_in_their_order(self, target: Target) -> None:
        for name, option in target.options.items():
            words = [f"--{name}=one", f"--{name}=two"]
            if option.between:
                assert settled_options(target, words) == {name: f"one{option.between}two"}
                continue
            with pytest.raises(SpecError) as caught:
                settled_options(target, words)
            (problem,) = caught.value.problems
            assert (problem.where, problem.given, problem.fix) == (f"--{name}", "twice: one, two", f"--{name} two")

    def test_both_lines_of_setup_are_in_the_script_in_their_order(self, tmp_path: Path) -> None:
        own = settled("slurm", "--setup", "module load cuda", "--setup", "source env.sh")
        script = prepared("slurm", tmp_path, **own)
        assert 0 < script.index("module load cuda") < script.index("source env.sh") < script.index("srun ")


class TestUnknown:
    @pytest.mark.parametrize(
        ("to", "words", "fix", "allowed"),
        [
            ("slurm", ["--gpu-per-node", "8"], "--gpus-per-node", ""),
            ("slurm", ["--noodes", "8"], "--nodes", ""),
            ("slurm", ["--gpus", "8"], "--gpus-per-node", ""),
            ("slurm", ["--exclusive"], "--sbatch '--exclusive=...'", "others by --sbatch '--name=value'"),
            ("kubernetes", ["--toleration=x"], "--patch pod.json", "others by --patch pod.json"),
            ("slurm", ["-x"], "without -x", ""),
            ("slurm", ["3h"], "without 3h", ""),
            ("slurm", ["--image", "a"], "without --image, or --to kubernetes", "belongs to kubernetes, sagemaker"),
            ("kubernetes", ["--setup", "true"], "without --setup, or --to slurm", "--setup belongs to slurm"),
            ("ray", ["--setup=true"], "without --setup, or --to slurm", "--setup belongs to slurm"),
        ],
    )
    def test_only_what_was_meant_is_named_and_never_a_value(
        self, to: str, words: list[str], fix: str, allowed: str
    ) -> None:
        with pytest.raises(SpecError) as caught:
            settled(to, *words)
        (problem,) = caught.value.problems
        assert problem.fix == fix
        assert allowed in problem.allowed
        assert problem.given == f"{to}, with {words[0].partition('=')[0]}"


GONE = {
    "slurm": "partition account qos constraint gres cpus-per-task mem nodelist exclude signal",
    "kubernetes": "wait toleration node-selector",
    "sagemaker": "spot subnets",
}


@pytest.mark.parametrize("name", GONE)
def test_an_option_that_is_gone_is_refused_with_the_way_to_say_it(name: str) -> None:
    (through,) = [option.through for option in find_target(name).options.values() if option.through]
    for option in GONE[name].split():
        with pytest.raises(SpecError) as caught:
            settled(name, f"--{option}", "x", "--nodes", "2")
        (problem,) = caught.value.problems
        assert problem.given == f"{name}, with --{option}"
        assert f"others by {through.format('--name=value')}" in problem.allowed


@pytest.mark.parametrize("words", [["--nodes", "--time", "3h"], ["--nodes"], ["--nodes=--time"]])
def test_an_option_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        settled("slurm", *words)
    assert ("--nodes", "no value") in [(problem.where, problem.given) for problem in caught.value.problems]


class TestGpus:
    @pytest.mark.parametrize(
        ("name", "plan", "options", "words"),
        [
            ("slurm", "dp=32", {}, "for 32 devices: 2 x 8 GPUs are 16"),
            ("slurm", "dp=2 device=cuda", {"gpus_per_node": "0"}, "2 x 0 GPUs are 0"),
            ("kubernetes", "dp=8 device=cuda", {"gpus_per_node": "1"}, "2 x 1 GPUs are 2"),
            ("sagemaker", "dp=8", {"gpus_per_node": "4"}, "1 x 4 GPUs are 4"),
        ],
    )
    def test_a_plan_for_more_than_there_are_is_refused(
        self, tmp_path: Path, name: str, plan: str, options: dict[str, str], words: str
    ) -> None:
        where, given, fix = problem_of(name, tmp_path, plan=plan, **options)
        assert where == "--plan"
        assert words in given
        prepared(name, tmp_path, **{**options, "plan": fix.removeprefix("--plan ").strip("'")})

    @pytest.mark.parametrize(
        ("name", "plan", "options"),
        [
            ("slurm", "dp=16 device=cuda", {}),
            ("slurm", "dp=16", {"gpus_per_node": "0"}),
            ("slurm", "dp=16 server=2", {"nodes": "2"}),
            ("slurm", "dp=8", {"gpus_per_node": "", "sbatch": "--gres=shard:4"}),
            ("kubernetes", "dp=16", {"gpus_per_node": "0"}),
            ("kubernetes", "dp=16 device=cpu", {"gpus_per_node": "1"}),
        ],
    )
    def test_one_that_fits_is_not(self, tmp_path: Path, name: str, plan: str, options: dict[str, str]) -> None:
        assert "train" in prepared(name, tmp_path, plan=plan, **options)


class TestTime:
    """By a checkpoint that the run has saved, which took 200 seconds."""

    @pytest.fixture(autouse=True)
    def _saved(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        saved = {
            "event": "checkpoint",
            "time": 1.0,
            "step": 3,
            "seconds": 200.0,
            "bytes": 10,
            "path": "checkpoints/step-3",
        }
        (tmp_path / "run" / "events.jsonl").write_text(json.dumps(saved) + "\n")

    @pytest.mark.parametrize("name", QUEUES)
    def test_that_ends_before_a_checkpoint_is_whole_is_refused(self, tmp_path: Path, name: str) -> None:
        for grace in (0.0, 250.0):
            if name == "sagemaker" and grace:
                continue  # more than it gives
            run = {"grace": grace}
            where, given, fix = problem_of(name, tmp_path, run=run, time="3m")
            assert where == "--time"
            assert "the slowest checkpoint of this run took 200 seconds" in given or grace
            prepared(name, tmp_path, run=run, time=fix.removeprefix("--time "))

    @pytest.mark.parametrize("name", QUEUES)
    def test_to_save_in_that_is_less_is_refused(self, tmp_path: Path, name: str) -> None:
        where, given, fix = problem_of(name, tmp_path, run={"grace": 100.0}, time="12h")
        assert where == "--grace"
        assert "the slowest checkpoint of this run took 200" in given
        assert fix == ("--grace 0 --checkpoint-every 10m" if name == "sagemaker" else "--grace 300")

    @pytest.mark.parametrize("name", QUEUES)
    def test_in_which_nothing_is_saved_is_refused(self, tmp_path: Path, name: str) -> None:
        where, given, fix = problem_of(name, tmp_path, run={"grace": 0.0, "checkpoint_every": "1h"}, time="30m")
        assert (where, fix) == ("--time", "--time 96m")
        assert "a checkpoint every 1h" in given


@pytest.mark.parametrize("name", QUEUES)
def test_what_nodes_have_is_what_the_options_say(name: str) -> None:
    own = settled(name, "--nodes", "2", "--gpus-per-node", "8", "--device", "A100-80GB")
    assert find_target(name).offer(own) == Offer(nodes=2, devices=8, device="A100-80GB")
    for less in ({"device": "H100"}, {"gpus-per-node": "8"}, {**own, "gpus-per-node": "0"}, {**own, "nodes": "two"}):
        assert find_target(name).offer(less) is None
    with pytest.raises(SpecError, match="MARVEL"):
        find_target(name).offer({**own, "device": "MARVEL"})


class TestSky:
    @pytest.mark.parametrize(
        ("address", "said"),
        [
            ("gpus=A100:8,cloud=aws", "2 nodes with 8 x A100-40GB"),
            ("gpus=A100-80GB:4,spot", "2 nodes with 4 x A100-80GB"),
            ("gpus=h100", "2 nodes with 1 x H100"),
            ("cpus=8", "None"),
        ],
    )
    def test_nodes_are_those_of_the_address(self, address: str, said: str) -> None:
        assert str(find_target(f"sky:{address}").offer({"nodes": "2"})) == said

    @pytest.mark.parametrize(
        ("address", "given", "fix"),
        [
            ("gpu=H100:8", "'sky:gpu=H100:8', with gpu", "--to sky:gpus=H100:8,cloud=aws,spot"),
            ("gpus=H100:many", "'sky:gpus=H100:many', with gpus", "--to sky:gpus=H100:8,cloud=aws,spot"),
            ("cpus=4,cpus=8", "'sky:cpus=4,cpus=8', with a key twice", "--to sky:gpus=H100:8,cloud=aws,spot"),
            ("gpus=H1000:8", "'H1000'", "--to sky:gpus=H100:8"),
        ],
    )
    def test_an_address_that_cannot_be_is_refused(self, address: str, given: str, fix: str) -> None:
        with pytest.raises(SpecError) as caught:
            find_target(f"sky:{address}")
        (problem,) = caught.value.problems
        assert (problem.where, problem.given, problem.fix) == ("--to", given, fix)

    def test_a_patch_is_merged_into_the_task_and_secrets_go_by_their_names(self, tmp_path: Path) -> None:
        patch = {"resources": {"disk_size": 500, "job_recovery": {"max_restarts_on_errors": 1}}, "secrets": {"A": None}}
        (tmp_path / "task.json").write_text(json.dumps(patch))
        options = {"patch": str(tmp_path / "task.json"), "setup": "true", "nodes": "2", "shared": "/data/1"}
        spec = RunSpec(job=str(tmp_path / "train.py"), plan=Plan.parse("dp=2"), folder=tmp_path / "run", grace=10.0)
        (tmp_path / "train.py").touch()
        given = Submission(run=spec, name="my train", python="python", options=options)
        prepared = find_target("sky:gpus=L4:1,spot").prepare(given)
        task = json.loads(prepared.files[tmp_path / "run" / "launch" / "job.yaml"])
        recovery = {"recover_on_exit_codes": [75], "max_restarts_on_errors": 1}
        asked = {"accelerators": "L4:1", "use_spot": True, "job_recovery": recovery, "disk_size": 500}
        assert (task["resources"], task["secrets"], task["num_nodes"]) == (asked, {"A": None}, 2)
        assert task["name"] == f"my-train-{given.token}"
        assert prepared.commands[0][5:7] == ("--secret", "A")
        assert task["config"]["hooks"][0]["timeout"] == 40


class TestSbatch:
    def test_further_options_are_lines_of_the_script(self, tmp_path: Path) -> None:
        own = settled("slurm", "--sbatch", "--exclusive", "--nodes", "1", "--sbatch", "--mail-type=END")
        assert own == {"sbatch": "--exclusive\n--mail-type=END", "nodes": "1"}
        lines = prepared("slurm", tmp_path, **own).splitlines()
        assert lines.count("#SBATCH --exclusive") == lines.count("#SBATCH --mail-type=END") == 1

    @pytest.mark.parametrize(
        ("text", "given", "fix"),
        [
            ("exclusive", "'exclusive'", "--sbatch '--partition=gpu'"),
            ("-x", "'-x'", "--sbatch '--partition=gpu'"),
            ("--comment=a b", "'--comment=a b'", "--sbatch '--partition=gpu'"),
            ("--comment=$(id)", "$(id)", "--sbatch '--partition=gpu'"),
            ("--nodes=4", "--nodes=4", "without --sbatch '--nodes=4'"),
            ("--output=x", "--output=x", "without --sbatch '--output=x'"),
            ("--nice=5\n--nice=6", "--nice=6", "without --sbatch '--nice=6'"),
            (
                "--export=ALL,HF_TOKEN=hf_1",
                "HF_TOKEN, named as a secret",
                "HF_TOKEN from a file, this shell or a secret of the target, which the job reads itself",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, tmp_path: Path, text: str, given: str, fix: str) -> None:
        spec = RunSpec(job=str(tmp_path / "train.py"), plan=Plan.parse("dp=2"), folder=tmp_path / "run")
        options = {"gpus-per-node": "2", "sbatch": text}
        with pytest.raises(SpecError) as caught:
            SlurmTarget("").prepare(Submission(run=spec, name="train", python="python", options=options))
        (problem,) = caught.value.problems
        assert problem.where == "--sbatch"
        assert given in problem.given
        assert problem.fix == fix


def test_a_patch_is_merged_into_each_pod(tmp_path: Path) -> None:
    """Objects of one name are merged, lists are added to, and what it says takes the place of what is there."""
    env = [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "OMP_NUM_THREADS", "value": "3"}]
    container = {"name": "node", "env": env, "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}}}
    volume = {"name": "shm", "emptyDir": {"sizeLimit": "16Gi"}}
    patch = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {"containers": [container], "volumes": [volume], "imagePullSecrets": [{"name": "ecr"}]},
    }
    path = tmp_path / "pod.json"

    def template(**options: str) -> dict[str, Any]:
        text = prepared("kubernetes", tmp_path, gpus_per_node="0", **options)
        objects = json.loads(text[text.index("{\n") : text.rindex("}\n") + 1])
        return objects["items"][1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]

    path.write_text(json.dumps(patch))
    plain, pods = template(), template(patch=str(path))
    (before,), (after,) = (one["spec"]["containers"] for one in (plain, pods))
    variables = {one["name"]: one.get("value") for one in after["env"]}
    assert variables == {"RESTART_ATTEMPT": None, "PHALANX_CORES": None, "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}
    assert [one["name"] for one in before["env"]] == ["RESTART_ATTEMPT", "PHALANX_CORES"]
    assert (before["resources"], after["resources"]) == (
        {"requests": {"cpu": "2"}},
        {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
    )
    assert after["volumeMounts"] == before["volumeMounts"]
    assert [one for one in pods["spec"]["volumes"] if one["name"] == "shm"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    ]
    assert pods["spec"]["imagePullSecrets"] == [{"name": "ecr"}]
    assert [*pods["metadata"]["labels"]] == [*plain["metadata"]["labels"], "team"]
    path.write_text('{"spec": {"containers": "none", "nodeSelector": 3}}')
    assert template(patch=str(path))["spec"]["containers"] == "none", "which the cluster refuses"
