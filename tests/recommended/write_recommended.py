"""What ``phalanx plan`` recommends for well-known settings, trained and proven at small size, as a page of the docs.

``write_recommended.py PAGE [--only WORD ...] [--render]``. Asks and measures (``make recommended`` all settings,
``--only`` those with one of these words in their name), stores what came of it beside this file, and writes the page
from what is stored; ``--render`` only writes. Exits with 1 where a recommended plan neither trains and is equal nor is
refused for a reason that ``plan`` names, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from settings import SETTINGS, STEPS, Config, Setting, job_of, small_config, small_job, small_plans

import phalanx as px
from phalanx.config import Job, Plan
from phalanx.errors import PhalanxError, SpecError
from phalanx.train.look_ahead import refusals
from phalanx.verify import OneDevice, ReferenceRun

RESULTS = Path(__file__).with_name("results.json")
EQUAL, TRAINED, ACCEPTED = "equal", "trained", "accepted"

Row = dict[str, Any]  # "plan", "place", and what came of it; see ``run_small``
Store = dict[str, Any]  # "torch", and "settings": name → {"on": date, "asked": [...], "rows": [Row]}


def recommended(setting: Setting) -> list[Row]:
    """What the command says: the first plan, those it calls as fast, and the one on fewer devices if that is faster."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(setting.config))
        argv = [sys.executable, "-m", "phalanx", "plan", str(file), *setting.asked, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{setting.name}: {done.stdout}{done.stderr}")
    said = json.loads(done.stdout)
    first = said["plans"][0]
    rows = [
        {"place": "1" if one is first else f"={place}", "plan": one["plan"], "said": one["train"] or ""}
        for place, one in enumerate(said["plans"], 1)
        if one["step"] <= first["high"]
    ]
    fewer = [one for one in said["points"] if one["devices"] == said["fewer"]]
    return rows + [{"place": f"on {said['fewer']}", "plan": _plan_of(one), "said": ""} for one in fewer]


def _plan_of(point: Mapping[str, Any]) -> str:
    return str(point["plan"] if "plan" in point else point["forecast"]["plan"])


def full_size(setting: Setting, plan: Plan) -> str:
    """Whether ``train`` would take the plan for the model as it is, by the look that it has at it before it starts."""
    job = job_of(setting.config, batch=setting.batch, length=setting.length)
    found = refusals(job, plan)
    return f"refused: {found[0].given}" if found else ACCEPTED


class Small:
    """Runs at small size; each plan of each model once."""

    def __init__(self) -> None:
        self._ones: dict[tuple[str, str], OneDevice] = {}
        self._done: dict[tuple[str, Plan], Row] = {}

    def run(self, config: Config, plan: Plan, *, fit: bool) -> Row:
        """What proofs of ``plan`` said, and with ``fit`` what training through ``fit`` did."""
        small = small_config(config, plan)
        key = json.dumps(small)
        statistics = small["model_type"] == "resnet"
        if (key, plan) not in self._done:
            found: Row = {"plan": str(plan), "proof": self._proof(key, small_job(small, group_norm=statistics), plan)}
            if statistics:
                found["statistics"] = with_batch_norms(small_job(small), plan)
            self._done[key, plan] = found
        if fit and "trained" not in self._done[key, plan]:
            self._done[key, plan]["trained"] = trained(small_job(small), plan)
        return self._done[key, plan]

    def _proof(self, key: str, job: Job, plan: Plan) -> Any:
        try:
            if (key, plan.precision) not in self._ones:
                self._ones[key, plan.precision] = OneDevice.run(job, STEPS, ReferenceRun(precision=plan.precision))
            proof = self._ones[key, plan.precision].prove(plan)
        except PhalanxError as error:
            return _words(error)
        found = [float(f"{proof.largest[name]:.2e}") for name in ("loss", "gradient")]
        return [*found, EQUAL] if proof.equal else [*found, f"{proof.first}: {proof.cause}"]


def with_batch_norms(job: Job, plan: Plan) -> str:
    """What a proof with the batch norms that the model has says."""
    try:
        proof = px.prove(job, plan, steps=1)
    except PhalanxError as error:
        return _words(error)
    return EQUAL if proof.equal else proof.cause


def trained(job: Job, plan: Plan) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = px.fit(replace(job, steps=STEPS), plan, folder=Path(folder) / "run")
        except PhalanxError as error:
            return _words(error)
        return TRAINED if len(run.losses) == STEPS else f"failed: {len(run.losses)} steps of {STEPS}"


def _words(error: PhalanxError) -> str:
    if isinstance(error, SpecError):
        return f"refused: {error.problems[0].given}"
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"


def run_small(setting: Setting, small: Small) -> list[Row]:
    """The recommended plans, each with what came of it."""
    rows = recommended(setting)
    for row in rows:
        plan = Plan.parse(row["plan"])
        row["full"] = full_size(setting, plan)
        print(setting.name, row["place"], row["plan"], row["said"], row["full"], sep=" | ", flush=True)
        row["small"] = []
        first = row["place"] == "1"
        for one in small_plans(plan, setting.batch):
            for precision in dict.fromkeys(("fp32", plan.precision if first else "fp32")):
                fit = first and precision == plan.precision
                found = small.run(setting.config, replace(one, precision=precision), fit=fit)
                print("   ", *found.values(), sep=" | ", flush=True)
                row["small"].append(found)
    return rows


def good(row: Row) -> bool:
    """Whether the model as it is may be trained under a plan, or ``plan`` says that not; and all small runs are equal.

    A run that is refused at small size is no good: the rules of small size keep what plans need.
    """
    return bool(row["full"] == ACCEPTED or row["said"]) and all(_good(one) for one in row["small"])


def _good(one: Row) -> bool:
    named = one.get("statistics", EQUAL)
    equal = isinstance(one["proof"], list) and one["proof"][-1] == EQUAL
    return one.get("trained", TRAINED) == TRAINED and equal and (named == EQUAL or "BatchNorm" in named)


def page(store: Store) -> str:
    known = {setting.name: store["settings"].get(setting.name) for setting in SETTINGS}
    rows = [row for found in known.values() if found for row in found["rows"]]
    measured = sum(found is not None for found in known.values())
    distinct = {(name, one["plan"]) for name, found in known.items() if found for row in found["rows"]
                for one in row["small"]}  # fmt: skip
    lines = [
        "# Recommended plans",
        "",
        "What `phalanx plan` recommends for models that people train, on the devices that they train them on: the",
        "first plan, and those that it calls as fast (`=`). Each is",
        "",
        "- held against the model as it is, by the look that `phalanx train` has at it before any process starts;",
        "- run at small size by rule: 2 ranks along each axis that has more than one (where these are more than",
        "  three axes, every three of them), every other key of the plan as it is, as many micro-batches up to four,",
        f"  and the model with every size small. It is trained ({STEPS} steps) and proven against one device in fp32;",
        "  the first plan also in its own precision, through `fit` and by a proof. Shown is the largest relative",
        "  difference of a step's loss / of a parameter's first gradient.",
        "",
        f"{len(rows)} plans are recommended, and run at small size as {len(distinct)} plans of {measured} models.",
        *_summary(rows),
        "",
        f"Written by `make recommended` with torch {store['torch']}, {_dates(store)}.",
        "",
    ]
    for setting in SETTINGS:
        lines += _section(setting, known[setting.name])
    return "\n".join(lines)


def _summary(rows: Sequence[Row]) -> list[str]:
    fine, said = sum(good(row) for row in rows), sum(bool(row["said"]) for row in rows)
    lines = [f"{fine} of them train and are equal."]
    if said:
        lines.append(f"Of these, `plan` itself says of {said} that `train` does not run them yet on such devices.")
    return lines


def _section(setting: Setting, found: Mapping[str, Any] | None) -> list[str]:
    command = f"phalanx plan config.json {' '.join(setting.asked)}"
    head = [f"## {setting.name}", "", f"`{command}`", ""]
    if found is None:
        return [*head, "not measured", ""]
    if list(setting.asked) != found["asked"]:
        head += ["measured with other arguments", ""]
    lines = ["| | recommended | the model as it is | at small size | result |", "| --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        full = f"`plan` says: {row['said']}" if row["said"] else _bold(row["full"], row["full"] == ACCEPTED)
        cells = [row["place"], f"`{row['plan']}`", full]
        for one in row["small"]:
            lines.append(_line(*cells, f"`{one['plan']}`", _result(one)))
            cells = ["", "", ""]
    return [*head, *lines, *_statistics(found["rows"]), ""]


def _statistics(rows: Sequence[Row]) -> list[str]:
    named = [one["statistics"] for row in rows for one in row["small"] if "statistics" in one]
    if not named:
        return []
    differs = sum(one != EQUAL for one in named)
    return [
        "",
        f"The model has batch norms, by which {differs} of these {len(named)} runs differ from one device: `train`",
        "says so before the run, and the proof names it as the cause. The differences shown are with group norms.",
    ]


def _result(one: Row) -> str:
    if one.get("trained", TRAINED) != TRAINED:
        return _bold(one["trained"], False)
    if not isinstance(one["proof"], list):
        return _bold(one["proof"], False)
    loss, gradient, said = one["proof"]
    text = f"{loss:.0e} / {gradient:.0e}"
    return text if _good(one) else _bold(f"{text}, {said}; {one.get('statistics', '')}", False)


def _bold(text: str, fine: bool) -> str:
    shown = text.replace("|", "\\|").replace("\n", " ").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
    return shown if fine else f"**{shown}**"


def _line(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _dates(store: Store) -> str:
    found = sorted(one["on"] for one in store["settings"].values())
    return ", ".join(f"{found.count(date)} settings on {date}" for date in dict.fromkeys(found))


def written(store: Store) -> str:
    """The store as text, a line a recommended plan, so that a difference between two runs can be read."""
    settings = []
    for name, found in store["settings"].items():
        rows = ",\n".join(f"    {json.dumps(row)}" for row in found["rows"])
        head = f'"on": {json.dumps(found["on"])}, "asked": {json.dumps(found["asked"])}'
        settings.append(f'  {json.dumps(name)}: {{{head}, "rows": [\n{rows}\n  ]}}')
    every = ",\n".join(settings)
    return f'{{"torch": {json.dumps(store["torch"])}, "settings": {{\n{every}\n}}}}\n'


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("page", type=Path)
    options.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="settings with one of these words")
    options.add_argument("--render", action="store_true", help="measure nothing")
    asked = options.parse_args()
    torch.set_num_threads(1)
    small = Small()
    for setting in () if asked.render else SETTINGS:
        if any(word.lower() in setting.name.lower() for word in asked.only):
            found = {"on": datetime.date.today().isoformat(), "asked": list(setting.asked)}
            found["rows"] = run_small(setting, small)
            stored = json.loads(RESULTS.read_text())  # another process may measure other settings
            stored["torch"] = torch.__version__
            stored["settings"][setting.name] = found
            RESULTS.write_text(written(stored))
    store: Store = json.loads(RESULTS.read_text())
    asked.page.write_text(page(store))
    wrong = [row for found in store["settings"].values() for row in found["rows"] if not good(row)]
    missing = [setting.name for setting in SETTINGS if setting.name not in store["settings"]]
    return 1 if not asked.render and (wrong or missing) else 0


if __name__ == "__main__":
    sys.exit(main())
