"""Values of a program's own types, made again where it allows the type: by the name that the document has for it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from tierload.errors import CorruptStore
from tierload.state.assembly import CompoundNode, assemble, marked
from tierload.state.compounds import is_compound
from tierload.state.members import type_fields
from tierload.state.nodes import fields_of
from tierload.state.registry import is_named_tuple, is_wrapper
from tierload.state.scalars import sized

if TYPE_CHECKING:
    from tierload.state.reader import Reader

__all__ = ["blank", "compound_tensor", "hashable", "member", "named_tuple"]


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
        return member(reader, content, key(content["value"]))
    if tag in ("named", "data"):
        name, fields = type_fields(content)
        values = [(field, key(node)) for field, node in fields]
        build = named_tuple if tag == "named" else _instance
        rebuilt = build(reader, name, values)
        return rebuilt if rebuilt is not None else tuple(value for _, value in values)
    raise CorruptStore(f"the state document has {tag!r:.40} in a key or a set")


def _unknown(reader: Reader, name: str, what: str) -> None:
    reader.note(f"{name} is not among the types passed or registered; its values are loaded as {what}")


def named_tuple(reader: Reader, name: str, values: list[tuple[str, object]]) -> Any:
    """A named tuple of a known type, or None."""
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


def blank(reader: Reader, name: str, fields: Iterable[str]) -> Any:
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
    made = blank(reader, name, [field for field, _ in values])
    if made is not None:
        for field, value in values:
            object.__setattr__(made, field, value)
    return made


def member(reader: Reader, content: object, value: object) -> object:
    """The member of a known Enum; else the value."""
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


def compound_tensor(
    reader: Reader, content: object, compound: CompoundNode, parts: dict[str, Any], context: object
) -> torch.Tensor | dict[str, Any]:
    """A compound tensor of parts whose bytes are there.

    Raises:
        ValueError: They are not the parts of one.
    """

    def make() -> object:
        if compound.form == "subclass":
            made = _subclass(reader, compound, parts, context)
        elif all(isinstance(part, torch.Tensor) and not is_compound(part) for part in parts.values()):
            try:
                made = assemble(compound.form, compound.facts, parts)
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        else:
            raise ValueError("a part is no plain tensor")
        return marked(made, compound.kind, compound.grad) if isinstance(made, torch.Tensor) else made

    return reader.once(content, make)  # type: ignore[no-any-return]


def _subclass(reader: Reader, compound: CompoundNode, parts: dict[str, Any], context: object) -> Any:
    """A tensor of a known subclass whose parts are tensors too; else a dict of these, and of its context."""
    name, shape, stride = (compound.facts[fact] for fact in ("type", "shape", "stride"))
    cls = reader.types.get(name)
    if cls is None or not is_wrapper(cls):
        _unknown(reader, name, "dicts of their parts")
        cls = None
    if cls is None or not all(isinstance(part, torch.Tensor) for part in parts.values()):
        return {**parts, "__tensor_flatten__": context}
    unflatten: Any = cls.__tensor_unflatten__  # type: ignore[attr-defined]
    try:
        made: Any = unflatten(dict(parts), context, torch.Size(shape), tuple(stride))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name}.__tensor_unflatten__: {error}") from error
    sizes = list(made.shape) if isinstance(made, torch.Tensor) else None
    if type(made) is not cls or sizes != shape:
        raise ValueError(f"{name}.__tensor_unflatten__ gave a {type(made).__qualname__}")
    return made
