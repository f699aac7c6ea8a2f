"""Windows of token files: which tokens and labels they hold, documents told apart, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.errors import SpecError

pytestmark = pytest.mark.quick


def rows(data: px.TokenFile, name: str) -> list[list[int]]:
    return [sample[name].tolist() for sample in data]


def test_windows_lie_within_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    np.arange(7, dtype="<u2").tofile(tmp_path / "a-1.bin")
    np.arange(10, 14, dtype="<u2").tofile(tmp_path / "a-0.bin")
    np.save(tmp_path / "b.npy", np.arange(20, 24, dtype=np.int32))
    data = px.TokenFile([tmp_path / "a-*.bin", tmp_path / "b.npy"], length=3)
    assert rows(data, "input_ids") == rows(data, "labels") == [[10, 11, 12], [0, 1, 2], [3, 4, 5], [20, 21, 22]]
    assert (len(data), data.tokens, data[-1]["input_ids"].dtype) == (4, 12, torch.int64)
    with pytest.raises(IndexError):
        data[4]


def test_next_tokens_as_labels(tmp_path: Path) -> None:
    np.arange(9, dtype="<u4").tofile(tmp_path / "a.bin")
    data = px.TokenFile(tmp_path / "a.bin", length=3, dtype="uint32", shifted=True)
    assert rows(data, "input_ids") == [[0, 1, 2], [3, 4, 5]]  # 6, 7, 8 lack the token after them
    assert rows(data, "labels") == [[1, 2, 3], [4, 5, 6]]


def test_bytes_at_the_begin_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x" * 1024 + np.arange(4, dtype="<u2").tobytes())
    assert rows(px.TokenFile(tmp_path / "a.bin", length=2, skip_bytes=1024), "input_ids") == [[0, 1], [2, 3]]


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
    assert rows(pickle.loads(copied), "input_ids") == rows(data, "input_ids")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda at: px.TokenFile(at / "none-*.bin", length=2), "where no file is"),
        (lambda at: px.TokenFile([], length=2), "an empty list"),
        (lambda at: px.TokenFile(at / "a.bin", length=8), "8, with 7 tokens in the largest file"),
        (lambda at: px.TokenFile(at / "a.bin", length=7, shifted=True), "with the token after each"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, dtype="uint32"), "a whole number of 4-byte tokens"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, dtype="float32"), "uint8, uint16, uint32"),
        (lambda at: px.TokenFile(at / "a.bin", length=0), "px.TokenFile.length: given 0"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, end_of_text=1, begin_of_text=2), "one of them"),
        (lambda at: px.TokenFile(at / "a.bin", length=2, skip_bytes=99), "99 of them skipped"),
        (lambda at: px.TokenFile(at / "b.npy", length=2), r"an array of float32 and shape \(2, 2\)"),
        (lambda at: px.TokenFile(at / "c.npy", length=2), "a file that can be read"),
    ],
)
def test_what_is_refused(made: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    np.arange(7, dtype="<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.zeros((2, 2), dtype=np.float32))
    (tmp_path / "c.npy").write_text("no array")
    with pytest.raises(SpecError, match=message):
        made(tmp_path)


@pytest.mark.parametrize("files", [5, None, [None], [5]])
def test_what_names_no_file_is_told(files: Any) -> None:
    with pytest.raises(SpecError, match=r"px\.TokenFile\.files"):
        px.TokenFile(files, length=4)


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
