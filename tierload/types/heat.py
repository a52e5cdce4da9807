"""How hot the tensors of a state were when it was saved: what a commit carries of a heat meter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command's help must not wait for numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["HeatTable"]


@dataclass(frozen=True, slots=True, eq=False)
class HeatTable:
    """Columns of one value for each of ``keys``, which are keys of stored tensors.

    ``gradient`` is the average norm of the gradient and ``radius`` that of the Hessian's spectrum, as measured;
    ``locality`` and ``heat`` are in [0, 1]. ``first_use`` counts the tensors that a step uses before this one; -1: the
    last step did not use it. ``pages`` has the heat of every page of the tensors that have more than one.
    """

    keys: tuple[str, ...]
    gradient: npt.NDArray[np.float32]
    radius: npt.NDArray[np.float32]
    locality: npt.NDArray[np.float32]
    heat: npt.NDArray[np.float32]
    first_use: npt.NDArray[np.int32]
    pages: Mapping[str, npt.NDArray[np.float32]]
