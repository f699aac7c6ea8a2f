"""Faults of launches: options of targets, states and tickets of runs, code that is sent, findings on hosts, secrets."""

from __future__ import annotations

from mutation import Mutation

TABLES, PODS, CODE = "launch/test_target_tables.py", "launch/test_kubernetes.py", "launch/test_code_pack.py"
HOSTS, OPTIONS = "unit/test_host_findings.py", "unit/test_target_options.py"
SECRETS = "launch/test_target_tables.py"
TARGETS, CHECKS = "launch/targets", "launch/check_hosts"

LAUNCH = (
    Mutation(
        "slurm: a run that failed as it was to stop counts as stopped",
        f"{TARGETS}/slurm.py",
        'code == str(SAVED) and last_word(folder) != "error"',
        "code == str(SAVED)",
        (f"test {TABLES} how_a_run_stands",),
    ),
    Mutation(
        "slurm: the cluster of a ticket is not asked",
        f"{TARGETS}/slurm.py",
        'return "-M", cluster',
        "return ()",
        (f"test {TABLES} how_a_run_stands",),
    ),
    Mutation(
        "slurm: seconds of a time limit are rounded down to minutes",
        f"{TARGETS}/slurm_request.py",
        "minutes = math.ceil(seconds / 60)",
        "minutes = seconds // 60",
        ("test launch/test_slurm.py time_limit",),
    ),
    Mutation(
        "slurm: a signal shorter than the grace is taken",
        f"{TARGETS}/slurm_request.py",
        "if signal < run.grace:",
        "if signal < 0:",
        (f"test {TABLES} refused_by_its_field",),
    ),
    Mutation(
        "kubernetes: a run whose own code raised is told to be stopped",
        f"{TARGETS}/kubernetes_standing.py",
        "if any(OWN_FAILURE in _exit_codes(pod) for pod in pods):",
        "if all(OWN_FAILURE in _exit_codes(pod) for pod in there):",
        (f"test {PODS} how_it_stands",),
    ),
    Mutation(
        "kubernetes: a run waits though as many pods run as it needs at least",
        f"{TARGETS}/kubernetes_standing.py",
        "if len(running) >= least:",
        "if len(running) > least:",
        (f"test {PODS} fewer_pods_run",),
    ),
    Mutation(
        "kubernetes: a ticket may name an option of kubectl as its namespace",
        f"{TARGETS}/kubernetes.py",
        '"namespace": _NAME, "context": _CONTEXT}',
        '"namespace": _NAME}',
        (f"test {TABLES} wrong_field",),
    ),
    Mutation(
        "kubernetes: pods end by force before the grace is over",
        f"{TARGETS}/kubernetes_options.py",
        "grace=math.ceil(run.grace) + SAVE_MARGIN,",
        "grace=math.ceil(run.grace),",
        (f"test {PODS} has_to_go_does_not_count",),
    ),
    Mutation(
        "ray: a cluster that cannot be reached counts as one that has forgotten the run",
        f"{TARGETS}/ray.py",
        'return Standing(state="unknown", detail=_unreachable(told, cluster))',
        'told = {"state": None}',
        (f"test {TABLES} how_a_run_stands",),
    ),
    Mutation(
        "ray: code that changed meanwhile is sent",
        f"{TARGETS}/ray.py",
        '.write(partial) != asked["sha256"]:',
        '.write(partial) == "":',
        (f"test {TABLES} code_that_changes",),
    ),
    Mutation(
        "sagemaker: a job that uploads what it has trained waits",
        f"{TARGETS}/sagemaker.py",
        '_TRAINING = ("Training", "Uploading", "Stopping")',
        '_TRAINING = ("Training", "Stopping")',
        (f"test {TABLES} how_a_run_stands",),
    ),
    Mutation(
        "options: a number below the least is taken",
        f"{TARGETS}/option_checks.py",
        "return text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) >= least",
        "return text.isascii() and text.isdecimal() and len(text) <= _DIGITS",
        (f"test {TABLES} refused_by_its_field",),
    ),
    Mutation(
        "handed over: a ticket of a target that there is not is believed",
        f"{TARGETS}/handed_over.py",
        'if told["to"].partition(":")[0] in TARGETS:',
        'if told["to"]:',
        (f"test {TABLES} one_clear_error",),
    ),
    Mutation(
        "a launch that fails leaves its files",
        f"{TARGETS}/target.py",
        "path.unlink(missing_ok=True) if text is None else path.write_text(text)",
        "path.write_text(text or '')",
        (f"test {TABLES} without_the_engines_program",),
    ),
    Mutation(
        "a time limit: the slowest checkpoint of the run is not considered",
        f"{TARGETS}/option_checks.py",
        "if self.seconds <= max(self.kept, took):",
        "if self.seconds <= self.kept:",
        (f"test {OPTIONS} TestTime",),
    ),
    Mutation(
        "options: one that is given twice has its last value",
        f"{TARGETS}/find_target.py",
        "        elif option.between:",
        "        elif not option.between:\n            found[name] = value\n        elif option.between:",
        (f"test {OPTIONS} TestGivenTwice",),
    ),
    Mutation(
        "options: a plan for GPUs is taken where the nodes have none",
        f"{TARGETS}/offer.py",
        "if not needed or plan.devices <= gpus:",
        "if not needed or not gpus or plan.devices <= gpus:",
        (f"test {OPTIONS} TestGpus",),
    ),
    Mutation(
        "secrets: a token is none",
        f"{TARGETS}/option_checks.py",
        '"CREDENTIAL", "CREDENTIALS", "AUTH", "APIKEY"}',
        '"CREDENTIAL", "CREDENTIALS", "AUTH", "APIKEY"} - {"TOKEN"}',
        (f"test {SECRETS} line_of_shell",),
    ),
    Mutation(
        "code: a link is packed as the file that it leads to",
        f"{TARGETS}/code_pack.py",
        "if stat.S_ISREG(status.st_mode):",
        "if not stat.S_ISDIR(status.st_mode):",
        (f"test {CODE} no_link",),
    ),
    Mutation(
        "code: what is not what was packed is unpacked",
        f"{TARGETS}/code_pack.py",
        "if (found := digest_of(archive)) != digest:",
        "if (found := digest_of(archive)) == '':",
        (f"test {CODE} not_what_was_packed_is_not_unpacked",),
    ),
    Mutation(
        "code: a host's folder is left by two dots",
        f"{TARGETS}/host_folder.py",
        'os.path.isabs(path) or ".." in path.split("/")',
        "os.path.isabs(path)",
        (f"test {CODE} nothing_outside",),
    ),
    Mutation(
        "hosts: a file of the job that is another on few hosts is not named",
        f"{CHECKS}/host_findings.py",
        'if sources[one.name]["files"].get(file, "") != common:',
        'if sources[one.name]["files"].get(file, common) != sources[one.name]["files"].get(file):',
        (f"test {HOSTS} one_fault",),
    ),
    Mutation(
        "hosts: little room for a checkpoint fails only once it is full",
        f"{CHECKS}/host_findings.py",
        'fails = told["free"] < needs.state',
        'fails = told["free"] <= 0',
        (f"test {HOSTS} one_fault",),
    ),
    Mutation(
        "hosts: workers are counted by devices, whatever the target says",
        f"{CHECKS}/device_findings.py",
        "min(left, answer.processes or devices or even)",
        "min(left, devices or answer.processes or even)",
        (f"test {HOSTS} three_good",),
    ),
    Mutation(
        "links: one slow link is the fault of the host that sends",
        f"{CHECKS}/link_findings.py",
        'sends, gets = _best(links, "source"), _best(links, "target")',
        'sends, gets = _best(links, "target"), _best(links, "source")',
        (f"test {HOSTS} slow_links",),
    ),
    Mutation(
        "links: pairs that no time was left for are not counted",
        f"{CHECKS}/asking_links.py",
        "unasked += len(pairs)",
        "unasked += 1",
        (f"test {HOSTS} without_time",),
    ),
    Mutation(
        "a secret of a run may be read by other users",
        "launch/run_secret.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644",
        ("test launch/test_worker_programs.py only_this_user",),
    ),
)
