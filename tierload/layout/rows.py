"""The fixed-width rows of a manifest, and of a root, as numpy types: docs/FORMAT.md sections 5.2 and 6."""

from __future__ import annotations

import numpy as np

__all__ = ["CHUNK_PACKED", "CHUNK_ROW", "PAGE_ROW", "ROOT_ROW", "SEGMENT_ROW"]

SEGMENT_ROW = np.dtype([("epoch", "<u8"), ("txid", "<u8"), ("rank", "<u4"), ("n", "<u4"), ("size", "<u8")])

PAGE_ROW = np.dtype(
    [
        ("raw_digest", "<u8", (2,)),
        ("stored_digest", "<u8", (2,)),
        ("offset", "<u8"),
        ("segment", "<u4"),
        ("stored_length", "<u4"),
        ("raw_length", "<u4"),
        ("codec", "u1"),
        ("item_size", "u1"),
        ("heat", "<u2"),
        ("flags", "<u4"),
        ("reserved", "<u4"),
    ]
)

CHUNK_ROW = np.dtype(
    [
        ("key_hash", "<u8"),
        ("key_offset", "<u8"),
        ("key_length", "<u4"),
        ("dtype", "<u2"),
        ("ndim", "u1"),
        ("flags", "u1"),
        ("dims", "<u8"),
        ("bytes", "<u8"),
        ("first_page", "<u4"),
        ("pages", "<u4"),
        ("page_offset", "<u4"),
        ("reserved", "<u4"),
        ("reserved2", "<u8"),
    ]
)

ROOT_ROW = np.dtype(
    [
        ("rank", "<u4"),
        ("reserved", "<u4"),
        ("epoch", "<u8"),
        ("txid", "<u8"),
        ("body_length", "<u8"),
        ("digest", "<u8", (2,)),
        ("reserved2", "<u8", (2,)),
    ]
)

CHUNK_PACKED = 1

assert SEGMENT_ROW.itemsize == 32
assert PAGE_ROW.itemsize == CHUNK_ROW.itemsize == ROOT_ROW.itemsize == 64
