"""Activations shared out along their tokens: context parallelism, and sequence parallelism beside tensor parallelism.

The hidden states are sliced along the tokens at the first repeated block, and stay so to the loss. Each rank embeds all
tokens, which is cheap, and computes only its own from there on; only attention communicates (and, under ``tp``,
products with split weights). Positions, masks and rotary tables are whole and are sliced when they meet the hidden
states, so that every token keeps its own, and the loss adds up over the ranks by tokens.

With causal attention a rank holds an early and a late run of tokens, so that every rank has as many pairs to attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from phalanx.parallel.local_shards import Axis, Cut, Placed, Sliced, is_sliced
from phalanx.parallel.local_shards.axis import taken
from phalanx.parallel.local_shards.tensor import local_of
from phalanx.parallel.tensor.find_pairs import Model
from phalanx.parallel.tensor.trial import Trial, fixed, places_of, shown_as_slices


@dataclass(frozen=True, slots=True)
class Entrance:
    """The argument of a block that holds its hidden states."""

    leaf: int  # which of the tensors among its arguments, in order
    dim: int  # its dimension of tokens
    causal: bool  # whether a token attends to earlier ones only


def entrances(model: Model, ranks: int) -> dict[str, Entrance]:
    """Return the blocks that attend over tokens, by name, for a model that has run dry; empty without attention."""
    names = {child: name for name, child in model.module.named_modules()}
    found: dict[str, Entrance] = {}
    known: dict[Any, Entrance | None] = {}
    for block, call in model.calls.items():
        key = (type(block), tuple((name, tuple(tensor.shape)) for name, tensor in block.named_parameters()))
        if key not in known:
            known[key] = _entrance(block, call, ranks)
        entrance = known[key]
        if entrance is not None:
            found[names[block]] = entrance
    return found


def _entrance(block: nn.Module, call: Any, ranks: int) -> Entrance | None:
    leaves, structure = tree_flatten(call)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2:
            continue
        for dim in range(leaf.dim() - 1):
            trial = Trial()
            axis = Axis("dry", size=ranks, rank=0, group=None, sums=True, trial=trial)
            cut = Cut.even(leaf.shape[dim], ranks)
            entering = Sliced(taken(leaf, dim, cut, axis), [Placed(axis, dim, cut)])
            args, kwargs = tree_unflatten([*leaves[:index], entering, *leaves[index + 1 :]], structure)
            try:
                result = block(*args, **kwargs)
            except Exception:  # what the block cannot do with tokens sliced so
                continue
            if trial.tokens and _sliced_like(result, entering):
                return Entrance(index, dim, trial.causal)
        return None  # hidden states are the first
    return None


def _sliced_like(result: Any, entering: Sliced) -> bool:
    first = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
    return is_sliced(first) and first.shape == entering.shape and first.placed == entering.placed


def added_late(model: Model, found: Mapping[str, Entrance], cuts: Mapping[str, tuple[int, Cut]]) -> list[str]:
    """Return names of parameters that each rank reads for its own tokens only, under sequence parallelism.

    Their gradients (of normalisations, and of biases after a sum) are parts, to be added up over ``tp`` once a step.
    ``cuts`` are those of the weights.
    """
    trial = Trial()
    ranks = next(iter(cuts.values()))[1].ranks
    axis = Axis("dry", size=ranks, rank=0, group=None, tokens=True, trial=trial)
    module = model.module
    blocks, tensors = dict(module.named_modules()), dict(module.named_parameters())
    ways = {id(tensors[name]): (Placed(axis, dim, cut),) for name, (dim, cut) in cuts.items()}
    entering = {blocks[name]: _entering(blocks[name].forward, one, axis) for name, one in found.items()}
    with shown_as_slices(places_of(module, ways)), fixed(entering):
        model.run()
    return [name for name, tensor in tensors.items() if id(tensor) in trial.late]


def share_out_tokens(module: nn.Module, found: Mapping[str, Entrance], axis: Axis) -> None:
    """Slice the inputs of these blocks along ``axis``, unless they are sliced already."""
    blocks = dict(module.named_modules())
    for name, entrance in found.items():
        block = blocks[name]
        block.forward = _entering(block.forward, entrance, axis)


def open_for_hooks(module: nn.Module, found: Iterable[str]) -> None:
    """Pass plain tensors to earlier hooks on these blocks, such as FSDP's.

    Such hooks put autograd functions around the inputs, which sliced tensors do not pass.
    """
    blocks = dict(module.named_modules())
    for name in found:
        blocks[name].register_forward_pre_hook(_pack, with_kwargs=True, prepend=True)


_PLACED = "_placed"


def _pack(_: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    placed = {index: leaf.placed for index, leaf in enumerate(leaves) if is_sliced(leaf)}
    args, kwargs = tree_unflatten([local_of(leaf) for leaf in leaves], structure)
    return args, {**kwargs, _PLACED: placed}


def unpacked(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Restore the sliced arguments that hooks saw as plain tensors; others are unchanged."""
    placed = kwargs.pop(_PLACED, None)
    if not placed:
        return args, kwargs
    leaves, structure = tree_flatten((args, kwargs))
    for index, where in placed.items():
        leaves[index] = Sliced(leaves[index], where)
    return tree_unflatten(leaves, structure)


def _entering(forward: Callable[..., Any], entrance: Entrance, axis: Axis) -> Callable[..., Any]:
    def entered(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten(unpacked(args, kwargs))
        tensor = leaves[entrance.leaf]
        # At every block: other micro-batches, other stacks and second forwards of recompute lie between them.
        axis.length = tensor.shape[entrance.dim]
        if not (is_sliced(tensor) and tensor.on(axis)):
            leaves[entrance.leaf] = _taken(tensor, entrance, axis)
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return entered


def _taken(tensor: Tensor, entrance: Entrance, axis: Axis) -> Sliced:
    size = tensor.shape[entrance.dim]
    # Under tp every rank computes attention for all tokens of its heads: nothing to even out.
    cut = Cut.zigzag(size, axis.size) if entrance.causal and not axis.tokens else Cut.even(size, axis.size)
    placed = tensor.placed if is_sliced(tensor) else ()
    return Sliced(taken(local_of(tensor), entrance.dim, cut, axis), [*placed, Placed(axis, entrance.dim, cut)])
