"""Operations that treat each element by itself: slices stay slices, without communication."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from phalanx.device_kinds import all_kinds
from phalanx.parallel.local_shards.tensor import RULES, Sliced, aligned, is_sliced, local_of, result
from phalanx.parallel.rng_streams import OwnStream

_NAMES = """
    add sub rsub mul div rdiv floor_divide remainder fmod pow rpow neg abs sign exp expm1 exp2 log log2 log10
    log1p sqrt rsqrt square reciprocal sin cos tan tanh sinh cosh asin acos atan atan2 sigmoid logsigmoid relu
    relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid hardshrink softplus softsign
    tanhshrink threshold erf erfc floor ceil round trunc frac clamp clip clamp_min clamp_max minimum maximum
    fmin fmax lerp addcmul addcdiv where masked_fill nan_to_num isnan isinf isfinite eq ne lt le gt ge
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not type_as float
    half bfloat16 double int long bool short clone contiguous detach zeros_like ones_like full_like empty_like
    pos positive sinc digamma lgamma copysign heaviside hypot xlogy logaddexp alias conj resolve_conj real
""".split()
_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout")


def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Align the operands and run on the local parts."""
    leaves, structure = tree_flatten((list(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    locals_, cuts = aligned(tensors)
    found = iter(locals_)
    args, kwargs = tree_unflatten([next(found) if isinstance(one, Tensor) else one for one in leaves], structure)
    return result(func(*args, **kwargs), cuts)


def in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Write the result into the first operand, if its slices are those of the result."""
    target = args[0]
    if not is_sliced(target):
        return NotImplemented
    others = [leaf for leaf in tree_flatten((list(args[1:]), kwargs))[0] if isinstance(leaf, Tensor)]
    _, cuts = aligned([target, *others])
    own = [(one.axis, one.dim - target.dim(), one.cut) for one in target.placed]
    if [(id(axis), dim) for axis, dim, _ in cuts] != [(id(axis), dim) for axis, dim, _ in own]:
        return NotImplemented
    elementwise(func, args, kwargs)
    return target


def converted(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``to`` with another tensor or a dtype: only the element type changes, or the device."""
    tensor, *rest = args
    if not is_sliced(tensor):  # plain.to(sliced): takes its dtype
        other = rest[0] if rest else kwargs.get("other")
        return tensor.to(other.local)
    kwargs = {name: local_of(value) for name, value in kwargs.items()}
    return Sliced(func(tensor.local, *map(local_of, rest), **kwargs), tensor.placed)


def dropped(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply dropout: every rank draws for its own slice, and all end with the same generator state."""
    tensor = args[0] if args else kwargs.get("input")
    if not is_sliced(tensor):
        return NotImplemented
    with OwnStream(tensor.local.device, [one.axis for one in tensor.placed]):
        return elementwise(func, args, kwargs)


for _name in _NAMES:
    RULES[_name] = elementwise
    RULES[_name + "_"] = in_place
for _name in _DROPS:
    RULES[_name] = dropped
RULES["to"] = converted
RULES |= {kind.torch_type: converted for kind in all_kinds()}  # methods of a tensor, such as ``cpu()``
