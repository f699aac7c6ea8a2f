"""Python files, read and parsed once for all tests that hold rules about source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return every node of a file, the module first."""
    return list(ast.walk(parsed(path)))
