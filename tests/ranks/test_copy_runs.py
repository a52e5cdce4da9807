"""Runs of bytes are copied from addresses to addresses, by however many threads."""

from __future__ import annotations

import numpy as np
import pytest

from tierload import _native
from tierload.errors import InvalidRequest


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(("count", "longest"), [(0, 1), (1, 5), (5000, 9), (100_000, 16), (40, 1 << 18)])
def test_every_run_arrives_and_nothing_else_changes(threads: int, count: int, longest: int) -> None:
    random = np.random.default_rng(count)
    lengths = random.integers(0, longest + 1, count, np.uint64)
    gaps = random.integers(0, 4, count, np.uint64)
    begins = np.cumsum(lengths + gaps) - lengths
    source = random.integers(0, 256, int((lengths + gaps).sum()) + 1, np.uint8)
    target, right = np.zeros_like(source), np.zeros_like(source)
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        right[begin : begin + length] = source[begin : begin + length]
    order = random.permutation(count)
    addresses = [np.uint64(array.ctypes.data) + begins[order] for array in (source, target)]
    _native.copy_runs(*addresses, lengths[order], threads)
    assert np.array_equal(target, right)


def test_arrays_of_different_lengths_are_refused() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(InvalidRequest, match="differ in length"):
        _native.copy_runs(one, one, two, 0)
