"""The state document as text: how strings are written, and a parser that a hostile document cannot overrun."""

from __future__ import annotations

import base64
import binascii
import json
import re
from json.decoder import JSONDecoder
from json.encoder import encode_basestring_ascii

from tierload.errors import CorruptStore

__all__ = ["base64_text", "bytes_of", "has_pair", "parse", "quoted", "text_json"]

_DEPTH_MAX = 2600  # of JSON: a state nests 500 deep and a typed value takes at most 5 levels
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_TOKEN = re.compile(r'[ \t\n\r]*(?:([\[\]{},:])|(")|([-+.0-9A-Za-z]+))')

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


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CorruptStore("the state document names a member of an object twice")
    return members


def _constant(name: str) -> object:
    raise CorruptStore(f"the state document holds {name}, which is no JSON")


_DECODER = JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def parse(document: bytes) -> object:
    """The value of a JSON text in ASCII.

    Raises:
        CorruptStore: It is no JSON, names a member twice, or nests deeper than any state does.
    """
    try:
        text = document.decode("ascii")
        try:
            return _DECODER.decode(text)
        except RecursionError:
            return _parse_deep(text)
    except (ValueError, IndexError) as error:
        raise CorruptStore(f"the state document cannot be read: {error}") from error


def _string(text: str, position: int) -> tuple[str, int]:
    """The string whose opening quote stands before ``position``, and the position after its closing one."""
    value, end = _DECODER.raw_decode(text, position - 1)
    return str(value), end


def _parse_deep(text: str) -> object:
    """Parse without recursion: several times slower, for documents that nest deeper than Python's own parser goes.

    ``stack`` holds the open containers; ``names`` the member that waits for its value, or None in an array.
    """
    root: list[object] = []
    stack: list[list[object] | list[tuple[str, object]]] = []
    values: list[object] = root
    names: list[str | None] = []
    kinds: list[str] = []
    position, expected = 0, "value"
    while expected != "end":
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"no JSON at character {position}")
        position = token.end()
        mark = token.group(1)
        if expected in ("value", "value or ]") and mark in ("[", "{"):
            if len(kinds) >= _DEPTH_MAX:
                raise CorruptStore(f"the state document nests deeper than {_DEPTH_MAX} levels")
            kinds.append(mark)
            names.append(None)
            stack.append(values)
            values = []
            expected = "value or ]" if mark == "[" else "name or }"
            continue
        if mark == "]" and kinds and kinds[-1] == "[" and expected in ("value or ]", "comma"):
            value: object = values
        elif mark == "}" and kinds and kinds[-1] == "{" and expected in ("name or }", "comma"):
            value = _object(values)  # type: ignore[arg-type]
        elif mark == "," and expected == "comma":
            expected = "value" if kinds[-1] == "[" else "name"
            continue
        elif token.group(2) and expected in ("name", "name or }"):
            names[-1], position = _string(text, position)
            colon = _TOKEN.match(text, position)
            if colon is None or colon.group(1) != ":":
                raise ValueError(f"no colon at character {position}")
            position, expected = colon.end(), "value"
            continue
        elif expected not in ("value", "value or ]") or mark:
            raise ValueError(f"unexpected {token.group()!r} before character {position}")
        elif token.group(2):
            value, position = _string(text, position)
        else:
            value = json.loads(token.group(3), parse_constant=_constant)
        if mark in ("]", "}"):
            kinds.pop()
            names.pop()
            values = stack.pop()  # type: ignore[assignment]
        values.append((names[-1], value) if kinds and kinds[-1] == "{" else value)
        expected = "comma" if kinds else "end"
    if text[position:].strip(" \t\n\r"):
        raise ValueError(f"text after the end, at character {position}")
    return root[0]
