"""The data of Keras' ``fit`` as data of a job: arrays, ``PyDataset`` and ``tf.data``.

A batch is a dict of columns: ``x``, ``y`` and ``weight``, and of nested ones ``x/left`` or ``x/#0``, ``#0`` being the
first of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset

from phalanx.data import Table
from phalanx.data.dataset_facts import DrawsTogether
from phalanx.data.sampler import EpochSeeds
from phalanx.errors import SpecError

_EXAMPLE = "data=(x, y)"


def columns(x: Any, y: Any = None, weight: Any = None) -> dict[str, torch.Tensor]:
    """Map name to tensor for Keras's arguments; floating point numbers in Keras' ``floatx``."""
    found: dict[str, torch.Tensor] = {}
    for name, given in (("x", x), ("y", y), ("weight", weight)):
        if given is not None:
            found |= dict(_flat(name, given))
    return found


def rows_of(batch: Mapping[str, Any], name: str) -> Any:
    """Return the part ``name`` of a batch, in its original structure, or ``None``."""
    if name in batch:
        return batch[name]
    inside = {key.removeprefix(name + "/"): value for key, value in batch.items() if key.startswith(name + "/")}
    if not inside:
        return None
    first = list(dict.fromkeys(key.partition("/")[0] for key in inside))
    parts = {key: rows_of(inside, key) for key in first}
    return list(parts.values()) if first[0].startswith("#") else parts


class KerasData:
    """The ``Job.data`` for an argument of ``fit``, or for a function that returns one.

    Args:
        given: as of ``px.from_keras``.
        batch: the global batch, in samples.
        class_weight: class → the weight of its samples.
    """

    def __init__(self, given: Any, batch: int, class_weight: Mapping[int, float] | None = None) -> None:
        self._given, self._batch, self._class_weight = given, batch, class_weight
        self._made: Any = None

    def __call__(self) -> Any:
        """Return the dataset.

        Raises:
            SpecError: it is TensorFlow's and was made here: threads it has begun are missing in forked workers.
        """
        if self._made is None:
            if type(self._given).__module__.startswith("tensorflow."):
                given = f"a tf.data.Dataset, {type(self._given).__name__}, made before workers start"
                allowed = "a function that makes it, which each process calls: TensorFlow does not outlive a fork"
                raise SpecError.of("data", given, allowed, "data=lambda: tf.data.Dataset.from_tensor_slices((x, y))")
            own = hasattr(self._given, "__getitem__") or hasattr(self._given, "unbatch")
            data = self._given() if callable(self._given) and not own else self._given
            self._made = dataset_of(data, self._batch, self._class_weight)
        return self._made

    @property
    def in_batches(self) -> bool:
        """Return True if batches are read by number; False for a function, which is called later."""
        return hasattr(self._given, "__getitem__") and isinstance(self(), IndexedBatches)

    def example(self) -> Any:
        """Return the model's input for the first sample."""
        dataset = self()
        sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
        return tree_map(lambda one: one[None], rows_of(sample, "x"))


def dataset_of(data: Any, batch: int, class_weight: Mapping[int, float] | None = None) -> Any:
    """Return the dataset for ``data``, an argument of ``fit``.

    Raises:
        SpecError: its kind cannot be shared out over ranks, or it has weights twice.
    """
    kind = type(data)
    if isinstance(data, tuple | list) and 1 <= len(data) <= 3:
        found = columns(*data)
        if class_weight:
            found["weight"] = _class_weights(found, class_weight)
        return Table(**found)
    if hasattr(data, "element_spec") and hasattr(data, "unbatch"):
        _no_class_weight(class_weight, "a tf.data.Dataset")
        _need_one_order(data)
        return BatchedStream(data)
    if hasattr(data, "__getitem__") and any(one.__name__ == "PyDataset" for one in kind.__mro__):
        _no_class_weight(class_weight, "a PyDataset")
        _no_own_epochs(kind)
        return IndexedBatches(data, batch)
    given = f"a {kind.__name__}"
    allowed = "(x, y) or (x, y, sample_weight) of arrays, a keras.utils.PyDataset, or a tf.data.Dataset"
    raise SpecError.of("data", given, allowed, _EXAMPLE)


@final
class IndexedBatches(DrawsTogether):
    """Samples of a ``PyDataset``, which returns batches by number; each has ``batch`` samples, except the last."""

    draws = True
    example = "dataset"

    def __init__(self, data: Any, batch: int) -> None:
        self._data, self._batch = data, batch
        self._seeds: EpochSeeds | None = None
        sizes = [len(_first(self._read(at))) for at in dict.fromkeys((0, len(data) - 1))]
        if (len(data) > 1 and sizes[0] != batch) or sizes[-1] > batch:
            given = f"a PyDataset whose batches have {sizes[0]} samples, with batch={batch}"
            raise SpecError.of(
                "data", given, "one whose batches are the global batches of the job", f"batch={sizes[0]}"
            )
        self._length = batch * (len(data) - 1) + sizes[-1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[0] for name, column in self.__getitems__([index]).items()}

    def seeded(self, seeds: EpochSeeds) -> None:
        self._seeds = seeds

    def __getitems__(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the batch of these rows: name → tensor."""
        index = np.asarray(ids)
        found: list[dict[str, torch.Tensor]] = []
        cuts = np.flatnonzero(np.diff(index // self._batch)) + 1
        for part in np.split(index, cuts):
            number = int(part[0]) // self._batch
            if self._seeds is not None:  # a batch draws the same for any split of its samples
                self._seeds.plant(number * self._batch)
            read = self._read(number)
            rows = torch.from_numpy(part % self._batch)
            found.append({name: column.index_select(0, rows) for name, column in read.items()})
        return found[0] if len(found) == 1 else {name: torch.cat([one[name] for one in found]) for name in found[0]}

    def _read(self, at: int) -> dict[str, torch.Tensor]:
        given = self._data[at]
        return columns(*given) if isinstance(given, tuple | list) else columns(given)


def order_of_batches(samples: int, batch: int) -> Callable[[int, int], np.ndarray]:
    """Return a sampler that shuffles whole batches, like ``fit`` with a ``PyDataset``."""

    def order(seed: int, epoch: int) -> np.ndarray:
        whole = samples // batch
        rows = np.arange(samples)
        shuffled = np.random.default_rng((seed, epoch)).permutation(whole)
        return np.concatenate([rows[: whole * batch].reshape(whole, batch)[shuffled].ravel(), rows[whole * batch :]])

    return order


@final
class BatchedStream(IterableDataset[Any]):
    """Samples of a ``tf.data.Dataset`` in its order."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._data.as_numpy_iterator():
            read = columns(*batch) if isinstance(batch, tuple) else columns(batch)
            for row in range(len(_first(read))):
                yield {name: column[row] for name, column in read.items()}


def _first(read: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(read.values()))


def _flat(name: str, given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            yield from _flat(f"{name}/{key}", value)
    elif isinstance(given, tuple | list) and given and hasattr(given[0], "shape"):
        for at, value in enumerate(given):
            yield from _flat(f"{name}/#{at}", value)
    else:
        yield name, _tensor(given)


def _tensor(given: Any) -> torch.Tensor:
    import keras

    if isinstance(given, torch.Tensor):
        tensor = given.detach().cpu()
    else:
        array = np.asarray(given)
        tensor = torch.as_tensor(array if array.flags.writeable else array.copy())
    return tensor.to(getattr(torch, keras.config.floatx())) if tensor.is_floating_point() else tensor


def _class_weights(found: Mapping[str, torch.Tensor], weights: Mapping[int, float]) -> torch.Tensor:
    if any(name.startswith("weight") for name in found):
        raise SpecError.of("class_weight", "beside sample weights", "one of the two, as of Keras' fit", "data=(x, y)")
    y = found.get("y")
    if y is None:
        raise SpecError.of("class_weight", "for a model of several outputs", "sample weights", "data=(x, y, weight)")
    if y.dim() > 1:
        y = y.argmax(-1) if y.shape[-1] > 1 else y.squeeze(-1)
    made = torch.ones(y.shape, dtype=torch.float32)
    for name, weight in weights.items():
        made[y.round().long() == int(name)] = float(weight)
    return made


def _need_one_order(data: Any) -> None:
    if type(data).__name__ == "_ShuffleDataset":
        seeded = any(int(seed) for seed in (data._seed, data._seed2))
        if not seeded or data._reshuffle_each_iteration:
            given = f"shuffle with{'' if seeded else 'out a seed, and with'} another order in each pass"
            allowed = "the same order in every process, and in a resumed run"
            raise SpecError.of("data", given, allowed, "shuffle(1000, seed=1, reshuffle_each_iteration=False)")
    for one in getattr(data, "_inputs", list)():
        _need_one_order(one)


def _no_own_epochs(kind: type) -> None:
    for name in ("on_epoch_begin", "on_epoch_end"):
        if not getattr(kind, name).__module__.startswith("keras."):
            given = f"{kind.__name__}.{name}: processes read ahead, each its own samples, and call it for no epoch"
            allowed = "a PyDataset that is the same in every epoch, whose batches the job shuffles"
            raise SpecError.of("data", given, allowed, f"a {kind.__name__} without {name}, and shuffle=True")


def _no_class_weight(given: Any, what: str) -> None:
    if given:
        allowed = "arrays; or batches of (x, y, sample_weight)"
        raise SpecError.of("class_weight", f"with {what}", allowed, "data=(x, y)")
