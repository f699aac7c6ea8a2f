"""Codecs on CUDA give what they give on the host, and gradients that are sent smaller train there too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import fit

from phalanx.parallel.compression import Feedback, codec, lane, message, read
from phalanx.report.summary import summarise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "topk:0.01"])
def test_codecs_agree_with_the_host(text: str) -> None:
    one = codec(text)
    assert one is not None
    flat = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    flat[7] = 1e9
    host, device = torch.empty_like(flat), torch.empty_like(flat, device="cuda")
    read(one, message(one, flat), host)
    read(one, message(one, flat.cuda()), device)
    assert torch.allclose(device.cpu(), host, rtol=1e-6)


@pytest.mark.parametrize("text", ["int8", "topk:0.01"])
def test_feedback_on_a_device(text: str) -> None:
    one = codec(text)
    assert one is not None
    feedback, total, sent = Feedback(one), torch.zeros(5000, device="cuda"), torch.zeros(5000, device="cuda")
    for step in range(10):
        flat = torch.randn(5000, generator=torch.Generator().manual_seed(step)).cuda()
        total += flat
        read(one, feedback.message(flat), sent, add=True)
    assert feedback.left_out is not None
    assert torch.allclose(total - feedback.left_out, sent, atol=1e-4)
    feedback.message(torch.full((5000,), float("nan"), device="cuda"))
    assert feedback.left_out.isfinite().all()


def test_exchanges_run_on_a_stream_of_their_own() -> None:
    flat = torch.zeros(1_000_000, device="cuda")
    one = lane(flat.device)
    futures = [one.start(lambda: flat.add_(1)) for _ in range(5)]
    flat_after = [future.wait() for future in futures][-1].clone()
    assert flat_after.eq(5).all()
    one.close()


@pytest.mark.parametrize("compress", ["fp16", "bf16", "int8", "topk:0.1", "powersgd:2"])
def test_plans_for_two_devices(compress: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    fit("dp=2 device=cuda", tmp_path / "whole")
    fit(f"dp=2 device=cuda compress={compress}", tmp_path / "less")
    whole, less = summarise(tmp_path / "whole"), summarise(tmp_path / "less")
    assert whole.loss is not None
    assert less.loss == pytest.approx(whole.loss, rel=0.05)
    assert sum(less.sent) > 0
