"""Codecs of gradients (errors, feedback, numbers that are not finite), and fragments of a model."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from phalanx.parallel.compression import Codec, Feedback, codec, lane, message, read
from phalanx.parallel.compression.error_feedback import CompressedBucket, LeftOut

ALL = ("fp16", "bf16", "int8", "topk:0.01", "topk:0.3")
COUNTS = (0, 1, 255, 256, 257, 70_001)


def made(text: str) -> Codec:
    found = codec(text)
    assert found is not None
    return found


def through(one: Codec, flat: Tensor) -> Tensor:
    out = torch.full_like(flat, 7.0)
    read(one, message(one, flat), out)
    return out


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("text", ALL)
def test_a_message_has_the_stated_size_and_can_be_added(text: str) -> None:
    one = made(text)
    for count in COUNTS:
        flat = numbers(count)
        parts = one.encode(flat)
        assert [(part.numel(), part.dtype) for part in parts] == one.sizes(count)
        assert all(part.is_contiguous() for part in parts)
        sent = message(one, flat)
        assert (sent.dtype, sent.numel()) == (torch.uint8, one.bytes_of(count))
        out, twice = through(one, flat), torch.zeros(count)
        for _ in range(2):
            read(one, sent, twice, add=True)
        assert torch.allclose(twice, 2 * out)
        with pytest.raises(ValueError, match="bytes"):
            read(one, sent, torch.zeros(count + 300))
    assert not through(one, torch.zeros(600)).any()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_int8_is_off_by_half_a_level_of_its_block(scale: float) -> None:
    flat = numbers(1000) * scale
    flat[256:512] *= 1e-3
    off = (through(made("int8"), flat) - flat).abs()
    for begin in range(0, 1000, 256):
        block = slice(begin, begin + 256)
        assert off[block].max() <= flat[block].abs().max() / 254 * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1.0, 1e37])
def test_halves_are_off_by_their_last_bit_whatever_the_size(scale: float) -> None:
    flat = numbers(1000) * scale
    for text, last in (("fp16", 2**-11), ("bf16", 2**-8)):
        off = (through(made(text), flat) - flat).abs()
        assert (off <= flat.abs() * last + flat.abs().max() * 2**-39).all()


@pytest.mark.parametrize(("count", "share"), [(1, 0.001), (10, 0.5), (1000, 0.001), (1000, 1.0), (2**17 + 3, 0.01)])
def test_topk_sends_exactly_the_largest(count: int, share: float) -> None:
    flat = numbers(count)
    out = through(made(f"topk:{share}"), flat)
    kept = max(1, round(share * count))
    assert out.count_nonzero() == kept
    assert torch.equal(out[out != 0], flat[out != 0])
    if kept < count:
        assert flat[out == 0].abs().max() <= out[out != 0].abs().min()


@pytest.mark.parametrize("text", ALL)
def test_what_is_not_finite_is_not_missed(text: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        for count in (300, 2**17):
            flat = numbers(count)
            flat[299] = bad
            assert not through(made(text), flat)[299].isfinite(), (bad, count)


@pytest.mark.parametrize("text", ALL)
def test_what_is_left_out_comes_later(text: str) -> None:
    feedback = Feedback(made(text))
    given, sent, out = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for step in range(20):
        flat = numbers(1000, step)
        message_sent = feedback.message(flat)
        assert torch.equal(flat, numbers(1000, step))
        read(feedback.codec, message_sent, out)
        given += flat
        sent += out
    assert feedback.left_out is not None
    assert torch.allclose(given - feedback.left_out, sent, atol=1e-4)


@pytest.mark.parametrize("text", ALL)
def test_a_skipped_step_does_not_poison_what_is_left_out(text: str) -> None:
    feedback = Feedback(made(text))
    feedback.message(numbers(1000))
    bad = numbers(1000, 1)
    bad[3], bad[700] = float("nan"), float("inf")
    assert feedback.left_out is not None
    before = feedback.left_out.clone()
    feedback.message(bad)
    assert feedback.left_out.isfinite().all()
    assert torch.equal(feedback.left_out[[3, 700]], before[[3, 700]])
    feedback.message(torch.full((1000,), float("nan")))
    assert feedback.left_out.isfinite().all()


def test_what_is_left_out_follows_its_parameters_into_other_buckets() -> None:
    shapes = {"a": torch.Size((2, 3)), "b": torch.Size((4,)), "c": torch.Size(())}
    left_out = LeftOut({name: torch.zeros(shape) for name, shape in shapes.items()})

    def bucket(*names: str) -> CompressedBucket:
        sizes = tuple(shapes[name] for name in names)
        return CompressedBucket(names=names, shapes=sizes, flat=torch.zeros(sum(size.numel() for size in sizes)))

    left_out.of(bucket("a", "b")).copy_(torch.arange(10.0))
    left_out.of(bucket("c")).fill_(10.0)
    assert left_out.of(bucket("c", "b")).tolist() == [10, 6, 7, 8, 9]
    assert left_out.of(bucket("a")).tolist() == [0, 1, 2, 3, 4, 5]
    left_out.of(bucket("a")).add_(1)
    assert left_out["a"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_exchanges_run_one_after_another_and_tell_of_errors() -> None:
    seen: list[int] = []
    one = lane(torch.device("cpu"))

    def exchange(index: int) -> Tensor:
        seen.append(index)
        if index == 3:
            raise ValueError("three")
        return torch.tensor(index)

    futures = [one.start(lambda index=index: exchange(index)) for index in range(6)]
    assert [int(futures[index].wait()) for index in (5, 0)] == [5, 0]
    assert seen == list(range(6))
    with pytest.raises(ValueError, match="three"):
        futures[3].wait()
    one.close()
    assert int(one.start(lambda: exchange(7)).wait()) == 7
    del one
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "exchanges":
            thread.join(5)
    assert not [thread for thread in threading.enumerate() if thread.name == "exchanges"]
