"""Where a step stands: whether what a checkpoint holds is that of the last finished step, or can be made so.

Between two steps it is. While a step computes, forward may change buffers, such as running statistics; parameters and
optimizer state stay, since all that ranks exchange they exchange before the update. Once the update has begun nothing
can be saved until it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torch import nn

from phalanx.train.accidents import BufferCopies


@final
class StepBoundary:
    """Follows one training; told as it begins to compute, to update, and as it is done."""

    def __init__(self) -> None:
        self._stands: Literal["between", "computing", "updating"] = "between"
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._buffers: BufferCopies | None = None
        self._versions: list[int] = []

    def keep(self, modules: Sequence[nn.Module]) -> None:
        """From now on remember what a step that computes may change, to be able to go back."""
        self._modules, self._buffers = [*modules], BufferCopies()
        self._parameters = [parameter for module in modules for parameter in module.parameters()]

    def computes(self) -> None:
        """A step begins, and changes no parameter before it updates."""
        if self._buffers:
            self._buffers.take(self._modules)
            self._versions = self._parameter_versions()
        self._stands = "computing"

    def updates(self) -> None:
        """Parameters and optimizer state begin to change."""
        self._stands = "updating"

    def reached(self) -> None:
        """A step is finished."""
        self._stands = "between"

    def go_back(self) -> bool:
        """Undo what an unfinished step has changed. Returns whether all is now that of the last finished one."""
        if self._stands == "updating" or self._buffers is None:
            return False
        if self._stands == "computing":
            if self._versions != self._parameter_versions():
                return False  # the model's own code changes its parameters
            self._buffers.put_back()
            self._stands = "between"
        return True

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
