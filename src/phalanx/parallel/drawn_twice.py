"""Refuses random numbers in what a model recomputes by itself, where several threads draw from one stream.

``torch.utils.checkpoint`` sets the stream of random numbers back to draw the same dropout again in backward. Where
other threads have drawn from that stream in between, it draws other masks than forward did, and the gradient belongs to
none of them; and what it sets back, the others draw a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from phalanx.errors import Problem, RefusedError
from phalanx.parallel.pipeline.flow import RANDOM


@contextmanager
def nothing_drawn_twice() -> Iterator[None]:
    """While inside, a checkpoint that sets the stream back may not draw from it, in any thread.

    Raises:
        RefusedError: where it does.
    """
    generator, function = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction
    forward = function.forward

    def checkpointed(run: Any, preserve: bool = True, *rest: Any, **kwargs: Any) -> Generator[None]:
        if not preserve:
            yield from generator(run, preserve, *rest, **kwargs)
            return
        with _Draws():
            yield from generator(run, preserve, *rest, **kwargs)

    def reentrant(ctx: Any, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        def looked_at(*given: Any) -> Any:
            with _Draws():
                return run(*given)

        return forward(ctx, looked_at if preserve else run, preserve, *args)

    with (
        patch.object(checkpointing, "_checkpoint_without_reentrant_generator", checkpointed),
        patch.object(function, "forward", staticmethod(reentrant)),
    ):
        yield


class _Draws(TorchFunctionMode):
    """Refuses what draws."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(getattr(func, "__name__", ""), args, kwargs):
            raise RefusedError(
                [
                    Problem(
                        where="plan.threads",
                        given="threads on a CPU, for a model that draws random numbers, such as dropout, in what "
                        "torch.utils.checkpoint computes a second time: threads share one stream, and it would draw "
                        "other numbers in backward than in forward",
                        allowed="processes, each with a stream of its own; or no dropout inside what is recomputed",
                        fix="dp=2",
                    )
                ]
            )
        return func(*args, **kwargs)


def _draws(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0
    if "dropout" in name and ("training" in kwargs or "p" in kwargs):
        return bool(kwargs.get("training", True)) and kwargs.get("p", 0.5) > 0.0
    return name in RANDOM
