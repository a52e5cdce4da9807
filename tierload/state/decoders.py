"""Nodes of the document that hold others: one generator a tag, which yields the nodes inside and takes their values.

Every generator yields ``(node, place)``, is sent the value (or DROPPED, when the key filter leaves nothing of it), and
returns its own value.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Generator, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from tierload.errors import CorruptStore
from tierload.state import rng
from tierload.state.containers import FACTORIES
from tierload.state.keys import Path
from tierload.state.nodes import DROPPED, SCALARS, fields_of, tag_of
from tierload.state.registry import is_named_tuple
from tierload.state.scalars import sized

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["COUNTED", "DECODERS", "OptimizerNode", "entries", "hashable", "members", "optimizer_node"]

Decoding = Generator[tuple[object, Path], object, object]

COUNTED = frozenset("list d map odict statedict ddict counter deque set bytearray blob ndarray data object rng".split())
"""Tags of the containers that a ``ref`` counts."""


@dataclasses.dataclass(slots=True)
class OptimizerNode:
    """The parts of an optimizer in the document; ``states`` are by position, or by what else torch keys them with."""

    names: list[str | None]
    groups: tuple[object, Path]
    states: list[tuple[Any, object, Path]]
    rest: tuple[object, Path]


def optimizer_node(reader: Reader, content: object, path: Path) -> OptimizerNode:
    """Check and take apart the ``optimizer`` of an object."""
    labels, groups, states, rest = fields_of(content, "names", "groups", "state", "rest")
    names = [None if label is None else reader.key(label) for label in sized(labels)]
    if any(name is not None and type(name) is not str for name in names) or tag_of(rest)[0] not in ("d", "map"):
        raise CorruptStore(f"{path.shown()} is a damaged optimizer")
    below = path.child("state")
    entries = []
    seen: set[int | str] = set()
    for label, node in (sized(pair, 2) for pair in sized(states)):
        key = reader.key(label)
        if type(key) not in (int, str) or key in seen:
            raise CorruptStore(f"{path.shown()} has a damaged state of {key!r:.40}")
        seen.add(key)
        element = reader.element(label, key)
        if type(key) is int and 0 <= key < len(names):
            element = names[key] or key
        entries.append((key, node, below.child(element)))
    return OptimizerNode(names, (groups, path.child("param_groups")), entries, (rest, path.inner()))


def entries(reader: Reader, tag: str, content: Any, path: Path) -> list[tuple[Any, Path, object]]:
    """Key or index, place and node of everything in a container."""
    if tag == "d":
        if type(content) is not dict:
            raise CorruptStore(f"{path.shown()} is no dict in the state document")
        return [(name, path.child(name), node) for name, node in content.items()]
    if tag in ("list", "tuple"):
        return [(index, path.child(index), node) for index, node in enumerate(sized(content))]
    if tag in ("map", "odict", "counter"):
        return [(key, path.child(element), node) for key, element, node in _pairs(reader, content)]
    if tag in ("ddict", "statedict"):
        items, _ = fields_of(content, "items", "factory" if tag == "ddict" else "metadata")
        return [(key, path.child(element), node) for key, element, node in _pairs(reader, items)]
    if tag == "deque":
        items, _ = fields_of(content, "items", "maxlen")
        return [(index, path.child(index), node) for index, node in enumerate(sized(items))]
    if tag in ("named", "data"):
        return [(name, path.child(name), node) for name, node in _fields(content)[1]]
    return []


def members(reader: Reader, tag: str, content: Any, path: Path) -> list[tuple[Path, object]]:
    """Place and node of everything inside a node, in writing order."""
    below = [(place, node) for _, place, node in entries(reader, tag, content, path)]
    if tag == "statedict":
        return [*below, (path.inner(), content["metadata"])]
    if tag == "object" and type(content) is dict and "optimizer" in content:
        _, optimizer = fields_of(content, "type", "optimizer")
        parts = optimizer_node(reader, optimizer, path)
        states = [(place, node) for _, node, place in parts.states]
        return [(parts.groups[1], parts.groups[0]), *states, (parts.rest[1], parts.rest[0])]
    if tag in ("object", "rng"):
        _, state = fields_of(content, "type" if tag == "object" else "kind", "state")
        return [(path.inner(), state)]
    if tag == "enum":
        return [(path.inner(), fields_of(content, "type", "name", "value")[2])]
    return below


def hashable(reader: Reader, tag: str, content: Any, key: Callable[[object], Any]) -> Any:
    """The value of a tag that can stand in a key or a set and holds others; ``key`` decodes these."""
    if tag == "tuple":
        return tuple(key(node) for node in sized(content))
    if tag == "frozenset":
        return frozenset(key(node) for node in sized(content))
    if tag == "range":
        return range(*(key(node) for node in sized(content, 3)))
    if tag == "slice":
        return slice(*(key(node) for node in sized(content, 3)))
    if tag == "enum":
        return _member(reader, content, key(content["value"]))
    if tag in ("named", "data"):
        name, fields = _fields(content)
        values = [(field, key(node)) for field, node in fields]
        build = _named_tuple if tag == "named" else _instance
        rebuilt = build(reader, name, values)
        return rebuilt if rebuilt is not None else tuple(value for _, value in values)
    raise CorruptStore(f"the state document has {tag!r:.40} in a key or a set")


def _pairs(reader: Reader, content: object) -> Iterable[tuple[Any, object, object]]:
    """Key, element of the path, and node of each ``[key, value]``."""
    for label, node in (sized(pair, 2) for pair in sized(content)):
        key = reader.key(label)
        yield key, reader.element(label, key), node


def _fields(content: object) -> tuple[str, list[tuple[str, object]]]:
    """The type's name and the fields of a named tuple or dataclass."""
    name, fields = fields_of(content, "type", "fields")
    pairs = [(field, node) for field, node in (sized(pair, 2) for pair in sized(fields))]
    names = [field for field, _ in pairs]
    if type(name) is not str or any(type(field) is not str for field in names) or len(set(names)) != len(names):
        raise CorruptStore(f"the state document has damaged fields of {name!r:.80}")
    return name, pairs


def _unknown(reader: Reader, name: str, what: str) -> None:
    reader.note(f"{name} is not among the types passed or registered; its values are loaded as {what}")


def _named_tuple(reader: Reader, name: str, values: list[tuple[str, object]]) -> Any:
    cls = reader.types.get(name)
    if cls is None or not is_named_tuple(cls):
        _unknown(reader, name, "tuples")
        return None
    fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    given = dict(values)
    defaults = getattr(cls, "_field_defaults", {})
    if not given.keys() <= set(fields) or any(field not in given and field not in defaults for field in fields):
        reader.note(f"{name} has other fields now ({', '.join(fields)}); its values are loaded as tuples")
        return None
    return cls(**given)


def _blank(reader: Reader, name: str, fields: Iterable[str]) -> Any:
    """An instance of a known dataclass with its defaults for what is not stored, or None."""
    cls = reader.types.get(name)
    if cls is None or not dataclasses.is_dataclass(cls):
        _unknown(reader, name, "dicts")
        return None
    stored, known = set(fields), {field.name: field for field in dataclasses.fields(cls)}
    fresh: dict[str, object] = {}
    for field in known.values():
        if field.name in stored:
            continue
        if field.default_factory is not dataclasses.MISSING:
            fresh[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            fresh[field.name] = field.default
        else:
            break
    if not stored <= known.keys() or stored | fresh.keys() != known.keys():
        reader.note(f"{name} has other fields now ({', '.join(known)}); its values are loaded as dicts")
        return None
    value = object.__new__(cls)
    for field_name, default in fresh.items():
        object.__setattr__(value, field_name, default)
    return value


def _instance(reader: Reader, name: str, values: list[tuple[str, object]]) -> Any:
    instance = _blank(reader, name, [field for field, _ in values])
    if instance is not None:
        for field, value in values:
            object.__setattr__(instance, field, value)
    return instance


def _member(reader: Reader, content: object, value: object) -> object:
    name, label, _ = fields_of(content, "type", "name", "value")
    cls = reader.types.get(name)
    if cls is None or not issubclass(cls, enum.Enum):
        _unknown(reader, name, "plain values")
        return value
    if type(label) is str and label in cls.__members__:
        return cls.__members__[label]
    try:
        return cls(value)
    except ValueError:
        reader.note(f"{name} has no member {label} now; its value is loaded")
        return value


def _sequence(
    reader: Reader, content: object, path: Path, into: list[Any]
) -> Generator[tuple[object, Path], object, bool]:
    """Decode the elements of a sequence, None for those that the key filter drops; whether anything is left."""
    nodes = sized(content)
    if reader.keys is None and SCALARS.issuperset(map(type, nodes)):
        into.extend(nodes)
        return True
    kept = not nodes and reader.wants(path)
    for index, node in enumerate(nodes):
        value = yield node, path.child(index)
        kept = kept or value is not DROPPED
        into.append(None if value is DROPPED else value)
    return kept


def _list(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    values: list[Any] = []
    reader.keep(node, values)
    if (yield from _sequence(reader, content, path, values)):
        return values
    reader.forget(node)
    return DROPPED


def _tuple(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    values: list[Any] = []
    kept = yield from _sequence(reader, content, path, values)
    return tuple(values) if kept else DROPPED


def _deque(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    items, length = fields_of(content, "items", "maxlen")
    values: collections.deque[Any] = collections.deque(maxlen=length)
    reader.keep(node, values)
    into: list[Any] = []
    if (yield from _sequence(reader, items, path, into)):
        values.extend(into)
        return values
    reader.forget(node)
    return DROPPED


def _mapping(
    reader: Reader,
    node: object,
    pairs: Iterable[tuple[Any, object, object]],
    path: Path,
    into: MutableMapping[Any, Any],
) -> Decoding:
    """Decode ``(key, element, node)`` into a dict."""
    reader.keep(node, into)
    kept = reader.keys is None or reader.keys.wants(path)
    for key, element, inner in pairs:
        value = yield inner, path.child(element)
        if value is DROPPED:
            continue
        if key in into:  # keys of types that are unknown here may have become equal
            key = str(element)
            reader.note(f"{path.shown()} has keys that are equal once loaded; the text of one is used")
        if key in into:
            raise CorruptStore(f"{path.shown()} has the key {key!r:.80} twice")
        into[key] = value
        kept = True
    if kept:
        return into
    reader.forget(node)
    return DROPPED


def _dict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    if type(content) is not dict:
        raise CorruptStore(f"{path.shown()} is no dict in the state document")
    if reader.keys is None and SCALARS.issuperset(map(type, content.values())):
        values = dict(content)
        reader.keep(node, values)
        return values
    return (yield from _mapping(reader, node, ((name, name, inner) for name, inner in content.items()), path, {}))


def _map(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _mapping(reader, node, _pairs(reader, content), path, {})


def _odict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _mapping(reader, node, _pairs(reader, content), path, collections.OrderedDict())


def _statedict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    items, metadata = fields_of(content, "items", "metadata")
    value = yield from _mapping(reader, node, _pairs(reader, items), path, collections.OrderedDict())
    if value is not DROPPED:
        value._metadata = reader.unfiltered(metadata, path.inner())  # type: ignore[attr-defined]
    return value


def _counter(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _mapping(reader, node, _pairs(reader, content), path, collections.Counter())


def _ddict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    items, factory = fields_of(content, "items", "factory")
    values: collections.defaultdict[Any, Any] = collections.defaultdict(None if factory is None else FACTORIES[factory])
    return _mapping(reader, node, _pairs(reader, items), path, values)


def _named(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    name, fields = _fields(content)
    values = []
    for field, inner in fields:
        values.append((field, (yield inner, path.child(field))))
    if reader.keys is not None:
        return _selected(reader, values, path)
    rebuilt = _named_tuple(reader, name, values)
    return rebuilt if rebuilt is not None else tuple(value for _, value in values)


def _data(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    name, fields = _fields(content)
    instance = None if reader.keys is not None else _blank(reader, name, [field for field, _ in fields])
    plain: dict[str, Any] = {}
    reader.keep(node, plain if instance is None else instance)
    for field, inner in fields:
        value = yield inner, path.child(field)
        if instance is not None:
            object.__setattr__(instance, field, value)
        elif value is not DROPPED:
            plain[field] = value
    if instance is not None:
        return instance
    if not plain and not reader.wants(path):
        reader.forget(node)
        return DROPPED
    return plain


def _selected(reader: Reader, values: list[tuple[str, object]], path: Path) -> object:
    """What the key filter leaves of a named tuple: a dict of fields."""
    kept = {field: value for field, value in values if value is not DROPPED}
    return kept if kept or reader.wants(path) else DROPPED


def _whole(reader: Reader, path: Path, *nodes: tuple[object, Path]) -> list[Any] | None:
    """The values of nodes that the user sees as one thing; None where the key filter drops it."""
    return [reader.unfiltered(node, place) for node, place in nodes] if reader.wants(path) else None


def _enum(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    value = yield content["value"], path.inner()
    return value if value is DROPPED else _member(reader, content, value)


def _range(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    parts = _whole(reader, path, *((inner, path.inner()) for inner in sized(content, 3)))
    return DROPPED if parts is None else range(*parts)
    yield


def _slice(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    parts = _whole(reader, path, *((inner, path.inner()) for inner in sized(content, 3)))
    return DROPPED if parts is None else slice(*parts)
    yield


def _rng(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    kind, state = fields_of(content, "kind", "state")
    reader.opened(node, True)
    parts = _whole(reader, path, (state, path.inner()))
    reader.opened(node, False)
    if parts is None:
        return DROPPED
    reader.late = True
    value = rng.rebuild(kind, parts[0]) if reader.ready else None
    reader.keep(node, value)
    return value
    yield


def _object(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    reader.opened(node, True)
    if type(content) is dict and "optimizer" in content:
        _, optimizer = fields_of(content, "type", "optimizer")
        value = yield from _optimizer(reader, optimizer, path)
    else:
        _, state = fields_of(content, "type", "state")
        value = yield state, path.inner()
    reader.opened(node, False)
    if value is not DROPPED:
        reader.keep(node, value)
    return value


def _optimizer(reader: Reader, content: object, path: Path) -> Decoding:
    """An optimizer in the form of torch's ``state_dict()``."""
    node = optimizer_node(reader, content, path)
    groups = yield node.groups
    states: dict[Any, Any] = {}
    for key, inner, place in node.states:
        state = yield inner, place
        if state is not DROPPED:
            states[key] = state
    rest = yield node.rest
    if groups is DROPPED and not states and rest is DROPPED:
        return DROPPED
    whole: dict[str, Any] = {"state": states, "param_groups": [] if groups is DROPPED else groups}
    if isinstance(rest, dict):  # not so where the key filter drops it
        whole |= rest
    return whole | {"names": node.names}


DECODERS: dict[str, Callable[[Reader, object, Any, Path], Decoding]] = {
    "list": _list,
    "d": _dict,
    "map": _map,
    "tuple": _tuple,
    "odict": _odict,
    "statedict": _statedict,
    "ddict": _ddict,
    "deque": _deque,
    "counter": _counter,
    "named": _named,
    "data": _data,
    "enum": _enum,
    "range": _range,
    "slice": _slice,
    "object": _object,
    "rng": _rng,
}
