"""SUPER and the journals: docs/FORMAT.md sections 4, 5 and 5.1."""

import re
import struct
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

from .digests import crc32c
from .files import BLOCK, read_at, size_of
from .report import Refused, Report

Place = tuple[int, ...]  # epoch and sequence: which journal
MAX_PAYLOAD = 64 << 20
KNOWN = 1  # incompatible features: bit 0, commits may have several ranks
RecordHeader = namedtuple(
    "RecordHeader",
    ["crc", "size", "type", "flags", "lsn", "epoch", "length", "payload_crc", "chain", "watermark", "time"],
)


def _sealed(block: bytes, magic: bytes) -> bool:
    """Whether a block begins with this magic and ends with its own crc."""
    return block[:8] == magic and crc32c(block[:-4]) == int.from_bytes(block[-4:], "little")


def read_super(store: Path, report: Report) -> tuple[bytes | None, Place]:
    """Store id (None: not known) and base of the valid slot with the larger generation."""
    slots = [read_at(store / "SUPER", number * BLOCK, BLOCK) for number in (0, 1)]
    valid = [slot for number, slot in enumerate(slots) if _sealed(slot, b"TLSUPER1") and slot[48] & 1 == number]
    if not valid and not (store / "wal").is_dir():
        raise Refused(f"{store}: no tierload store")
    if not valid:
        report.problems.append("SUPER: both slots are damaged; the newest journal in wal/ is taken")
        return None, (0, 0)
    fields = [struct.unpack_from("<8xI12xQ16sQ8xQQ16s", slot) for slot in valid]
    version, features, identity, _, *base, release = max(fields, key=lambda slot: slot[3])
    if version != 1 or features & ~KNOWN:
        least = release.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise Refused(f"{store}: format {version}, features {features:#x}: tierload {least} or later is needed")
    return identity, tuple(base)


class Journal:
    """A journal file and its mirror, as the valid header of one of them describes them."""

    def __init__(self, copies: list[Path], header: bytes) -> None:
        self.version, self.features, self.owner, *place = struct.unpack_from("<8xI12xQ16sQQ", header)
        salt, self.lsn, self.chain = struct.unpack_from("<8sQ24xI", header, 64)
        self.copies, self.place, self.seed = copies, tuple(place), crc32c(salt)
        self.name = "{:08x}-{:08x}".format(*place)

    def records(self, report: Report) -> Iterator[tuple[RecordHeader, bytes]]:
        """Every record, from whichever copy holds it; then a verdict on what follows the last."""
        offset, lsn, chain, lame = BLOCK, self.lsn, self.chain, set[Path]()
        while good := {path: found for path in self.copies if (found := self._record(path, offset, lsn, chain))}:
            bad = set(self.copies) - good.keys() - lame
            report.notes += [f"wal/{path.name}: LSN {lsn} at {offset} is in the other copy only" for path in bad]
            lame |= bad
            head, payload = next(iter(good.values()))
            yield head, payload
            lsn, chain, offset = lsn + 1, head.crc, offset + 64 + -(-head.length // 8) * 8
            if head.flags & 1:
                offset += -offset % BLOCK
        for path in self.copies:
            later = (self._header(path, at) for at in range(offset + -offset % BLOCK, size_of(path) - 63, BLOCK))
            if any(header and header.watermark >= lsn for header in later):
                where = f"journal {self.name}: corrupt from LSN {lsn} at {offset}"
                report.problems.append(f"{where}: wal/{path.name} has later records")
                return

    def _header(self, path: Path, offset: int) -> RecordHeader | None:
        if data := read_at(path, offset, 64):
            head = RecordHeader._make(struct.unpack("<IHBBQ8xQIII4xQQ", data))
            if head.size == 64 and head.length <= MAX_PAYLOAD and head.crc == crc32c(data[4:], self.seed):
                return head
        return None

    def _record(self, path: Path, offset: int, lsn: int, chain: int) -> tuple[RecordHeader, bytes] | None:
        head = self._header(path, offset)
        if head and (head.lsn, head.epoch, head.chain) == (lsn, self.place[0], chain):
            payload = read_at(path, offset + 64, head.length)
            if len(payload) == head.length and crc32c(payload) == head.payload_crc:
                return head, payload
        return None


def journals(store: Path, identity: bytes | None, report: Report) -> Iterator[Journal]:
    """The journals of this store that have a valid header, newest first."""
    wal = store / "wal"
    names = [re.fullmatch("[cm]-([0-9a-f]{8}-[0-9a-f]{8})", path.name) for path in wal.glob("*")]
    for name in sorted({match[1] for match in names if match}, reverse=True):
        copies = [wal / f"c-{name}", wal / f"m-{name}"]
        headers = [header for path in copies if _sealed(header := read_at(path, 0, BLOCK), b"TLWAL001")]
        found = [journal for header in headers if (journal := Journal(copies, header)).name == name]
        own = next((journal for journal in found if identity in (None, journal.owner)), None)
        if own is None:
            report.notes.append(f"journal {name}: no valid header, passed over")
        elif own.version != 1 or own.features & ~KNOWN:
            raise Refused(
                f"journal {name}: format {own.version}, features {own.features:#x}: a later release is needed"
            )
        else:
            yield own
