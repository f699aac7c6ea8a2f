"""TOML and JSON documents from people and programs: the value, or one error with the reason."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from phalanx.errors import SpecError
from phalanx.files.plain_files import read_text


def toml_table(text: str, *, where: str, fix: str, allowed: str = "a TOML document") -> dict[str, Any]:
    """Return the table of a TOML document.

    Raises:
        SpecError: it is not TOML, or nested too deeply, or holds a number too long to be read.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError.of(where, _said(error), allowed, fix) from None


def json_value(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON document without repeated keys.

    ``finite``: all numbers must be finite; otherwise NaN and infinities are read as Python writes them.

    Raises:
        ValueError: it is not such JSON, or nested too deeply.
    """
    try:
        if not finite:
            return json.loads(text, object_pairs_hook=_once)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_toml(path: Path, *, where: str, fix: str, allowed: str = "a TOML document", below: int = 0) -> dict[str, Any]:
    """Return the table in the TOML file ``path``; arguments as of ``read_text`` and ``toml_table``.

    Raises:
        SpecError: it cannot be read, or is not TOML.
    """
    text = read_text(path, where=where, fix=fix, below=below)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError.of(where, f"{path}: {_said(error)}", allowed, fix) from None


def read_json(path: Path, *, where: str, fix: str, allowed: str = "a JSON document", below: int = 0) -> Any:
    """Return the value in the JSON file ``path``; arguments as of ``read_text``.

    Raises:
        SpecError: it cannot be read, or is not JSON.
    """
    text = read_text(path, where=where, fix=fix, below=below)
    try:
        return json_value(text)
    except ValueError as error:
        raise SpecError.of(where, f"{path}: no JSON ({_said(error)})", allowed, fix) from None


def _said(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _not_finite(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond what a number can be")
    return value
