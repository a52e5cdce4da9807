"""Bytes of a store's files and the fields in them, never beyond what is there."""

import struct
from pathlib import Path
from typing import Any

from .report import Damage

BLOCK = 4096


def size_of(path: Path) -> int:
    """The size of a regular file, 0 for anything else."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def read_at(path: Path, offset: int, length: int) -> bytes:
    """These bytes of a regular file; none when they are not all there and readable. The file bounds the allocation."""
    try:
        if 0 < length <= size_of(path) - offset:
            with path.open("rb", buffering=0) as file:  # a buffer would read ahead, perhaps into a bad sector
                file.seek(offset)
                data = file.read(length)
            return data if len(data) == length else b""
    except OSError:
        pass
    return b""


class Cursor:
    """Takes fields off some bytes, one after the other."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, length: int) -> bytes:
        """The next bytes; Damage when there are fewer."""
        if length > len(self.data) - self.at:
            raise Damage(f"a field of {length} bytes at {self.at} goes beyond the {len(self.data)} that are there")
        self.at += length
        return self.data[self.at - length : self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """The next fields, in the notation of struct."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self, length: int) -> str:
        """Text; what is no UTF-8 is a ValueError, as Damage is."""
        return self.take(length).decode("utf-8", "surrogatepass")

    def align(self) -> None:
        """Skip to the next multiple of 8."""
        self.at += -self.at % 8
