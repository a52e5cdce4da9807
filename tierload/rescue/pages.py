"""The codecs of a page: docs/FORMAT.md section 7."""

import lz4.block
import numpy as np
import zstandard

from .files import Cursor
from .report import Damage

RAW, CONST, LZ4, ZSTD = range(4)
FRAME = 128 << 10


def decode_frame(kind: int, data: bytes, length: int) -> bytes:
    """One LZ4 block or zstd frame that holds exactly `length` bytes."""
    try:
        if kind == LZ4:
            raw: bytes = lz4.block.decompress(data, uncompressed_size=length)
        elif zstandard.get_frame_parameters(data).content_size != length:  # before the decoder allocates it
            raise Damage("a frame of another content size")
        else:
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise Damage(f"a frame does not decode ({error})") from None
    if len(raw) != length:
        raise Damage("a frame of another length")
    return raw


def decode_planes(stored: bytes, raw_length: int, item: int) -> bytes:
    """The raw bytes of a page of codec 1."""
    cursor = Cursor(stored)
    size, transform = cursor.unpack("<BBxx")
    if size != item or size not in (1, 2, 4, 8) or raw_length % size or transform > (size > 1):
        raise Damage(f"planes of {size} bytes an item, transform {transform}")
    length = raw_length // size
    heads = [cursor.unpack("<BBHI") for _ in range(size)]
    frames = [cursor.unpack(f"<{count}I") for _, _, count, _ in heads]
    planes = np.empty((size, length), np.uint8)
    for plane, (kind, constant, count, plane_length), sizes in zip(planes, heads, frames, strict=True):
        expected = {RAW: (0, length), CONST: (0, 0)}.get(kind, (-(-length // FRAME), sum(sizes)))
        if kind > ZSTD or (count, plane_length) != expected:
            raise Damage(f"a plane of kind {kind} with {count} frames and {plane_length} bytes")
        plane[:] = np.frombuffer(cursor.take(length), np.uint8) if kind == RAW else constant
        for number, frame in enumerate(sizes):
            part = plane[number * FRAME : (number + 1) * FRAME]
            part[:] = np.frombuffer(decode_frame(kind, cursor.take(frame), len(part)), np.uint8)
    if cursor.at != len(stored):
        raise Damage("bytes after the last plane")
    if transform:  # the top two bytes of an item as one number, rotated right again
        top = planes[-1].astype(np.uint16) << 8 | planes[-2]
        top = top >> 1 | top << 15
        planes[-1], planes[-2] = top >> 8, top & 255
    return planes.T.tobytes()
