"""What a user sees of a traceback: own code, and not what is around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.train.user_traceback import format_for_user, origin, users_frames

pytestmark = pytest.mark.quick


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layer(x[:, :3])
        except RuntimeError as error:
            raise ValueError("of three columns") from error


def test_frames_of_phalanx_and_of_module_calls_are_left_out() -> None:
    def work() -> None:
        nn.Sequential(Narrow())(torch.ones(2, 4))

    with pytest.raises(ValueError, match="three columns") as caught:
        px.build(_job(work), "single")
    text = format_for_user(caught.value)
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    assert not any("_call_impl" in line or ("/phalanx/" in line and "/tests/" not in line) for line in frames)
    assert "frames of Phalanx and PyTorch are left out" in text
    assert "RuntimeError: mat1 and mat2" in text
    assert text.index("RuntimeError: mat1") < text.index("direct cause") < text.index("ValueError: of three columns")
    assert "self.layer(x[:, :3])" in text
    assert users_frames(caught.value)[-1].name == "forward"


def _job(work: object) -> px.Job:
    def model() -> nn.Module:
        assert callable(work)
        work()
        return nn.Linear(1, 1)

    return px.Job(
        model=model,
        data=lambda: [(torch.ones(1),)],
        loss=lambda output, batch: output.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=1,
        steps=1,
    )


def test_a_fault_without_a_line_of_the_user_is_whole() -> None:
    code = compile("def fail():\n    raise RuntimeError('ours')", f"{Path(px.__file__).parent}/train/step.py", "exec")
    found: dict[str, object] = {}
    exec(code, found)
    try:
        found["fail"]()  # type: ignore[operator]
    except RuntimeError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        text = format_for_user(error)
    assert "left out" not in text
    assert "train/step.py" in text


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (px.__file__, "phalanx"),
        (torch.__file__, "torch"),
        (pytest.__file__, "library"),
        ("<frozen importlib._bootstrap>", "library"),
        ("<ipython-input-3-1f2e>", "user"),
        (f"{Path(px.__file__).parent}/demo/jobs/images.py", "user"),
        (__file__, "user"),
    ],
)
def test_whose_code_a_file_is(file: str, whose: str) -> None:
    assert origin(file) == whose
