"""Values that hold other values, on their way into the document: text, and between it the children."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tierload.errors import UnsupportedValue
from tierload.state.keys import OtherKey, Path, literal
from tierload.state.registry import is_named_tuple, type_name
from tierload.state.scalars import WRITERS, Unwritable, npscalar_json
from tierload.state.texts import base64_text, has_pair, quoted

__all__ = [
    "COUNTED",
    "ENCODERS",
    "FACTORIES",
    "HASHABLE_DEPTH_MAX",
    "Encoder",
    "Parts",
    "encode_dict",
    "encode_fields",
    "encode_sequence",
    "hashable_json",
    "key_element",
    "member_encoder",
    "unsupported",
]

Parts = list[str | tuple[Any, Path]]
"""Text of the document and, between it, values with their places, whose text belongs there."""

Encoder = Callable[[Any, Path], Parts]

FACTORIES: dict[str, type] = {cls.__name__: cls for cls in (list, dict, set, int, float, str, tuple)}
"""The default factories that a defaultdict may name."""

HASHABLE_DEPTH_MAX = 50
"""Levels of nesting inside a set or a dict key."""


def unsupported(value: object, path: Path, advice: str) -> UnsupportedValue:
    """The error for a value that the store cannot hold."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UnsupportedValue(f"{path.shown()} (key {path.text()!r}) is a {name}, which cannot be stored: {advice}")


class _Builder:
    """Collects parts, with scalars already as text: most values of a state are scalars or tensors."""

    def __init__(self, start: str) -> None:
        self.parts: Parts = []
        self._text = [start]
        self._comma = ""

    def add(self, lead: str, value: object, path: Path, element: object, trail: str = "") -> None:
        """One more member: ``lead``, the value's text, ``trail``."""
        write = WRITERS.get(type(value))
        self._text.append(self._comma + lead)
        self._comma = ","
        if write is None:
            self.parts.append("".join(self._text))
            self.parts.append((value, path.child(element)))
            self._text = [trail]
            return
        try:
            self._text.append(write(value))
        except Unwritable as error:
            raise unsupported(value, path.child(element), str(error)) from error
        self._text.append(trail)

    def end(self, text: str) -> Parts:
        """All parts."""
        self._text.append(text)
        self.parts.append("".join(self._text))
        return self.parts


def encode_sequence(values: Iterable[object], path: Path, start: str = "[", end: str = "]") -> Parts:
    """An array of values, each placed by its index."""
    builder = _Builder(start)
    for index, value in enumerate(values):
        builder.add("", value, path, index)
    return builder.end(end)


def _pairs(values: Mapping[Any, object], path: Path, start: str, end: str) -> Parts:
    """An array of ``[key, value]``."""
    builder = _Builder(start)
    for key, value in values.items():
        builder.add(f"[{hashable_json(key, path)},", value, path, key_element(key, path), "]")
    return builder.end(end)


def encode_dict(values: Mapping[Any, object], path: Path) -> Parts:
    """A dict: by name when all keys are text that JSON keeps apart, else as pairs."""
    if not all(type(key) is str and not has_pair(key) for key in values):
        return _pairs(values, path, '{"map":[', "]}")
    builder = _Builder('{"d":{')
    for key, value in values.items():
        builder.add(f"{quoted(key)}:", value, path, key)
    return builder.end("}}")


def _odict(values: collections.OrderedDict[Any, object], path: Path) -> Parts:
    metadata = getattr(values, "_metadata", None)
    if metadata is None:
        return _pairs(values, path, '{"odict":[', "]}")
    parts = _pairs(values, path, '{"statedict":{"items":[', '],"metadata":')
    return [*parts, (metadata, path.inner()), "}}"]


def _ddict(values: collections.defaultdict[Any, object], path: Path) -> Parts:
    factory = values.default_factory
    name = "null"
    if factory is not None:
        if not isinstance(factory, type) or FACTORIES.get(factory.__name__) is not factory:
            raise unsupported(
                values, path, f"its factory is {factory!r}; use one of {', '.join(FACTORIES)}, or store dict(...)"
            )
        name = quoted(factory.__name__)
    return _pairs(values, path, '{"ddict":{"items":[', f'],"factory":{name}}}}}')


def encode_fields(fields: Iterable[tuple[str, object]], path: Path, tag: str, cls: type) -> Parts:
    """A named tuple or dataclass."""
    builder = _Builder(f'{{"{tag}":{{"type":{quoted(type_name(cls))},"fields":[')
    for name, value in fields:
        builder.add(f"[{quoted(name)},", value, path, name, "]")
    return builder.end("]}}")


def _named(value: Any, path: Path) -> Parts:
    return encode_fields(zip(type(value)._fields, value, strict=True), path, "named", type(value))


def _data(value: Any, path: Path) -> Parts:
    names = [field.name for field in dataclasses.fields(value)]
    absent = [name for name in names if not hasattr(value, name)]
    others = sorted(vars(value).keys() - set(names)) if hasattr(value, "__dict__") else []
    if absent or others:
        what = f"it lacks the field {absent[0]!r}" if absent else f"it has an attribute {others[0]!r} that is no field"
        raise unsupported(value, path, f"{what}; make the two agree, or store a dict")
    return encode_fields([(name, getattr(value, name)) for name in names], path, "data", type(value))


def _enum(value: enum.Enum, path: Path) -> Parts:
    name = value.name or ""  # a combination of flags has none
    start = f'{{"enum":{{"type":{quoted(type_name(type(value)))},"name":{quoted(name)},"value":'
    return [start, (value.value, path.inner()), "}}"]


def member_encoder(value: object) -> tuple[Encoder, bool] | None:
    """How a value of a user's own type is written, and whether references count it; None for unknown types."""
    if isinstance(value, np.generic):
        return (lambda scalar, path: [npscalar_json(scalar)]), False
    if isinstance(value, enum.Enum):
        return _enum, False
    if is_named_tuple(type(value)):
        return _named, False
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _data, True
    return None


def hashable_json(value: Any, path: Path, level: int = 0) -> str:
    """The JSON of a dict key or of an element of a set, which holds no tensors and no references."""
    kind = type(value)
    try:
        write = WRITERS.get(kind)
        if write is not None:
            return write(value)
        if level >= HASHABLE_DEPTH_MAX:
            raise Unwritable(f"a set or key nests deeper than {HASHABLE_DEPTH_MAX} levels")
        if kind is bytes:
            return f'{{"bytes":"{base64_text(value)}"}}'
        if kind is frozenset or (kind is set and level == 0):
            texts = sorted(hashable_json(element, path, level + 1) for element in value)
            return f'{{"{kind.__name__}":[{",".join(texts)}]}}'
        encoder = ENCODERS[kind] if kind in (tuple, range, slice) else (member_encoder(value) or (None,))[0]
        if encoder is None:
            raise Unwritable("as a key or in a set, use numbers, text, bytes, tuples, frozensets, Enum or dates")
        parts = encoder(value, path)
    except Unwritable as error:
        raise unsupported(value, path, str(error)) from error
    return "".join(part if type(part) is str else hashable_json(part[0], path, level + 1) for part in parts)


def key_element(key: object, path: Path) -> object:
    """A dict key as an element of a path."""
    return key if type(key) is str or literal(key) is not None else OtherKey(hashable_json(key, path))


def _set(values: Any, path: Path) -> Parts:
    return [hashable_json(values, path)]


ENCODERS: dict[type, Encoder] = {
    list: encode_sequence,
    dict: encode_dict,
    tuple: lambda value, path: encode_sequence(value, path, '{"tuple":[', "]}"),
    set: _set,
    frozenset: _set,
    collections.OrderedDict: _odict,
    collections.defaultdict: _ddict,
    collections.Counter: lambda value, path: _pairs(value, path, '{"counter":[', "]}"),
    collections.deque: lambda value, path: encode_sequence(
        value, path, '{"deque":{"items":[', f'],"maxlen":{"null" if value.maxlen is None else value.maxlen}}}}}'
    ),
    range: lambda value, path: encode_sequence((value.start, value.stop, value.step), path, '{"range":[', "]}"),
    slice: lambda value, path: encode_sequence((value.start, value.stop, value.step), path, '{"slice":[', "]}"),
}
"""Exact type → its encoder."""

COUNTED = frozenset(
    (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
)
"""The types whose identity is kept: a second meeting with the same object is written as ``ref``."""
