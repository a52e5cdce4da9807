"""Where a value stands in the state: its path, the key text of docs/FORMAT.md section 8, and patterns over keys."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

__all__ = ["DEPTH_MAX", "ROOT", "KeyFilter", "OtherKey", "Part", "Path", "element_text", "literal", "unescaped"]

DEPTH_MAX = 500
"""Levels of nesting that a state may have, on writing and on reading."""

_SAME = object()  # the element of a value that stands at its holder's own path, such as an object's state


class OtherKey:
    """An element of a path that Python has no literal for: an Enum member, a date. ``text`` is its JSON text."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Part:
    """An element of a path that no key of a dict has: a part of a compound tensor."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Path:
    """One place in the state: a parent's place and the key or index below it.

    Texts are made when they are asked for: most values never need theirs.
    """

    __slots__ = ("_text", "depth", "element", "parent")

    def __init__(self, parent: Path | None, element: object, depth: int) -> None:
        self.parent = parent
        self.element = element
        self.depth = depth
        self._text: str | None = None

    @classmethod
    def of_text(cls, text: str) -> Path:
        """A place of which only the key text is known."""
        place = cls(ROOT, Part(text), 1)
        place._text = text
        return place

    def child(self, element: object) -> Path:
        """The place of ``element`` (a dict key, an index, a field's name) below this one."""
        return Path(self, element, self.depth + 1)

    def inner(self) -> Path:
        """The same key, one level deeper: the state that an object gave."""
        return Path(self, _SAME, self.depth + 1)

    def is_root(self) -> bool:
        """Whether this is the place of the state itself."""
        return self.parent is None

    def text(self) -> str:
        """The key text; the state itself has the empty one."""
        if self._text is not None:
            return self._text
        line: list[Path] = [self]
        place = self.parent
        while place is not None and place._text is None:
            line.append(place)
            place = place.parent
        text = "" if place is None or place._text is None else place._text
        for below in reversed(line):
            if below.element is not _SAME:
                step = element_text(below.element)
                text = f"{text}/{step}" if text else step
            below._text = text
        return text

    def shown(self) -> str:
        """For messages: ``state['model'][0]``."""
        elements: list[str] = []
        place: Path | None = self
        while place is not None:
            if isinstance(place.element, Part):
                elements.append(f".{place.element.name}")
            elif place.element is not _SAME:
                elements.append(f"[{_brief(place.element)}]")
            place = place.parent
        elements.reverse()
        if len(elements) > 12:
            elements[6:-6] = ["…"]
        return "state" + "".join(elements)


def _brief(element: object) -> str:
    text = literal(element) or repr(element)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-16:]}"


ROOT = Path(None, _SAME, 0)
ROOT._text = ""


def literal(element: object) -> str | None:
    """The Python literal of a key in ASCII, or None when there is none."""
    kind = type(element)
    if kind is tuple:
        parts = [literal(part) for part in element]  # type: ignore[attr-defined]
        if None in parts:
            return None
        return f"({', '.join(str(part) for part in parts)}{',' if len(parts) == 1 else ''})"
    if kind is int:
        return hex(element) if abs(element) >> 63 else str(element)  # type: ignore[arg-type]
    return ascii(element) if kind in (str, float, complex, bool, type(None), bytes) else None


def element_text(element: object) -> str:
    """One element of a key.

    Text stands for itself with ``~``, ``/`` and a leading ``#`` escaped, and ``~3`` for none. Everything else is ``#``
    and its Python literal in ASCII, or where Python has none, its JSON text; a part of a compound tensor is ``~.`` and
    its name.
    """
    if type(element) is str:
        if not element:
            return "~3"
        text = _escaped(element) if "~" in element or "/" in element else element
        return f"~2{text[1:]}" if text[0] == "#" else text
    if type(element) is Part:
        return "~." + _escaped(element.name)
    return "#" + _escaped(literal(element) or repr(element))


def _escaped(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def unescaped(text: str) -> str:
    """The text that an element of a key stands for, where it stands for text."""
    if text == "~3":
        return ""
    return text.replace("~2", "#").replace("~1", "/").replace("~0", "~")


_MAGIC = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\[([*?\[])\]")  # as glob.escape writes a character that stands for itself


def _above(key: str) -> list[str]:
    """The keys of the containers that hold a key, but for the state itself."""
    return [key[:end] for end, letter in enumerate(key) if letter == "/"]


class KeyFilter:
    """Which keys a load wants: shell patterns over whole keys, where ``*`` also matches ``/``.

    A pattern that matches a container's key takes all that is below it: ``model`` means ``model`` and ``model/*``.
    """

    def __init__(self, patterns: Sequence[str] | str) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self._used: set[str] = set()
        # Keys as they are need no search: with a hundred thousand of them, one for each key would take hours.
        self._whole: dict[str, str] = {}
        self._rules: list[tuple[str, re.Pattern[str]]] = []
        for pattern in self.patterns:
            if _MAGIC.search(_ESCAPED.sub("", pattern)):
                rule = re.compile(f"{fnmatch.translate(pattern)}|{fnmatch.translate(pattern + '/*')}")
                self._rules.append((pattern, rule))
            else:
                self._whole[_ESCAPED.sub(r"\1", pattern)] = pattern
        self._elements: dict[str, set[str]] = {}  # of the containers above whole keys, what leads to those
        for key in self._whole:
            for above in _above(key):
                self._elements.setdefault(above, set()).add(key[len(above) + 1 :].split("/", 1)[0])
            self._elements.setdefault("", set()).add(key.split("/", 1)[0])

    def wants(self, path: Path) -> bool:
        """Whether the value at ``path`` is wanted."""
        key = path.text()
        found = [pattern for pattern, rule in self._rules if rule.match(key)]
        if self._whole:
            found += [self._whole[name] for name in (key, *_above(key)) if name in self._whole]
        self._used.update(found)
        return bool(found)

    def below(self, path: Path) -> set[str] | None:
        """The elements (as text) of what is wanted inside the container at ``path``; None when it may be anything."""
        key = path.text()
        if self._rules or any(name in self._whole for name in (key, *_above(key))):
            return None
        return self._elements.get(key, set())

    def unused(self) -> list[str]:
        """The patterns that have matched nothing so far."""
        return [pattern for pattern in self.patterns if pattern not in self._used]
