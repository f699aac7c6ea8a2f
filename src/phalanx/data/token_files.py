"""Files of token ids, read in windows: the usual form of tokenised text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self, final

import numpy as np
import torch

from phalanx.config.fields import is_whole
from phalanx.config.losses import IGNORED
from phalanx.data.dataset_facts import MapStyle
from phalanx.data.file_names import Names, file_paths
from phalanx.data.part_index import PartIndex
from phalanx.errors import Problem, SpecError

_EXAMPLE = 'px.TokenFile("train-*.bin", length=1024)'
_TYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")


@final
@dataclass(frozen=True, eq=False)
class TokenFile(MapStyle):
    """A map-style dataset of the windows of ``length`` tokens in files of token ids, one after another.

    A sample is a dict of int64 tensors of shape (length,): ``input_ids``, and ``labels``, which are equal to them:
    models of ``transformers`` and ``px.next_token_loss`` compare each position with the label after it. With
    ``shifted`` the label of a position is the token after it, for losses that compare position by position, such as
    ``px.cross_entropy(logits, batch["labels"])``.

    Windows do not overlap and do not go over the end of a file. Tokens after the last whole window of a file are not
    read. With ``shifted`` the last label of a window is the first token of the next one.

    Where ``end_of_text`` or ``begin_of_text`` tells documents apart, a sample has two entries more: ``document_ids``, 0
    for the first document in the window, 1 for the next and so on; and ``position_ids``, 0 at the first token of each
    document. A label that would be predicted from the document before it is -100, which losses leave out. Of a document
    that windows cut, each part counts as a document of its own.

    Files are read a window at a time, and nothing of them is kept: a copy in another process reads for itself.

    Attributes:
        files: a file, a pattern such as ``train-*.bin``, whose files are taken in the order of their names, or a list
            of files and patterns. A name that ends in ``.npy`` is an array of one dimension as numpy saves it; any
            other file holds token ids alone, little-endian.
        length: tokens in a window.
        dtype: of token ids in files other than ``.npy``: uint8, uint16, uint32, int16, int32, int64.
        shifted: whether labels are the next tokens.
        end_of_text: the token that is the last of each document.
        begin_of_text: the token that is the first of each document, where there is no ``end_of_text``.
        skip_bytes: bytes at the begin of each file other than ``.npy`` that are no tokens (1024 in files of llm.c).

    Raises:
        SpecError: if an option is wrong, a file is not there or holds something else, or all files hold no window.
    """

    files: Names
    _: KW_ONLY
    length: int
    dtype: str = "uint16"
    shifted: bool = False
    end_of_text: int | None = None
    begin_of_text: int | None = None
    skip_bytes: int = 0
    _parts: tuple[_FilePart, ...] = field(init=False, repr=False)
    _index: PartIndex = field(init=False, repr=False)  # of windows in files

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise SpecError(problems)
        paths = file_paths(self.files, "px.TokenFile.files", _EXAMPLE)
        parts = tuple(_FilePart.of(path, np.dtype(self.dtype), self.skip_bytes) for path in paths)
        windows = [max(0, part.tokens - self.shifted) // self.length for part in parts]
        if not sum(windows):
            given = f"{self.length}, with {max(part.tokens for part in parts)} tokens in the largest file"
            allowed = "windows that fit into a file" + ", with the token after each" * self.shifted
            raise SpecError.of("px.TokenFile.length", given, allowed, "length=128")
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_index", PartIndex(windows, "window"))

    @property
    def tokens(self) -> int:
        """Return the tokens in all windows."""
        return len(self) * self.length

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the window ``index``, 0 is the first of the first file.

        Raises:
            IndexError: if there is no such window.
        """
        number, place = self._index.locate(index, from_end=True)
        tokens = torch.from_numpy(self._parts[number].read(place * self.length, self.length + self.shifted))
        sample = {"input_ids": tokens[: self.length].clone(), "labels": tokens[self.shifted :].clone()}
        if self.end_of_text is None and self.begin_of_text is None:
            return sample
        begins = _document_begins(tokens, self.end_of_text, self.begin_of_text)
        sample["labels"][begins[self.shifted :]] = IGNORED
        return sample | _places(begins[: self.length])


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the mask of causal attention within documents, for ``attn_mask`` of ``scaled_dot_product_attention``.

    Args:
        document_ids: (B, T), from a ``px.TokenFile``.

    Returns:
        Bool (B, 1, T, T): True if position t attends to position s: itself and earlier ones in its own document.
    """
    length = document_ids.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return ((document_ids[:, :, None] == document_ids[:, None, :]) & causal)[:, None]


def _document_begins(tokens: torch.Tensor, end: int | None, begin: int | None) -> torch.Tensor:
    found = torch.zeros(len(tokens), dtype=torch.bool)
    found[1:] = tokens[:-1] == end if end is not None else tokens[1:] == begin
    return found


def _places(begins: torch.Tensor) -> dict[str, torch.Tensor]:
    every = torch.arange(len(begins))
    of_document = torch.where(begins, every, 0).cummax(0).values
    return {"document_ids": begins.cumsum(0), "position_ids": every - of_document}


@dataclass(frozen=True, slots=True)
class _FilePart:
    """One file of tokens, with ``offset`` bytes before the first."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    tokens: int

    @classmethod
    def of(cls, path: str, dtype: np.dtype[Any], skip: int) -> Self:
        try:
            if path.endswith(".npy"):
                return cls(path, *_saved_by_numpy(path))
            size = os.path.getsize(path) - skip
        except (OSError, ValueError, EOFError) as error:
            raise _file_problem(f"{path}: {error}", "a file that can be read") from error
        if size < 0 or size % dtype.itemsize:
            given = f"{path} of {size + skip} bytes, {skip} of them skipped"
            raise _file_problem(given, f"a whole number of {dtype.itemsize}-byte tokens", "dtype", 'dtype="uint32"')
        return cls(path, dtype.newbyteorder("<"), skip, size // dtype.itemsize)

    def read(self, begin: int, count: int) -> np.ndarray:
        at = self.offset + begin * self.dtype.itemsize
        tokens = np.fromfile(self.path, dtype=self.dtype, count=count, offset=at)
        if len(tokens) < count:
            raise OSError(f"{self.path} has become shorter since the run began")
        return tokens.astype(np.int64)


def _saved_by_numpy(path: str) -> tuple[np.dtype[Any], int, int]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.memmap):
        raise _file_problem(f"{path}, which holds no single array", "an array as numpy.save writes it")
    if array.ndim != 1 or array.dtype.name not in _TYPES:
        given = f"{path}, an array of {array.dtype} and shape {array.shape}"
        raise _file_problem(given, f"an array of one dimension and {_listed(_TYPES)}")
    return array.dtype, int(array.offset), len(array)


def _file_problem(given: str, allowed: str, name: str = "files", fix: str = _EXAMPLE) -> SpecError:
    return SpecError.of(f"px.TokenFile.{name}", given, allowed, fix)


def _problems(file: TokenFile) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(file, name))
        found.append(Problem(where=f"px.TokenFile.{name}", given=given, allowed=allowed, fix=fix))

    if not is_whole(file.length, 1):
        wrong("length", "a whole number of tokens, 1 or more", "length=1024")
    if file.dtype not in _TYPES:
        wrong("dtype", _listed(_TYPES), 'dtype="uint16"')
    if not isinstance(file.shifted, bool):
        wrong("shifted", "True or False", "shifted=True")
    if not is_whole(file.skip_bytes, 0):
        wrong("skip_bytes", "a whole number of bytes, 0 or more", "skip_bytes=1024")
    for name in ("end_of_text", "begin_of_text"):
        if getattr(file, name) is not None and not is_whole(getattr(file, name), 0):
            wrong(name, "a token id, or None", f"{name}=tokenizer.eos_token_id")
        elif (
            getattr(file, name) is not None and file.dtype in _TYPES and getattr(file, name) > np.iinfo(file.dtype).max
        ):
            wrong(name, f"a token that {file.dtype} can hold, up to {np.iinfo(file.dtype).max}", 'dtype="uint32"')
    if file.end_of_text is not None and file.begin_of_text is not None:
        wrong(
            "begin_of_text", "None where end_of_text is given: one of them tells documents apart", "begin_of_text=None"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
