"""Token files and their windows; steps that take samples until they come to so many tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from law_rows import in_one_test
from phalanx.data import Lane, Ledger, Loader, audit_run
from phalanx.data.loader import data_facts
from phalanx.data.sampler import Permutation
from phalanx.data.token_batches import TokenBatchSampler
from phalanx.errors import SpecError
from phalanx.parallel.assemble import check

pytestmark = pytest.mark.quick
LENGTHS = [5, 3, 9, 2, 7, 4, 26, 3, 6, 8]


def rows(count: int = len(LENGTHS)) -> px.Table:
    return px.Table(x=torch.zeros(count, 3))


def job(**how: Any) -> px.Job:
    made: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(3, 2),
        "data": rows,
        "loss": lambda output, batch: output.mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 8,
        "batch_tokens": px.TokenBatch(12, LENGTHS),
        "epochs": 2,
        **how,
    }
    return px.Job(**made)


def by_hand(lengths: list[int], tokens: int, most: int, epochs: int, order: Callable[[int], list[int]]) -> list[Any]:
    found: list[Any] = []
    for epoch in range(epochs):
        taken: list[int] = []
        for index in order(epoch):
            taken.append(index)
            if sum(lengths[one] for one in taken) >= tokens or len(taken) == most:
                found.append((epoch, taken))
                taken = []
        found += [(epoch, taken)] if taken else []
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_every_step_is_where_adding_up_comes_to(lengths: list[int], tokens: int, most: int, shuffle: bool) -> None:
    given, size = job(batch=most, batch_tokens=px.TokenBatch(tokens, lengths), shuffle=shuffle), len(lengths)

    def order(epoch: int) -> list[int]:
        return Permutation.keyed(size, 0, epoch)(np.arange(size)).tolist() if shuffle else list(range(size))

    must = by_hand(lengths, tokens, most, 4, order)
    sampler = TokenBatchSampler(given, size)
    assert sampler.steps_of(4) == len(must)
    assert [(epoch, ids.tolist()) for _, epoch, ids in sampler.walk(0, len(must))] == must
    anew = TokenBatchSampler(given, size)  # the last first, as who goes on
    for step in reversed(range(len(must))):
        assert (anew.epoch_of(step), anew.ids(step).tolist()) == must[step]
        assert anew.samples(step) == len(must[step][1])


def test_a_sampler_says_the_order_and_may_repeat() -> None:
    given = job(sampler=px.Sampler(lambda seed, epoch: [6, 0, 0, 9, 1], repeats=True))
    assert [ids.tolist() for *_, ids in TokenBatchSampler(given, 10).walk(0, 3)] == [[6], [0, 0, 9], [1]]


@in_one_test(
    ("how", "words"),
    [
        ({"batch_tokens": 8192}, "8192; allowed: a px.TokenBatch, which has the lengths"),
        ({"batch_ramp": {0: 4, 9: 8}}, "batch_tokens and a batch_ramp"),
        ({"drop_last": True}, "drop_last=True with batch_tokens"),
        ({"sampler": px.buckets(LENGTHS)}, "px.buckets"),
        ({"schedule": px.Schedule(warmup_samples=40)}, "warm-up in samples with batch_tokens"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job(**how)


class Stream:
    def __iter__(self) -> Any:
        return iter([{"x": torch.zeros(3)}] * 10)


@in_one_test(
    ("data", "lengths", "words"),
    [
        (Stream(), LENGTHS, "batch_tokens with a Stream"),
        (px.Curriculum({0: rows(), 5: rows()}), LENGTHS * 2, "batch_tokens with a Curriculum"),
        (rows(), LENGTHS[1:], "9 lengths; allowed: one for each of the 10 samples"),
        (rows(), [*LENGTHS[:9], 2.5], "2.5 at place 9"),
        (rows(), [*LENGTHS[:9], -1], "-1.0 at place 9"),
        (rows(), ["a"] * 10, "whole numbers, 0 or more"),
    ],
)
def test_data_that_do_not_go_with_it_are_refused(data: Any, lengths: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Loader(data, job(steps=3, epochs=None, batch_tokens=px.TokenBatch(12, lengths)), Lane(), micro=None)


def test_shares_by_speed_are_refused() -> None:
    assert any("shares=auto with batch_tokens" in one.given for one in check(job(), px.Plan.parse("dp=2 shares=auto")))
    assert not check(job(), px.Plan.parse("dp=2 shares=3,1"))


LAST = TokenBatchSampler(job(), 10).steps_of(2) - 1


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("", lambda step, ids: ids),
        ("never seen", lambda step, ids: ids[1:] if step == 1 else ids),
        ("never seen", lambda step, ids: ids[1:] if step == LAST - 1 else ids),
        ("seen more than once", lambda step, ids: [*ids, *ids[:1]] if step == 1 else ids),
        ("step 2 is missing", lambda step, ids: [] if step == 2 else ids),
        ("beyond the 10 samples", lambda step, ids: [one + 10 for one in ids] if step == 1 else ids),
        ("12 samples instead of 1 to 8", lambda step, ids: range(12) if step == 1 else ids),
    ],
)
def test_a_ledger_with_a_fault(words: str, change: Callable[[int, Any], Any], tmp_path: Path) -> None:
    loader = Loader(rows(), job(), Lane(), micro=None)
    with Ledger(tmp_path, rank=0, first_step=0) as ledger:
        for batch in loader:
            if ids := tuple(change(batch.step, batch.parts[0][0].ids)):
                ledger.record(replace(batch, parts=((replace(batch.parts[0][0], ids=ids, samples=len(ids)),),)))
    length = {"whole_epochs": True, "total_steps": loader.total_steps}
    start = {"batch": 8, "batch_tokens": 12, "drop_last": False, **length, **data_facts(loader)}
    found = audit_run(tmp_path, start)
    assert any(words in one for one in found) if words else found == []


def windows(data: px.TokenFile, name: str) -> list[list[int]]:
    return [sample[name].tolist() for sample in data]


def test_windows_lie_within_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    np.arange(7, dtype="<u2").tofile(tmp_path / "a-1.bin")
    np.arange(10, 14, dtype="<u2").tofile(tmp_path / "a-0.bin")
    np.save(tmp_path / "b.npy", np.arange(20, 24, dtype=np.int32))
    data = px.TokenFile([tmp_path / "a-*.bin", tmp_path / "b.npy"], length=3)
    assert windows(data, "input_ids") == windows(data, "labels") == [[10, 11, 12], [0, 1, 2], [3, 4, 5], [20, 21, 22]]
    assert (len(data), data.tokens, data[-1]["input_ids"].dtype) == (4, 12, torch.int64)
    with pytest.raises(IndexError):
        data[4]


def test_next_tokens_as_labels(tmp_path: Path) -> None:
    np.arange(9, dtype="<u4").tofile(tmp_path / "a.bin")
    data = px.TokenFile(tmp_path / "a.bin", length=3, dtype="uint32", shifted=True)
    assert windows(data, "input_ids") == [[0, 1, 2], [3, 4, 5]]  # 6, 7, 8 lack the token after them
    assert windows(data, "labels") == [[1, 2, 3], [4, 5, 6]]


def test_bytes_at_the_begin_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x" * 1024 + np.arange(4, dtype="<u2").tobytes())
    assert windows(px.TokenFile(tmp_path / "a.bin", length=2, skip_bytes=1024), "input_ids") == [[0, 1], [2, 3]]


def test_documents_are_told_apart_by_their_last_token_or_their_first(tmp_path: Path) -> None:
    np.array([5, 0, 6, 7, 0, 0, 8, 9], dtype="<u2").tofile(tmp_path / "a.bin")
    ended = px.TokenFile(tmp_path / "a.bin", length=8, end_of_text=0)[0]
    assert ended["document_ids"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert ended["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert ended["labels"].tolist() == [5, 0, -100, 7, 0, -100, -100, 9]
    begun = px.TokenFile(tmp_path / "a.bin", length=8, begin_of_text=0)[0]
    assert begun["document_ids"].tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert begun["position_ids"].tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert begun["labels"].tolist() == [5, -100, 6, 7, -100, -100, 8, 9]
    shifted = px.TokenFile(tmp_path / "a.bin", length=7, shifted=True, end_of_text=0)[0]
    assert shifted["labels"].tolist() == [0, -100, 7, 0, -100, -100, 9]
    mask = px.document_mask(ended["document_ids"][None])
    assert mask.shape == (1, 1, 8, 8)
    assert mask[0, 0].nonzero()[:6].tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 2], [3, 3]]


def test_transformers_keep_documents_apart_by_positions(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    np.array([5, 3, 0, 6, 7, 2, 0, 8], dtype="<u2").tofile(tmp_path / "a.bin")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, use_cache=False, **sizes))
    window = px.TokenFile(tmp_path / "a.bin", length=8, end_of_text=0)[0]
    packed = model(window["input_ids"][None], position_ids=window["position_ids"][None]).logits[0]
    alone = [model(part[None]).logits[0] for part in window["input_ids"].split([3, 4, 1])]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_a_copy_reads_for_itself_and_holds_no_tokens(tmp_path: Path) -> None:
    np.arange(60_000, dtype="<u2").tofile(tmp_path / "a.bin")
    data = px.TokenFile(tmp_path / "a.bin", length=100)
    copied = pickle.dumps(data)
    assert len(copied) < 2000
    assert windows(pickle.loads(copied), "input_ids") == windows(data, "input_ids")


@in_one_test(
    ("made", "message"),
    [
        (lambda at: px.TokenFile([], length=2), "an empty list"),
        (lambda at: px.TokenFile(at / "a.bin", length=8), "8, with 7 tokens in the largest file"),
        (lambda at: px.TokenFile(at / "a.bin", length=7, shifted=True), "with the token after each"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, dtype="uint32"), "a whole number of 4-byte tokens"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, dtype="float32"), "uint8, uint16, uint32"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, end_of_text=1, begin_of_text=2), "one of them"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, skip_bytes=99), "99 of them skipped"),
        (lambda at: px.TokenFile(at / "b.npy", length=2), r"an array of float32 and shape \(2, 2\)"),
        (lambda at: px.TokenFile(at / "c.npy", length=2), "a file that can be read"),
    ],
)
def test_what_is_no_token_file_is_refused(made: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    np.arange(7, dtype="<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.zeros((2, 2), dtype=np.float32))
    (tmp_path / "c.npy").write_text("no array")
    with pytest.raises(SpecError, match=message):
        made(tmp_path)


def test_files_that_hold_no_tokens_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.arange(3))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    (tmp_path / "folder").mkdir()
    np.arange(8, dtype="<u2").tofile(tmp_path / "tokens.bin")
    for name in ("empty.npy", "several.npy", "folder"):
        with pytest.raises(SpecError, match=r"px\.TokenFile\.files"):
            px.TokenFile(str(tmp_path / name), length=4)
    with pytest.raises(SpecError, match="twice"):
        px.TokenFile([str(tmp_path / "tokens.bin"), str(tmp_path / "*.bin")], length=4)
    with pytest.raises(SpecError, match="up to 65535"):
        px.TokenFile(str(tmp_path / "tokens.bin"), length=4, end_of_text=100257)
