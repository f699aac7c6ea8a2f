"""The learning rate follows the batch where the user asks, and nothing else."""

import inspect

import pytest

from phalanx.errors import SpecError
from phalanx.train import batch_scaling
from phalanx.train.batch_scaling import linear_scaling, scaling_offer


def test_rules():
    assert linear_scaling(0.1, batch=8192, base_batch=256) == pytest.approx(3.2)
    assert linear_scaling(1.0, batch=128, base_batch=256) == pytest.approx(0.5)


def test_offer_gives_the_line_to_copy_and_names_warmup():
    text = scaling_offer(256, 512)
    assert text is not None
    assert "--lr-scale 2\n" in text
    assert "--lr-scale 1.414\n" in text
    assert "warm-up" in text
    assert "stays the job's" in text


def test_offer_for_a_smaller_batch():
    text = scaling_offer(256, 64)
    assert text is not None
    assert "--lr-scale 0.25\n" in text
    assert "warm-up" in text


def test_no_offer_for_the_jobs_own_batch():
    assert scaling_offer(256, 256) is None


def test_nothing_takes_a_number_of_devices():
    names = {name for one in (linear_scaling, scaling_offer) for name in inspect.signature(one).parameters}
    assert names == {"lr", "batch", "base_batch", "job_batch", "given_batch"}
    assert "world_size" not in inspect.getsource(batch_scaling)


@pytest.mark.parametrize(
    "call",
    [
        lambda: scaling_offer(256, 0),
        lambda: linear_scaling(0.1, batch=2.5, base_batch=256),  # type: ignore[arg-type]
        lambda: linear_scaling(-0.1, batch=2, base_batch=1),
    ],
)
def test_wrong_values_are_named(call):
    with pytest.raises(SpecError):
        call()
