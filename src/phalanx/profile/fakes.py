"""A model on fake tensors: runs without computing or holding anything, to see what it does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from phalanx.profile.forms import Forms


class Values:
    """Stand-ins are copies with values, so that a model whose shapes depend on them runs; they are computed."""

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Mode = FakeTensorMode | Forms | Values
"""What stand-ins are: fakes with a device of their own, tensors of the meta device, or copies."""


def fake(mode: Mode, tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A fake of ``tensor``; one on the meta device becomes a fake of the CPU, as the model will be.

    With ``dtype`` a tensor of fp32 becomes one of that type.
    """
    if isinstance(mode, Values):
        return _copied(tensor)
    target = device or (torch.device("cpu") if tensor.device.type == "meta" else tensor.device)
    kind = dtype if dtype is not None and tensor.dtype == torch.float32 else tensor.dtype
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
    made = FakeTensor(mode, meta, target) if isinstance(mode, FakeTensorMode) else meta
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _copied(tensor: Tensor) -> Tensor:
    """A copy; of what has no values small random ones."""
    if tensor.device.type == "meta":
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        made = made.normal_(std=0.02) if made.is_floating_point() else made
    else:
        made = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` of another shape, with its own values again and again, or fewer of them."""
    times = [-(-wanted // max(have, 1)) for wanted, have in zip(shape, tensor.shape, strict=True)]
    more = tensor.detach().repeat(*times) if times else tensor.detach()
    return more[tuple(slice(0, wanted) for wanted in shape)].clone()


def fakes(mode: FakeTensorMode, value: Any) -> Any:
    """``value`` with a fake in place of every tensor in it."""
    return tree_map(lambda leaf: fake(mode, leaf) if isinstance(leaf, Tensor) else leaf, value)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own report of what could not run on fakes: who asks gets the error, and may have another way."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def faked(module: nn.Module, mode: Mode, dtype: torch.dtype | None = None) -> Iterator[dict[int, nn.Parameter]]:
    """``module`` with fakes in place of its parameters and buffers, inside the mode; afterwards as it was.

    Gives id of the fake → the parameter it stands for. A parameter that is used in two places is one fake. With
    ``dtype`` parameters of fp32 are of that type.
    """
    stand_ins: dict[int, Tensor] = {}
    meant: dict[int, nn.Parameter] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            kept.append((table, dict(table)))
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    stand_ins[id(tensor)] = fake(
                        mode, tensor, dtype=dtype if isinstance(tensor, nn.Parameter) else None
                    )
                    if isinstance(tensor, nn.Parameter):
                        meant[id(stand_ins[id(tensor)])] = tensor
                table[name] = stand_ins[id(tensor)]  # pyright: ignore[reportArgumentType]
    try:
        with mode:
            yield meant
    finally:
        for table, before in kept:
            table.update(before)
