"""Single values that hold no other value, both ways: Python value ⇄ JSON of docs/FORMAT.md section 8."""

from __future__ import annotations

import datetime
import math
import pathlib
import re
import struct
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tierload.errors import CorruptStore
from tierload.state.texts import base64_text, bytes_of, has_pair, quoted, text_json

__all__ = ["READERS", "WRITERS", "Unwritable", "npscalar_json", "numpy_dtype", "read_numpy_dtype", "sized"]

_PLAIN_NAN = struct.pack("<d", float("nan"))
_ZONED = re.compile(r"(.*)\[([^\[\]]+)\]")
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcMmSU][0-9]{1,9}(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,4})?")


class Unwritable(Exception):
    """A value cannot be stored; the text says why and what to do. Whoever knows the place adds it."""


def _int(value: int) -> str:
    return str(value) if abs(value) >> 63 == 0 else f'{{"int":"{value:#x}"}}'


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    if math.isinf(value):
        return '{"float":"inf"}' if value > 0 else '{"float":"-inf"}'
    bits = struct.pack("<d", value)
    return '{"float":"nan"}' if bits == _PLAIN_NAN else f'{{"float":"nan:{bits[::-1].hex()}"}}'


def _time_text(value: datetime.datetime | datetime.time) -> str:
    zone = value.tzinfo
    if zone is None or type(zone) is datetime.timezone:
        return value.isoformat()
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        plain = value.isoformat() if isinstance(value, datetime.datetime) else value.replace(tzinfo=None).isoformat()
        return f"{plain}[{zone.key}]"
    raise Unwritable(f"its tzinfo is a {type(zone).__qualname__}; use datetime.timezone or zoneinfo.ZoneInfo")


def _path(value: pathlib.PurePath) -> str:
    text = str(value)
    if has_pair(text):
        raise Unwritable("a path with a surrogate pair has no UTF-8 form; store it as text")
    return f'{{"path":{quoted(text)}}}'


def npscalar_json(value: np.generic[Any]) -> str:
    """The JSON of a numpy scalar."""
    text, data = numpy_dtype(value.dtype), value.tobytes()
    if isinstance(value, np.str_):  # numpy itself strips zeros at the end of text and bytes
        data = value[:].encode("utf-32-le", "surrogatepass")
        text = f"<U{len(value)}"
    elif isinstance(value, np.bytes_):
        data = value[:]
        text = f"|S{len(value)}"
    return f'{{"npscalar":{{"dtype":{quoted(text)},"data":"{base64_text(data)}"}}}}'


def numpy_dtype(dtype: np.dtype[Any]) -> str:
    """The text of a numpy dtype that the document can name: numbers, bool, text, bytes and times."""
    if _NUMPY_DTYPE.fullmatch(dtype.str) is None or dtype.metadata:
        raise Unwritable(f"numpy dtype {dtype} is not stored; convert it to numbers, or to a dict of its fields")
    return dtype.str


WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "null",
    bool: lambda value: "true" if value else "false",
    int: _int,
    float: _float,
    str: text_json,
    complex: lambda value: f'{{"complex":[{_float(value.real)},{_float(value.imag)}]}}',
    torch.Size: lambda value: f'{{"size":[{",".join(map(str, value))}]}}',
    torch.dtype: lambda value: f'{{"dtype":{quoted(str(value).removeprefix("torch."))}}}',
    torch.device: lambda value: f'{{"device":{quoted(str(value))}}}',
    torch.layout: lambda value: f'{{"layout":{quoted(str(value).removeprefix("torch."))}}}',
    type(pathlib.Path()): _path,
    datetime.date: lambda value: f'{{"date":"{value.isoformat()}"}}',
    datetime.time: lambda value: f'{{"time":{quoted(_time_text(value))}}}',
    datetime.datetime: lambda value: f'{{"datetime":{quoted(_time_text(value))}}}',
    datetime.timedelta: lambda value: f'{{"timedelta":[{value.days},{value.seconds},{value.microseconds}]}}',
}
"""Exact type → its JSON."""


def _text_of(content: object) -> str:
    if type(content) is not str:
        raise CorruptStore(f"the state document has {type(content).__name__} where text belongs")
    return content


def sized(content: object, count: int | None = None) -> list[Any]:
    """An array of the document, of ``count`` elements where that is known."""
    if type(content) is not list or (count is not None and len(content) != count):
        raise CorruptStore(f"the state document has {content!r:.60} where an array of {count or 'values'} belongs")
    return content


def _read_float(content: object) -> float:
    text = _text_of(content)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not text.startswith("nan:") or len(text) != 20:
        raise CorruptStore(f"the state document has a float {text!r:.60}")
    value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    return value


def _part(node: object) -> float:
    if type(node) is dict and len(node) == 1 and "float" in node:
        return _read_float(node["float"])
    if type(node) is not float and type(node) is not int:
        raise CorruptStore(f"the state document has {node!r:.60} where a number belongs")
    return float(node)


def _read_text(content: object) -> str:
    return bytes_of(content).decode("utf-8", "surrogatepass")


def _integers(content: object, count: int | None = None) -> list[int]:
    numbers = sized(content, count)
    if any(type(number) is not int for number in numbers):
        raise CorruptStore("the state document has something else where integers belong")
    return numbers


def _named(content: object, kind: type) -> Any:
    """A dtype or layout by its name: an attribute of torch, and only of that kind."""
    value = getattr(torch, _text_of(content), None)
    if type(value) is not kind:
        raise CorruptStore(f"this torch ({torch.__version__}) knows no {kind.__name__} {content!r:.60}")
    return value


def _read_device(content: object) -> torch.device:
    if _DEVICE.fullmatch(_text_of(content)) is None:
        raise CorruptStore(f"the state document has a device {content!r:.60}")
    try:
        return torch.device(_text_of(content))
    except RuntimeError as error:
        raise CorruptStore(f"this torch knows no device {content!r:.60}") from error


def _read_datetime(content: object) -> datetime.datetime:
    text = _text_of(content)
    zoned = _ZONED.fullmatch(text)
    if zoned is None:
        return datetime.datetime.fromisoformat(text)
    fixed = datetime.datetime.fromisoformat(zoned[1])
    value = fixed.replace(tzinfo=_zone(zoned[2]))
    return value if value.utcoffset() == fixed.utcoffset() else value.replace(fold=1)


def _read_time(content: object) -> datetime.time:
    text = _text_of(content)
    zoned = _ZONED.fullmatch(text)
    if zoned is None:
        return datetime.time.fromisoformat(text)
    return datetime.time.fromisoformat(zoned[1]).replace(tzinfo=_zone(zoned[2]))


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise CorruptStore(f"this machine has no time zone {name!r:.60}") from error


def _read_npscalar(content: object) -> Any:
    if type(content) is not dict or content.keys() != {"dtype", "data"}:
        raise CorruptStore("the state document has a damaged numpy scalar")
    dtype, data = read_numpy_dtype(content["dtype"]), bytes_of(content["data"])
    if len(data) != dtype.itemsize:
        raise CorruptStore(f"the state document has {len(data)} bytes for a numpy scalar of {dtype}")
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-le", "surrogatepass"))
    return np.frombuffer(data, dtype)[0]


def read_numpy_dtype(content: object) -> np.dtype[Any]:
    """The numpy dtype of a text that ``numpy_dtype`` may have written."""
    text = _text_of(content)
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise CorruptStore(f"the state document has a numpy dtype {text!r:.60}")
    return np.dtype(text)


READERS: dict[str, Callable[[Any], object]] = {
    "int": lambda content: int(_text_of(content), 16),
    "float": _read_float,
    "complex": lambda content: complex(*map(_part, sized(content, 2))),
    "text": _read_text,
    "bytes": bytes_of,
    "npscalar": _read_npscalar,
    "size": lambda content: torch.Size(_integers(content)),
    "dtype": lambda content: _named(content, torch.dtype),
    "device": _read_device,
    "layout": lambda content: _named(content, torch.layout),
    "path": lambda content: pathlib.Path(_text_of(content)),
    "date": lambda content: datetime.date.fromisoformat(_text_of(content)),
    "time": _read_time,
    "datetime": _read_datetime,
    "timedelta": lambda content: datetime.timedelta(*_integers(content, 3)),
}
"""Tag → the value of its content. What they raise beside CorruptStore (ValueError, TypeError, OverflowError) is the
caller's to translate."""
