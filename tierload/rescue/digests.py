"""Checksums and digests: docs/FORMAT.md section 3."""

import functools

import xxhash

PAGE_LEAF, MANIFEST_LEAF = 16 << 10, 64 << 10

_CRC_TABLE = [0]
for _power in (0xF26B8303, 0xE13B70F7, 0xC79A971F, 0x8AD958CF, 0x105EC76F, 0x20BD8EDE, 0x417B1DBC, 0x82F63B78):
    _CRC_TABLE += [_power ^ value for value in _CRC_TABLE]


@functools.lru_cache(maxsize=2)  # both copies of a journal hold the same
def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC32C of `data`, continued from `seed`; `crc32c(b"123456789") == 0xE3069283`."""
    register, table = seed ^ 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def leaf_digests(data: bytes, leaf: int) -> bytes:
    """XXH3-64 of each leaf."""
    parts = (data[at : at + leaf] for at in range(0, len(data), leaf))
    return b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)


def root_digest(leaves: bytes, length: int) -> bytes:
    """The digest of a tree, given those of its leaves and the length of all."""
    return xxhash.xxh3_128_intdigest(leaves + length.to_bytes(8, "little")).to_bytes(16, "little")


def page_digest(data: bytes) -> bytes:
    """The digest of a page, stored or raw."""
    return root_digest(leaf_digests(data, PAGE_LEAF), len(data))
