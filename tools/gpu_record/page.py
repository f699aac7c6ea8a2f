"""Turn GPU records into ``docs/project/gpu.md`` with its plots, and update the README's GPU paragraph.

``python tools/gpu_record/page.py [RECORD.json ...]``; without arguments, all records in ``tools/published/gpu/``.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_record.page_plots import Point, plot
from gpu_record.page_records import STEPS, Record, RecordError, read_records
from gpu_record.page_tables import NONE, off, proof_summary, ratio, share, shown, status_table, step_lines, table, text
from gpu_record.recorder import TRAINING
from gpu_record.run import STEPS as PLANNED

ROOT = Path(__file__).resolve().parents[2]
_NO_RUN = "No run on a GPU is on record yet."
_WRITTEN = "Written by `python tools/gpu_record/page.py`; do not edit."
_HOW = """`make gpu-record` makes one. Run `make gpu-pack` on a machine with a network,
copy the clone to the machine with the GPU, and run `make gpu-record` there.
It takes at most 9 minutes and needs no network. The time limits together are longer than that:
a step is skipped when the time left is too short for it. It measures, in this order:"""
_SMALL = ": they show that the programme works, not how fast Phalanx is"
_FACTORS = """Bars: at least 0.97 of plain PyTorch's rate, 45 % MFU, a forecast within 20 % in time and 10 % in memory.
They were set for the compiled 1 B Llama; other rows of Phalanx are held to the same bars."""
_PLOTS = (("gpu-time.svg", "time per step", "step_seconds"), ("gpu-memory.svg", "peak memory", "peak_bytes"))
_START, _END = "<!-- generated: gpu -->\n", "<!-- end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar that a number of a training row is held to: at least, or at most in either direction."""

    heading: str
    key: str
    bound: float
    least: bool

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the number, and met or missed for rows of Phalanx."""
        value = row[self.key]
        form = {"ratio": ratio, "mfu": share}.get(self.key, off)
        if value is None or not row["method"].startswith("phalanx"):
            return shown(value, form)
        met = value >= self.bound if self.least else abs(value) <= self.bound
        return f"{form(value)}, {'met' if met else '**missed**'}"


BARS = (
    Bar(heading=">of plain PyTorch (≥ 0.97)", key="ratio", bound=0.97, least=True),
    Bar(heading=">MFU (≥ 45 %)", key="mfu", bound=0.45, least=True),
    Bar(heading=">forecast of time (within 20 %)", key="time_error", bound=0.20, least=False),
    Bar(heading=">forecast of memory (within 10 %)", key="memory_error", bound=0.10, least=False),
)


def page(records: Sequence[Record]) -> tuple[str, dict[str, str]]:
    """Return the page, and the text of each of its plots by file name.

    Args:
        records: newest first.
    """
    if not records:
        steps = [(STEPS[name].title, f"{limit:g} s", STEPS[name].measures) for name, limit, *_ in PLANNED]
        lines = [f"{_NO_RUN} {_HOW}", *table(("step", "time limit", "measures"), steps)]
        return _joined(["# GPU record", "", _WRITTEN, "", *lines]), {}
    plots = _plots(records)
    lines = ["# GPU record", "", _WRITTEN, "", *_glance(records), *_pictures(plots, records)]
    for record in records:
        lines += ["", *_section(record)]
    return _joined(lines), plots


def paragraph(records: Sequence[Record]) -> str:
    """Return the README's paragraph: the numbers of the record that stands for Phalanx."""
    record = headline(records)
    if record is None:
        content = f"{_NO_RUN} `make gpu-record` makes one ([GPU record](docs/project/gpu.md))."
        return textwrap.fill(content, 120, break_long_words=False, break_on_hyphens=False)
    proofs = record.rows("proof")
    summary = proof_summary(proofs).removesuffix(".") if proofs else "no proof ran"
    kind = "full run" if _is_full(record) else "run"
    content = f"Newest {kind} on a GPU ({_device(record)}, {record.started:%Y-%m-%d}): {summary}. {_llama(record)}"
    errors = {key: [abs(row[key]) for row in record.rows(*TRAINING) if row[key] is not None] for key in _ERRORS}
    off_by = [_off_by(found, name) for (key, name) in _ERRORS.items() if (found := errors[key])]
    count = max(map(len, errors.values()))
    of = "The forecast of 1 row is" if count == 1 else f"Forecasts of {count} rows are"
    content += f" {of} {' and '.join(off_by)}" if off_by else " No forecast was compared"
    content += " ([GPU record](docs/project/gpu.md))."
    return textwrap.fill(content, 120, break_long_words=False, break_on_hyphens=False)


_ERRORS = {"time_error": "time", "memory_error": "memory"}


def _off_by(errors: Sequence[float], name: str) -> str:
    if len(errors) == 1:
        return f"{share(errors[0])} off in {name}"
    return f"{share(statistics.median(errors))} off in {name} in the median ({share(max(errors))} at most)"


def headline(records: Sequence[Record]) -> Record | None:
    """Return the newest full record of a GPU, else the newest of a GPU; ``None`` if no GPU was measured.

    A record of a few steps (``--only``) does not displace a full one.

    Args:
        records: newest first.
    """
    on_gpus = [record for record in records if record.counts]
    return next(filter(_is_full, on_gpus), on_gpus[0] if on_gpus else None)


def _is_full(record: Record) -> bool:
    return bool(record.rows("llama_1b") and record.rows("proof"))


def _measured_again(record: Record, records: Sequence[Record]) -> list[str]:
    """Return a sentence for each newer record of the same GPU with rows of training steps."""
    newer = [one for one in records if one.counts and one.started > record.started and _device(one) == _device(record)]
    lines: list[str] = []
    for one in newer:
        again = [STEPS[name].title for name in TRAINING if one.rows(name)]
        lines += [f"Measured again on {one.started:%Y-%m-%d}, below: {', '.join(again)}.", ""] if again else []
    return lines


def _llama(record: Record) -> str:
    row = next((row for row in record.rows("llama_1b") if row["method"] == "phalanx compiled"), None)
    if row is None or row["rate"] is None:
        return "The 1 B Llama was not measured."
    beside, mfu = shown(row["ratio"], ratio), shown(row["mfu"], share)
    rate = "not compared with plain PyTorch" if beside == NONE else f"at {beside} times the rate of plain PyTorch"
    return f"Compiled, Phalanx trains a Llama of 1 B parameters {rate}, with {'no known' if mfu == NONE else mfu} MFU."


def _glance(records: Sequence[Record]) -> list[str]:
    record = headline(records)
    if record is None:
        kind = _kind(records[0]).replace("Small", "small")
        return [f"{_NO_RUN} `make gpu-record` makes one. Below are {kind}{_SMALL}.", ""]
    rows = [
        (text(row["model"]), text(row["method"]), *(bar.cell(row) for bar in BARS)) for row in record.rows(*TRAINING)
    ]
    where = f"{_device(record)}, {record.started:%Y-%m-%d}."
    proofs = record.rows("proof")
    lines = ["## At a glance", "", f"{where} {proof_summary(proofs)}" if proofs else where, ""]
    lines += [*_measured_again(record, records), _FACTORS]
    if not rows:
        return [*lines, "", "No training row was measured.", ""]
    return [*lines, *table(("model", "method", *(bar.heading for bar in BARS)), rows)]


def _section(record: Record) -> list[str]:
    content, environment = record.content, record.facts("environment")
    heading = f"## {_device(record)}, {record.started:%Y-%m-%d}"
    lines = [heading if record.counts else f"{heading} (small versions)", ""]
    lines += [] if record.counts else [f"{_kind(record)}{_SMALL}.", ""]
    facts = [
        ("file", f"`{record.name}`"),
        ("started", f"{record.started:%Y-%m-%d %H:%M} UTC"),
        ("took", shown(content["seconds"], lambda value: f"{value:.0f} s")),
        ("GPU", text(environment.get("gpu"))),
        ("torch", text(environment.get("torch"))),
        ("driver", text(environment.get("driver"))),
        ("Phalanx", text(content["phalanx"]["version"])),
        ("commit", text(content["phalanx"]["commit"])),
    ]
    lines += table(("run", "value"), facts)
    lines += [] if content["complete"] else ["The programme ended before its last step.", ""]
    lines += status_table(content["steps"])
    absent = [step.title for name, step in STEPS.items() if name not in record.steps]
    lines += [f"Not in this record: {', '.join(absent)}.", ""] if absent else []
    for step in content["steps"]:
        if step["status"] != "skipped" or step["rows"]:
            lines += ["", *step_lines(step)]
    return lines


def _device(record: Record) -> str:
    facts = record.facts("environment")
    if record.content["device"] == "cpu":
        return "A CPU"
    name = text(facts["gpu"]) if facts.get("gpu") else "a CUDA device"
    return f"{facts['gpus']} × {name}" if facts.get("gpus", 1) not in (1, None) else name


def _kind(record: Record) -> str:
    return "Small versions on a CPU" if record.content["device"] == "cpu" else "Small versions"


def _plots(records: Sequence[Record]) -> dict[str, str]:
    drawn = [record for record in records if record.counts] or list(records)
    names = [f"{_device(record)}, {record.started:%Y-%m-%d}" for record in drawn]
    names = [name if record.counts else f"{name}: small versions" for name, record in zip(names, drawn, strict=True)]
    plots: dict[str, str] = {}
    for file, what, key in _PLOTS:
        points = [
            Point(
                label=f"{row['model']}, {row['method']}: {off(row['forecast'][key] / row[key] - 1)}",
                measured=row[key],
                forecast=row["forecast"][key],
                series=index,
            )
            for index, record in enumerate(drawn)
            for row in record.rows(*TRAINING)
            if row["forecast"] and (row["forecast"][key] or 0) > 0 and (row[key] or 0) > 0
        ]
        if points:
            show = _milliseconds if key == "step_seconds" else _gigabytes
            plots[file] = plot(f"{what.capitalize()}: forecast against measured", points, show, names)
    return plots


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:g} ms"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:g} GB"


def _pictures(plots: Mapping[str, str], records: Sequence[Record]) -> list[str]:
    small = "" if any(record.counts for record in records) else ", of small versions"
    lines = [f"![Forecast against measured {what}{small}]({file})" for file, what, _ in _PLOTS if file in plots]
    if not lines:
        return []
    return [
        "Forecast against measured, a point per training row; on the dashed line a forecast is exact.",
        "",
        *lines,
        "",
    ]


def _joined(lines: Sequence[str]) -> str:
    kept = [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]
    return "\n".join(kept).rstrip("\n") + "\n"


def write(records: Sequence[Record], root: Path) -> bool:
    """Write page, plots and README below ``root``; False if the README lacks the marker lines."""
    folder = root / "docs" / "project"
    content, plots = page(records)
    (folder / "gpu.md").write_text(content, encoding="utf-8")
    for file, *_ in _PLOTS:
        if file in plots:
            (folder / file).write_text(plots[file], encoding="utf-8")
        else:
            (folder / file).unlink(missing_ok=True)
    readme = root / "README.md"
    head, found, rest = readme.read_text(encoding="utf-8").partition(_START)
    _, closed, tail = rest.partition(_END)
    if not (found and closed):
        return False
    readme.write_text(f"{head}{_START}\n{paragraph(records)}\n\n{_END}{tail}", encoding="utf-8")
    return True


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write everything; return 2 for a record that cannot be used, 1 for a README without marker lines."""
    paths = [Path(each) for each in arguments] or sorted((root / "tools" / "published" / "gpu").glob("*.json"))
    try:
        records = read_records(paths)
    except RecordError as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 2
    if not write(records, root):
        print(f"page.py: README.md has no line {_START.strip()!r} with {_END!r} after it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
