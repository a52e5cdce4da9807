"""The heat of tensors in the document of the state that they are stored with (docs/FORMAT.md section 8.2)."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierload.errors import CorruptStore
from tierload.state.nodes import DAMAGE
from tierload.state.texts import parse
from tierload.types import HeatTable

__all__ = ["read_heat", "write_heat"]

_COLUMNS = {"gradient": "<f4", "radius": "<f4", "locality": "<f4", "heat": "<f4", "first_use": "<i4"}


def write_heat(document: bytes, table: HeatTable, keys: Sequence[str] | None = None) -> bytes:
    """A document with the heat of its tensors besides. ``keys`` are those of what it names by number; None: of what it
    lists itself, as the documents of several ranks do. Rows of other keys are left out."""
    if keys is None:
        keys = [row[0] for row in json.loads(document)["tensors"]]
    numbers = {key: number for number, key in reversed([*enumerate(keys)])}
    which = [row for row, key in enumerate(table.keys) if key in numbers]
    columns: dict[str, object] = {"chunks": [numbers[table.keys[row]] for row in which]}
    columns |= {name: _text(getattr(table, name)[which], kind) for name, kind in _COLUMNS.items()}
    columns["pages"] = [[numbers[key], _text(pages, "<f4")] for key, pages in table.pages.items() if key in numbers]
    return document[:-1] + b',"heat":' + json.dumps(columns, separators=(",", ":")).encode("ascii") + b"}"


def read_heat(document: bytes, keys: Sequence[str] | None = None) -> HeatTable | None:
    """The heat in a document; None where it has none. ``keys`` as above.

    Raises:
        CorruptStore: It is damaged.
    """
    parsed: Any = parse(document)
    try:
        found = parsed.get("heat")
        if found is None:
            return None
        if keys is None:
            keys = [row[0] for row in parsed["tensors"]]
        of = [_key(keys, number) for number in found["chunks"]]
        columns = {name: _column(found[name], kind) for name, kind in _COLUMNS.items()}
        if len(set(of)) != len(of) or any(len(column) != len(of) for column in columns.values()):
            raise CorruptStore("the heat in the state document has columns of different lengths, or a tensor twice")
        pages = {_key(keys, number): _column(text, "<f4") for number, text in found["pages"]}
    except DAMAGE as error:
        if isinstance(error, CorruptStore):
            raise
        raise CorruptStore(f"the heat in the state document is damaged: {error!r:.200}") from error
    return HeatTable(keys=tuple(of), pages=pages, **columns)


def _key(keys: Sequence[str], number: object) -> str:
    if type(number) is not int or not 0 <= number < len(keys):
        raise CorruptStore(f"the heat in the state document names tensor {number!r:.40} of {len(keys)}")
    return keys[number]


def _text(column: npt.NDArray[Any], kind: str) -> str:
    return base64.b64encode(column.astype(kind).tobytes()).decode("ascii")


def _column(text: str, kind: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), kind)
