"""What every reader of the state document asks of a node of its JSON."""

from __future__ import annotations

import struct
from typing import Any

from tierload.errors import CorruptStore

__all__ = ["DAMAGE", "DROPPED", "SCALARS", "fields_of", "tag_of"]

DROPPED = object()
"""What a node decodes to when the key filter leaves nothing of it."""

DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, struct.error)
"""What Python's own constructors raise for content that no writer gives."""

SCALARS = frozenset((str, int, float, bool, type(None)))
"""Types of nodes that are their own value."""


def tag_of(node: object) -> tuple[str, Any]:
    """The tag and content of a node; scalars have the tag ``""`` and arrays ``list``.

    Raises:
        CorruptStore: It is no node.
    """
    if type(node) is dict:
        if len(node) == 1:
            return next(iter(node.items()))
        raise CorruptStore(f"the state document has an object of {len(node)} members where a value belongs")
    return ("list", node) if type(node) is list else ("", node)


def fields_of(content: object, *names: str) -> list[Any]:
    """The members of a tag's content, which has these and no others.

    Raises:
        CorruptStore: It has not.
    """
    if type(content) is not dict or content.keys() != set(names):
        raise CorruptStore(f"the state document has {content!r:.80} where {', '.join(names)} belong")
    return [content[name] for name in names]
