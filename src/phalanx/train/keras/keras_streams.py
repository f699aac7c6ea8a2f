"""Random numbers of Keras layers from torch's own streams, which plans keep.

Keras draws by seeds that each layer counts on: the same mask on every replica, and another one where a layer is
computed again for backward. From torch's stream replicas draw differently, and what is computed again is as it was.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras.src.backend.common import global_state
from keras.src.backend.torch import random as keras_random
from keras.src.random.seed_generator import SeedGenerator
from torch import Tensor

from phalanx.errors import RefusedError
from phalanx.train.keras.keras_own import DEVICE


def drawn_by_torch(generator: Any) -> None:
    """From now on what a layer draws by ``generator``, its own, comes from torch's stream."""
    generator.__dict__["_drawn_by_torch"] = True
    generator._initial_seed = None


_PLAIN: Callable[[Any], Any] = keras_random.torch_seed_generator
_PLAIN_DROPOUT: Callable[..., Any] = keras_random.dropout


def keep_streams() -> None:
    """From now on layers that are torch modules draw from torch's streams; everything else as before."""
    keras_random.torch_seed_generator = _generator
    keras_random.dropout = _dropout


def _dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    if noise_shape is None or _generator(seed) is not None or not 0 < rate < 1:
        return _PLAIN_DROPOUT(inputs, rate, noise_shape, seed)
    return masked(inputs, rate, noise_shape, True)


def masked(inputs: Tensor, rate: float, noise_shape: Any, training: bool) -> Tensor:
    """Dropout of ``inputs``, whose mask has ``noise_shape``; the same operations where nothing is dropped."""
    if noise_shape is None:
        return torch.nn.functional.dropout(inputs, rate, training=training)
    shape = [size if wanted is None else wanted for size, wanted in zip(inputs.shape, noise_shape, strict=True)]
    return inputs * torch.nn.functional.dropout(inputs.new_ones(shape), rate, training=training)


def _generator(seed: Any) -> Any:
    if isinstance(seed, SeedGenerator) and "_drawn_by_torch" in vars(seed):
        return None
    if isinstance(global_state.get_global_attribute(DEVICE), torch.device):  # a model that runs under a plan
        if seed is None:
            return None
        raise RefusedError.of(
            "job.model",
            f"a layer that draws random numbers by the seed {seed!r:.40} of its own each time it is called",
            "random numbers by a keras.random.SeedGenerator that the layer has: the plan keeps its stream",
            "self.seed_generator = keras.random.SeedGenerator(), and seed=self.seed_generator in call",
        )
    return _PLAIN(seed)
