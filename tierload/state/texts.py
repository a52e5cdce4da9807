"""The state document as text: how strings are written, and its parser."""

from __future__ import annotations

import base64
import binascii
import re
from json.encoder import encode_basestring_ascii

from tierload import _native
from tierload.errors import CorruptStore

__all__ = ["base64_text", "bytes_of", "has_pair", "parse", "quoted", "text_json"]

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

quoted = encode_basestring_ascii
"""A JSON string in ASCII; a lone surrogate is a ``\\u`` escape."""


def has_pair(text: str) -> bool:
    """Whether JSON would read two of the text's code points back as one character."""
    return not text.isascii() and _PAIR.search(text) is not None


def text_json(text: str) -> str:
    """The JSON of a str value."""
    if has_pair(text):
        return f'{{"text":"{base64_text(text.encode("utf-8", "surrogatepass"))}"}}'
    return quoted(text)


def base64_text(data: bytes | bytearray | memoryview) -> str:
    """Bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def bytes_of(content: object) -> bytes:
    """Bytes from base64.

    Raises:
        CorruptStore: The content is no base64 text.
    """
    if type(content) is not str:
        raise CorruptStore(f"the state document has {type(content).__name__} where base64 text belongs")
    try:
        return base64.b64decode(content.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise CorruptStore(f"the state document has damaged base64: {error}") from error


def parse(document: bytes) -> object:
    """The value of a JSON text in ASCII.

    Raises:
        CorruptStore: It is no JSON, names a member twice, or nests deeper than any state does.
    """
    return _native.parse_nodes(document)
