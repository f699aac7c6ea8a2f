"""Standard models on the meta device give the profiles that they give on fakes, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.trace.standard_models import Shape, standard

_SMALL = Shape(family="gpt", layers=2, hidden=64, heads=4, vocabulary=100, length=16)
_SHAPES = {
    "gpt": replace(_SMALL, tied=True, dropout=0.1, places=32),
    "rotary": replace(_SMALL, positions="rotary", kv_heads=2),
    "llama": replace(_SMALL, family="llama", kv_heads=2, biases=True),
    "mpt": replace(_SMALL, family="mpt"),
    "bert": replace(_SMALL, family="bert", dropout=0.1),
    "resnet50": Shape(family="resnet50", vocabulary=10, image=64),
}


@pytest.mark.parametrize("name", _SHAPES)
def test_forms_are_those_of_fakes(name: str):
    described = standard(_SHAPES[name])
    assert described.meta
    assert described.profile() == replace(described, meta=False).profile()


def test_no_compiler_is_loaded(tmp_path: Path):
    code = (
        "import sys\n"
        "from phalanx.trace.standard_models import Shape\n"
        "for family in ('gpt', 'llama'):\n"
        "    Shape(family=family, layers=2, hidden=64, heads=4, vocabulary=100, length=16).profile()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
