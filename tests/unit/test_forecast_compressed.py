"""What sending less is forecast to take: numbers by hand, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from test_forecast_apart import GIANT, PLAIN, WORK, layouts, setting, told

from phalanx.forecast.gradient_sync import averaged, averaging, server_time
from phalanx.forecast.memory import memory

ALL = ("fp16", "bf16", "int8", "topk:0.01", "powersgd:4")


@pytest.mark.parametrize(
    ("compress", "wire", "made"),
    [
        # a ring of 4 sends 2 x 3/4 of 4 GB at 100 GB/s
        ("none", 0.06, 0.0),
        # halves as much; 48 bytes an element move at 1 TB/s
        ("bf16", 0.03, 0.048),
        ("fp16", 0.03, 0.076),
        # a byte, and 4 for 256
        ("int8", 0.06 / 4 * 260 / 256, 0.135),
        # 3 others get 8 bytes of each hundredth element
        ("topk:0.01", 0.0024, 0.082),
        # a ring of the thin elements
        ("powersgd:4", 0.00006, 0.062),
    ],
)
def test_what_is_sent_and_what_making_it_takes(compress: str, wire: float, made: float) -> None:
    rows = layouts(f"dp=4 compress={compress}")
    found = averaging(GIANT, GIANT / 1000, rows, np.ones(1), setting())
    assert [float(one[0]) for one in found] == pytest.approx([wire, made])


def test_what_replicas_average_now_and_then_is_smaller_too() -> None:
    plain, small = (
        averaged(GIANT, 0 * GIANT, layouts(f"dp=4 sync=local every=10{rest}"), setting())[0]
        for rest in ("", " compress=bf16")
    )
    assert plain == pytest.approx(0.06 / 10)
    assert small == pytest.approx((0.03 + 0.048) / 10)


def test_servers_get_less_and_give_as_much() -> None:
    found = server_time(GIANT, np.array([1.0]), layouts("dp=4 server=1 compress=int8"), setting())
    # 4 workers push 260/256 GB each into 20 GB/s, pull 4 GB; encoding moves 97 bytes, and reading 17 for each of 4
    assert found[0] == pytest.approx(0.2 * 260 / 256 + 0.8 + 0.76 + 0.097 + 0.68)


@pytest.mark.parametrize("compress", ALL)
def test_no_codec_is_ignored(compress: str) -> None:
    slow = "4x1xA100@1Gb/s"
    rest = ("", " sync=local every=4", " server=1") if not compress.startswith("powersgd") else ("",)
    for way in rest:
        whole, less = told(f"dp=4{way}", slow), told(f"dp=4{way} compress={compress}", slow)
        assert less.seconds["replicas"] < 0.8 * whole.seconds["replicas"]
        assert less.seconds["products"] == whole.seconds["products"]
        assert not less.plan.exact


def test_a_larger_rank_and_a_larger_share_send_more() -> None:
    slow = "4x1xA100@1Gb/s"
    for texts in (("powersgd:1", "powersgd:4", "powersgd:16"), ("topk:0.001", "topk:0.01", "topk:0.1")):
        steps = [told(f"dp=4 compress={text}", slow).step for text in texts]
        assert steps == sorted(set(steps))


def test_what_is_left_out_takes_memory() -> None:
    whole, *others = (
        memory(WORK.profile, layouts(f"dp=4 compress={text}"), PLAIN, "fp32", 8.0).gradients[0]
        for text in ("none", *ALL)
    )
    assert [one - whole for one in others] == [0, 0, *[4 * WORK.profile.parameters] * 3]
