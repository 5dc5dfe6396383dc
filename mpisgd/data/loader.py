"""Samples that are put together as torch does it: a batch is what `collate_fn` makes of them, any nest of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from mpisgd.base.errors import DataError
from mpisgd.data.dataset import LazySplit
from mpisgd.vectors import nest

Collate = Callable[[list[Any]], Any]


class CollatedSplit(LazySplit):
    """Samples of a torch map-style Dataset, of any kind, fetched and collated per mini-batch.

    Args:
        where: what to call it in messages.

    Raises DataError where the first sample cannot be put into a batch.
    """

    def __init__(self, dataset: Any, where: str, collate: Collate = default_collate) -> None:
        super().__init__(dataset, where, None)
        self.collate = collate
        batch = self.batch(np.zeros(1, np.int64)) if len(self) else None
        shapes = [tuple(tensor.shape) for tensor in nest.tensors_of(batch).values() if hasattr(tensor, "shape")]
        self._input_shape = shapes[0][1:] if shapes else ()

    def batch(self, indices: npt.NDArray[np.int64]) -> Any:
        """The samples in a batch; what samples and `collate` draw, `fetch` seeds. Raises DataError where they do not fit."""
        numbers = indices.tolist()
        several = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[number] for number in numbers] if several is None else several(numbers)
        if self.collate is not default_collate:
            return self.collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            which = f"sample {numbers[0]}" if len(numbers) == 1 else f"samples {', '.join(map(str, numbers[:6]))} ..."
            raise DataError(
                f"{self.where}: {which} cannot be put into a batch: {error}: expected nests of tensors, arrays and numbers, of one"
                " shape each; or a DataLoader with a collate_fn"
            ) from error

    @property
    def padded(self) -> bool:
        """Whether there is a collate function of the user's own, which may do so."""
        return self.collate is not default_collate

    @property
    def input_shape(self) -> tuple[int, ...]:
        """That of one sample in the first tensor of a batch."""
        return self._input_shape
