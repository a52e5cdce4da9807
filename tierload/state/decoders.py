"""Nodes of the document that hold others: one generator a tag, which yields the nodes inside and takes their values.

Every generator yields ``(node, place)``, is sent the value (or DROPPED, when the key filter leaves nothing of it), and
returns its own value.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from tierload.errors import CorruptStore
from tierload.state import rng
from tierload.state.assembly import read_compound
from tierload.state.containers import FACTORIES
from tierload.state.keys import Part, Path, element_text
from tierload.state.members import optimizer_node, pairs, type_fields
from tierload.state.nodes import DROPPED, fields_of, tag_of
from tierload.state.rebuilding import blank, compound_tensor, member, named_tuple
from tierload.state.scalars import sized

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["DECODERS", "read_optimizer"]

Decoding = Generator[tuple[object, Path], object, object]


def _sequence(
    reader: Reader, content: object, path: Path, into: list[Any]
) -> Generator[tuple[object, Path], object, bool]:
    """Decode the elements of a sequence, None for those that the key filter drops; whether anything is left."""
    nodes = sized(content)
    if reader.keys is None:
        for index, node in reader.memory.fill_list(nodes, into):
            into[index] = yield node, path.child(index)
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
    below = None if reader.keys is None else reader.keys.below(path)
    for key, element, inner in pairs:
        if below is not None and element_text(element) not in below:
            continue
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
    values: dict[str, Any] = {}
    if reader.keys is not None:
        members = ((name, name, inner) for name, inner in content.items())
        return (yield from _mapping(reader, node, members, path, values))
    reader.keep(node, values)
    for name, inner in reader.memory.fill_dict(content, values):
        values[name] = yield inner, path.child(name)
    return values


def _pairs(reader: Reader, node: object, content: object, path: Path, into: MutableMapping[Any, Any]) -> Decoding:
    """Decode pairs of key and node into a dict."""
    rest = None if reader.keys is not None else reader.memory.fill_pairs(sized(content), into)
    if rest is None:
        return (yield from _mapping(reader, node, pairs(reader, content), path, into))
    reader.keep(node, into)
    for key, inner in rest:
        into[key] = yield inner, path.child(key)
    return into


def _map(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _pairs(reader, node, content, path, {})


def _odict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _pairs(reader, node, content, path, collections.OrderedDict())


def _statedict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    items, metadata = fields_of(content, "items", "metadata")
    value: Any = yield from _pairs(reader, node, items, path, collections.OrderedDict())
    if value is not DROPPED:
        value._metadata = reader.unfiltered(metadata, path.inner())
    return value


def _counter(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    return _pairs(reader, node, content, path, collections.Counter())


def _ddict(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    items, factory = fields_of(content, "items", "factory")
    values: collections.defaultdict[Any, Any] = collections.defaultdict(None if factory is None else FACTORIES[factory])
    return _pairs(reader, node, items, path, values)


def _named(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    name, fields = type_fields(content)
    values = []
    for field, inner in fields:
        values.append((field, (yield inner, path.child(field))))
    if reader.keys is not None:
        return _selected(reader, values, path)
    rebuilt = named_tuple(reader, name, values)
    return rebuilt if rebuilt is not None else tuple(value for _, value in values)


def _data(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    name, fields = type_fields(content)
    instance = None if reader.keys is not None else blank(reader, name, [field for field, _ in fields])
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
    return value if value is DROPPED else member(reader, content, value)


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
        value = yield from read_optimizer(reader, optimizer, path)
    else:
        _, state = fields_of(content, "type", "state")
        value = yield state, path.inner()
    reader.opened(node, False)
    if value is not DROPPED:
        reader.keep(node, value)
    return value


def _compound(reader: Reader, node: object, content: Any, path: Path) -> Decoding:
    """A compound tensor. Its indices, offsets and context may be looked at, so it is made when the bytes are there."""
    if not reader.wants(path):
        return DROPPED
    compound = read_compound(content, path)
    reader.opened(node, True)
    context = (yield compound.context, path.inner()) if compound.form == "subclass" else None
    parts: dict[str, Any] = {}
    for name, inner in compound.parts.items():
        if tag_of(inner)[0] not in ("t", "compound", "ref"):
            raise CorruptStore(f"{path.shown()} has a part {name!r:.80} that is no tensor")
        parts[name] = yield inner, path.child(Part(name))
    reader.opened(node, False)
    reader.late = True
    value = compound_tensor(reader, content, compound, parts, context) if reader.ready else None
    reader.keep(node, value)
    return value


def read_optimizer(reader: Reader, content: object, path: Path) -> Decoding:
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
    "compound": _compound,
    "object": _object,
    "rng": _rng,
}
