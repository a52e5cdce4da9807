"""What dm-log-writes writes down, and disks that are made from a part of it.

The log is in the order in which writes became durable. A write that nobody flushed is logged just before the flush that
covers it; one with FUA, and a mark, at once. So what is logged before a mark was durable when the mark was set, and a
power cut leaves everything up to the last flush, every write with FUA, and any of the others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4096
SECTOR = 512
MAGIC = 0x6A736677736872
SUPER = struct.Struct("<QQQI")  # magic, version, entries, bytes of a sector
HEAD = struct.Struct("<QQQQ")  # sector, sectors, flags, bytes behind this head (of a mark)
FLUSH, FUA, DISCARD, MARK, METADATA = 1, 2, 4, 8, 16
BLKDISCARD = 0x1277

Writes = list[tuple[int, bytes]]  # offset and data


@dataclass(frozen=True)
class Entry:
    """A write, a flush, or a mark."""

    offset: int
    data: bytes
    flags: int
    mark: str


def read_log(path: Path) -> list[Entry]:
    """All entries of a log that was ended."""
    entries = []
    with path.open("rb") as file:
        magic, version, count, sector = SUPER.unpack(file.read(SUPER.size))
        if (magic, version) != (MAGIC, 1):
            raise ValueError(f"not a log of dm-log-writes: {magic:x}, version {version}")
        position = sector
        for _ in range(count):
            file.seek(position)
            start, sectors, flags, length = HEAD.unpack(file.read(HEAD.size))
            mark = file.read(length).rstrip(b"\0").decode() if flags & MARK else ""
            position += sector
            # A discarded block may hold anything. Zeros are what a disk gives back, and what nobody expects there.
            data = bytes(sectors * sector)
            if not flags & DISCARD:
                file.seek(position)
                data = file.read(len(data))
                position += len(data)
            entries.append(Entry(start * sector, data, flags, mark))
    return entries


class Image:
    """The contents of a disk. Blocks that are not in `blocks` are zeros."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)  # takes only what is written
        self.blocks: set[int] = set()

    @classmethod
    def of(cls, path: Path) -> Image:
        """What a file holds."""
        image = cls(path.stat().st_size)
        with path.open("rb") as file:
            for number in range(len(image.memory) // BLOCK):
                if (block := file.read(BLOCK)) != bytes(BLOCK):
                    image.write(number * BLOCK, block)
        return image

    def copy(self) -> Image:
        """Another one."""
        image = Image(len(self.memory))
        for start, end in runs(sorted(self.blocks)):
            image.write(start * BLOCK, self.memory[start * BLOCK : end * BLOCK])
        return image

    def write(self, offset: int, data: bytes) -> None:
        """Writes."""
        self.memory[offset : offset + len(data)] = data
        self.blocks.update(range(offset // BLOCK, -(-(offset + len(data)) // BLOCK)))

    def put(self, device: str, more: Writes) -> None:
        """Makes a device hold this, and `more` on top."""
        fd = os.open(device, os.O_RDWR | os.O_EXCL)
        try:
            fcntl.ioctl(fd, BLKDISCARD, struct.pack("QQ", 0, len(self.memory)))
            for start, end in runs(sorted(self.blocks)):
                os.pwrite(fd, self.memory[start * BLOCK : end * BLOCK], start * BLOCK)
            for offset, data in more:
                os.pwrite(fd, data, offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Numbers in a row, as half-open ranges."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


@dataclass(frozen=True)
class Cut:
    """What a power cut leaves: the image that it was taken of, and these writes."""

    kind: str
    position: int  # in the log
    writes: Writes
    marks: list[str]  # set before


def cuts(image: Image, log: list[Entry], seed: str) -> Iterator[Cut]:
    """What cuts at every write and every acknowledgement may leave, once each. `image` goes along with the log."""
    chance = random.Random(seed)
    pending: list[Entry] = []  # since the last flush
    marks: list[str] = []
    seen: set[tuple[object, ...]] = set()
    for position, entry in enumerate(log):
        if entry.mark:
            marks.append(entry.mark)
        if entry.flags & FLUSH:
            for write in pending:
                image.write(write.offset, write.data)
            pending = []
            seen = {(len(marks),)}
        if entry.data:
            pending.append(entry)
        elif entry.mark[:1] not in ("a", "d"):
            continue
        for kind, writes in left(pending, entry, chance):
            known = (len(marks), *writes)
            if known not in seen:
                seen.add(known)
                yield Cut(kind, position, writes, list(marks))


def left(pending: list[Entry], last: Entry, chance: random.Random) -> Iterator[tuple[str, Writes]]:
    """What may be there of the writes since a flush. The last one may be under way, whatever its flags."""
    yield "all", [(write.offset, write.data) for write in pending]
    flushed: Writes = []
    some: Writes = []
    for write in pending:
        whole = (write.offset, write.data)
        if write.flags & FUA and write is not last:
            flushed.append(whole)
            some.append(whole)
        elif chance.random() < 0.5:
            some.append(whole)
        elif chance.random() < 0.5:
            some += torn(write, chance)
    yield "only what was flushed", flushed
    yield "some, torn", some


def torn(write: Entry, chance: random.Random) -> Writes:
    """A part of a write: some sectors; for the file system's own, some blocks, which it takes to be written whole."""
    own = write.flags & METADATA or write.offset == 0  # ext4 does not mark its superblock
    unit = BLOCK if own else SECTOR
    parts = range(0, len(write.data), unit)
    return [(write.offset + at, write.data[at : at + unit]) for at in parts if chance.random() < 0.5]
