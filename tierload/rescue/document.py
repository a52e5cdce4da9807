"""The state document: which keys show which chunk (docs/FORMAT.md section 8)."""

import binascii
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .files import Cursor
from .report import Damage, Report

Use = tuple[str, str, dict[str, Any]]  # what shows a chunk: its key, tag and content
Own = tuple[list[Any], int, int]  # a rank's own values, the first of its own chunks, and how many it has

_PAIRS = {*"d map odict counter ddict statedict named data folder".split()}  # below them stand keys and values
_LISTS = {*"list tuple set frozenset range slice deque".split()}  # below them stand values
_SAME = {*"object rng enum".split()}  # below them stands a value of the same key
_MEMBER = {"named": "fields", "data": "fields", "folder": "entries", "object": "state", "rng": "state", "enum": "value"}
_MEMBER |= dict.fromkeys(("ddict", "statedict", "deque"), "items")
_PLAIN = {*"text int float complex bytes bytearray npscalar size dtype device layout path".split()}
_PLAIN |= {*"date time datetime timedelta ref pickle link".split()}


def _value(node: Any) -> Any:
    """The Python value of a number, a text, bytes, or a tuple of them; ValueError for anything else."""
    match node:
        case {"text": str(text)}:
            return binascii.a2b_base64(text).decode("utf-8", "surrogatepass")
        case {"bytes": str(text)}:
            return binascii.a2b_base64(text)
        case {"int": str(text)}:
            return int(text, 16)
        case {"float": str(text)}:
            return float(text.partition(":")[0])
        case {"complex": [real, imaginary]}:
            return complex(_value(real), _value(imaginary))
        case {"tuple": [*nodes]}:
            return tuple(map(_value, nodes))
        case dict() | list():
            raise ValueError("no literal")
    return node


def _literal(value: Any) -> str:
    """A Python literal in ASCII, with integers from 2⁶³ on in hexadecimal."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    return hex(value) if isinstance(value, int) and abs(value) >> 63 else ascii(value)


def element(node: Any) -> str:
    """An element of a key: text stands for itself, anything else is `#` and its literal, or its JSON without one."""
    try:
        value = _value(node)
        text = value if isinstance(value, str) else _literal(value)
    except ValueError:
        value, text = node, json.dumps(node, separators=(",", ":"))
    text = text.replace("~", "~0").replace("/", "~1")
    return (re.sub("^#", "~2", text) or "~3") if isinstance(value, str) else f"#{text}"


def _below(tag: str, content: Any) -> Iterable[tuple[str, Any]]:
    """What a value of the document holds: elements, each begun by `/`, and values. No element: the same key."""
    if tag == "object" and "optimizer" in content:
        optimizer, names = content["optimizer"], dict(enumerate(content["optimizer"]["names"]))
        for at, state in optimizer["state"]:
            name = names.get(at) if isinstance(at, int) else None
            yield f"/state/{element(at if name is None else name)}", state
        yield from (("/param_groups", optimizer["groups"]), ("", optimizer["rest"]))
        return
    if tag == "compound":
        yield from [("", content["context"])] if content["form"] == "subclass" else []
        for name, part in content["parts"]:
            yield "/~." + name.replace("~", "~0").replace("/", "~1"), part
        return
    inner = content[_MEMBER[tag]] if tag in _MEMBER else content
    if tag in _PAIRS:
        yield from ((f"/{element(key)}", value) for key, value in (inner.items() if tag == "d" else inner))
        yield from [("", content["metadata"])] if tag == "statedict" else []
    elif tag in _LISTS:
        yield from ((f"/#{number}", value) for number, value in enumerate(inner))
    elif tag in _SAME:
        yield "", inner
    elif tag not in _PLAIN:
        raise Damage(f"unknown tag {tag!r}")


def parse(state: bytes) -> dict[str, Any]:
    """The document; Damage when it is none of version 1."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 6000))  # 500 values inside each other are some thousand brackets
    try:
        document: dict[str, Any] = json.loads(Cursor(state).text(len(state)))
        if document["version"] != 1:
            raise Damage(f"version {document['version']!r}")
        return document
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damage(f"the state document is not readable ({error})") from None
    finally:
        sys.setrecursionlimit(limit)


def uses(state: bytes, chunks: int, where: str, report: Report, own: Sequence[Own] = ()) -> list[list[Use]]:
    """For each chunk, everything in the document that shows it. `own` are the own values of ranks."""
    found: list[list[Use]] = [[] for _ in range(chunks)]
    try:
        root = parse(state)["root"]
    except (Damage, KeyError) as error:
        report.problems.append(f"{where}: {error}; chunks by their own keys")
        return found
    shared = own[0][1] if own else chunks
    stack = [("", root, 0, shared)]
    while stack:
        path, node, first, count = stack.pop()
        if not isinstance(node, dict | list):
            continue
        try:
            content: Any
            ((tag, content),) = node.items() if isinstance(node, dict) else [("list", node)]
            if tag == "own" and own:
                for rank, (values, begin, tensors) in enumerate(own):
                    stack += [(f"/~own/{rank}{path}", values[content], begin, tensors)] if values else []
            elif tag not in ("t", "blob", "ndarray", "file"):
                stack += [(path + name, inner, first, count) for name, inner in _below(tag, content)]
            elif type(number := content["chunk"]) is int and 0 <= number < count:
                found[first + number].append((path[1:], tag, content))
            elif number is not None:
                raise Damage(f"names chunk {number!r} of {count}")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            report.problems.append(f"{where}, key {path[1:]!r}: state document: {type(error).__name__} {error}")
    return found
