"""PowerSGD: a gradient matrix is sent as the product of two thin matrices, which ranks can sum directly.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
2019, algorithms 1 and 2 (with warm start and error feedback).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.parallel.compression.error_feedback import CompressedBucket, GradientAverage, LeftOut, lack
from phalanx.parallel.compression.exchange import Wire
from phalanx.parallel.grad_reduce import spread


class PowerSGD(GradientAverage):
    """One step of subspace iteration a training step, begun from the last Q.

    Gradients of one dimension, and matrices whose P and Q would be no smaller, are sent whole.
    """

    def __init__(self, rank: int, wire: Wire, parameters: Mapping[str, Tensor]) -> None:
        self._wire = wire
        ranks = {name: rank for name, tensor in parameters.items() if _pays(tensor.shape, rank)}
        self._left_out = LeftOut({name: parameters[name] for name in ranks})
        self._q_MR = {name: _random(name, parameters[name], rank) for name in ranks}

    def __call__(self, bucket: CompressedBucket) -> None:
        wire = self._wire
        if wire.size == 1:
            return
        wire.traffic.count_uncompressed(bucket.flat.numel(), wire.size)
        matrices, plain = dict[str, Tensor](), list[Tensor]()
        pieces = bucket.flat.split([shape.numel() for shape in bucket.shapes])
        for name, piece in zip(bucket.names, pieces, strict=True):
            if name in self._q_MR:
                matrices[name] = piece.view(-1, self._q_MR[name].shape[0])
            else:
                plain.append(piece)
        for name, matrix_NM in matrices.items():
            matrix_NM.add_(self._left_out[name].view(matrix_NM.shape))
        p_NR = {name: matrix_NM @ self._q_MR[name] for name, matrix_NM in matrices.items()}
        self._average([*p_NR.values(), *plain])
        p_NR = {name: torch.linalg.qr(p).Q for name, p in p_NR.items()}  # columns of length 1, also where P has fewer
        q_MR = {name: matrix_NM.T @ p_NR[name] for name, matrix_NM in matrices.items()}
        self._average(list(q_MR.values()))
        for name, matrix_NM in matrices.items():
            self._read(name, matrix_NM, p_NR[name], q_MR[name])

    def _read(self, name: str, matrix_NM: Tensor, p_NR: Tensor, q_MR: Tensor) -> None:
        sent_NM = p_NR @ q_MR.T
        self._q_MR[name] = torch.where(q_MR.isfinite().all(), q_MR, self._q_MR[name])
        lack(matrix_NM.view(-1), sent_NM.view(-1), self._left_out[name].view(-1))
        matrix_NM.copy_(sent_NM)

    def scale(self, factor: float) -> None:
        self._left_out.scale(factor)

    def stored(self) -> list[Tensor]:
        return [*self._left_out.stored(), *self._q_MR.values()]

    def tensors(self) -> dict[str, Tensor]:
        left_out = {f"left_out.{name}": tensor for name, tensor in self._left_out.shared(self._wire).items()}
        return left_out | {f"q.{name}": tensor for name, tensor in self._q_MR.items()}

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._wire.all_reduce(flat)
        flat.div_(self._wire.size)
        spread(tensors, flat)


def _pays(shape: torch.Size, rank: int) -> bool:
    if len(shape) < 2 or not shape.numel():
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return rank * (rows + columns) < rows * columns


def _random(name: str, parameter: Tensor, rank: int) -> Tensor:
    columns = parameter.numel() // parameter.shape[0]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(columns, rank, generator=generator).to(parameter.device)
