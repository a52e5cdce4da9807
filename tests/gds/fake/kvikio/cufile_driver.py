from __future__ import annotations

asked = 0
version = (1, 15)


def libcufile_version() -> tuple[int, int]:
    global asked
    asked += 1
    return version


def get(name: str) -> bool:
    assert name == "is_gds_available"
    return True
