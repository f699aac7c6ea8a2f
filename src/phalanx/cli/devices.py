"""``phalanx devices``: the catalog of devices side by side, and one of them with its sources."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import profile_option, subject
from phalanx.cli.output import answer, json_option
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.hardware.catalog import CatalogEntry
    from phalanx.preflight.subject import Subject

_WIDE = 92


@click.command("devices", short_help="What devices can do: peak, memory, bandwidth, links.")
@click.argument("name", metavar="[NAME|JOB|CONFIG]", required=False)
@click.option("--batch", type=int, default=0, help="With JOB: the global batch, in place of the job's.")
@click.option("--seq", type=int, default=0, help="With JOB: tokens in a sample, in place of those of the data.")
@profile_option
@json_option
def command(name: str | None, batch: int, seq: int, profile: str, as_json: bool) -> None:
    """Show the catalog of devices, or all that it says of the device NAME, with the source of every figure.

    With a JOB, or the config.json of a model: how it would do on one device of each kind, beside the most that peak
    and memory bandwidth allow (its roofline), and what bounds it.

    Peaks are of dense matrix products. The ridge is the FLOP per byte of memory traffic above which a product is
    bound by arithmetic. The link joins devices of one node, the network nodes: what one device gets of them when
    its node is full, in one direction. Names may be those of the driver or with their memory, such as A100-80GB-SXM.

    \b
    Examples:
      phalanx devices
      phalanx devices H100
      phalanx devices A100-80GB --json
      phalanx devices examples/gpt.py
    """
    from phalanx.hardware import entry, names
    from phalanx.planner.advise import is_config

    if name and (".py" in name or ":" in name or is_config(name)):
        _job_on_each(subject(name, batch=batch, seq=seq, steps=0, profile=profile), as_json)
        return
    if batch or seq or profile != "trace":
        option, value = ("--batch", batch) if batch else ("--seq", seq) if seq else ("--profile", profile)
        given, fix = f"{option} without a job", f"phalanx devices examples/gpt.py {option} {value}"
        raise SpecError.of(where=option, given=given, allowed="only with JOB or CONFIG", fix=fix)

    if name:
        one = entry(name)
        answer(as_json, _row(one), lambda _: _card(one))
    else:
        entries = [entry(each) for each in names()]
        answer(as_json, {"devices": [_row(one) for one in entries]}, lambda width: _overview(entries, width))


def _job_on_each(asked: Subject, as_json: bool) -> None:
    from phalanx.hardware import names
    from phalanx.planner.roofline import rooflines
    from phalanx.report.planner_tables import roofline_view

    lines = rooflines(asked.work(), names())
    told = {"job": asked.name, "devices": [one.to_dict() for one in lines]}
    answer(as_json, told, lambda _: roofline_view(asked.name, lines))


def _overview(entries: list[CatalogEntry], width: int) -> Table:
    from rich import box
    from rich.table import Table

    from phalanx.hardware.catalog import HEADINGS, LEGEND, NARROW, cells

    headings = HEADINGS if width >= _WIDE else NARROW
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption=LEGEND)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "device" else "right", no_wrap=True)
    for one in entries:
        row = cells(one)
        table.add_row(*(row[heading] for heading in headings))
    return table


def _card(one: CatalogEntry) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from phalanx.hardware.catalog import facts

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in facts(one):
        table.add_row(label, escape(text))
    return table


def _row(one: CatalogEntry) -> dict[str, Any]:
    network = one.network(one.per_node)
    return {
        **asdict(one.device),
        "room": one.device.room,
        "ridge": {dtype: one.device.ridge(dtype) for dtype in one.device.peak},
        "aliases": list(one.aliases),
        "per_node": one.per_node,
        "link": asdict(one.link),
        "host": asdict(one.host),
        "network": asdict(network),
        "sources": [asdict(source) for source in one.sources],
        "note": one.note,
    }
