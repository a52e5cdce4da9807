"""Names out of the store as text: docs/FORMAT.md section 5.1."""

from __future__ import annotations

from tierload.errors import CorruptStore

__all__ = ["decode_text"]


def decode_text(name: bytes) -> str:
    """The text that UTF-8 with lone surrogates stands for.

    Raises:
        CorruptStore: It is none, so a record was forged.
    """
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptStore(f"a name in the journal is no UTF-8: {name[:40]!r} ({error.reason})") from None
