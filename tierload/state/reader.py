"""Reads the state document: nodes → values, with the memory of their tensors made and still to be filled.

A node is decoded by a generator that asks for the nodes inside it, so that depth costs no recursion. Decoding happens
when a load is planned, which checks the whole document, and once more when the bytes are there if some value needs
them (bytes, random generators); tensors, arrays and files are made only once.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch

from tierload import _native
from tierload.errors import CorruptStore, UnsupportedFormat, UnsupportedValue
from tierload.state import decoders, file_nodes, members, rebuilding
from tierload.state.containers import HASHABLE_DEPTH_MAX, hashable_json, key_element
from tierload.state.keys import DEPTH_MAX, ROOT, KeyFilter, OtherKey, Path
from tierload.state.memory import Memory
from tierload.state.nodes import DAMAGE, DROPPED, SCALARS, fields_of, tag_of
from tierload.state.registry import known_types
from tierload.state.scalars import READERS, read_numpy_dtype, sized
from tierload.state.texts import bytes_of, parse
from tierload.state.views import TensorView, read_view, whole_chunk
from tierload.types import ChunkTable

__all__ = ["PENDING", "Reader"]

PENDING = object()
"""What a step gives that has put a generator onto the stack."""

Decoding = Generator[tuple[object, Path], object, object]


class Reader:
    """One document and the chunks that it names.

    ``keys`` restricts what is decoded; ``ready`` says that the bytes of all chunks have been read; ``late`` that a
    value needed them and has to be decoded again. ``users`` are the places that the bytes of each chunk go to, but for
    plain tensors, whose place is the chunk's key.
    """

    def __init__(
        self,
        document: bytes,
        chunks: ChunkTable,
        *,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        keys: KeyFilter | None = None,
    ) -> None:
        parsed = parse(document)
        if type(parsed) is not dict or type(parsed.get("version")) is not int or "root" not in parsed:
            raise CorruptStore("the state document is no state of tierload")
        if parsed["version"] != 1:
            raise UnsupportedFormat(f"the state document has version {parsed['version']}; this release reads 1")
        self.root: object = parsed["root"]
        self.memory = Memory(chunks)
        self.types = known_types(types)
        self.keys = keys
        self.ready = False
        self.late = False
        self.notes: dict[str, None] = {}
        self.users: dict[int, list[Path]] = defaultdict(list)
        self._allow_pickle = allow_pickle
        self._views: dict[int, TensorView] = {}
        self._made: dict[int, object] = {}  # tensors, compound ones too, arrays, files: by their content
        self._tied: dict[TensorView, torch.Tensor] = {}
        self._objects: dict[int, object] = {}  # containers: by their node
        self._open: set[int] = set()
        self.has_compounds = b'"compound"' in document  # it may: the word can stand in a text
        self._numbered: list[object] | None = self._number() if b'"ref"' in document else None
        self._checked = self._numbered is not None

    def twin(self) -> Reader:
        """Another one of the same document, which is parsed and checked once, with memory of its own."""
        other = copy.copy(self)
        other._views, other._made, other._tied, other._objects, other._open = {}, {}, {}, {}, set()
        other.notes = {}
        other.restart()
        return other

    def whole(self) -> object:
        """The whole state, or what the key filter leaves of it."""
        return self.value(self.root, ROOT)

    def arrived(self) -> None:
        """The bytes of all chunks are there: what is decoded from now on is final."""
        self.ready = True
        self._objects.clear()

    def restart(self) -> None:
        """Nothing has been decoded: what is from now on gets memory of its own."""
        self.memory = Memory(self.memory.chunks)
        self.ready = self.late = False
        self.users = defaultdict(list)
        for known in (self._views, self._made, self._tied, self._objects):
            known.clear()

    def release(self) -> None:
        """Nothing will be decoded any more: let go of the document."""
        self.root = None
        self._views.clear()
        self._made.clear()
        self._tied.clear()
        self._objects.clear()
        self._numbered = None

    def check(self) -> None:
        """Look at every node once, so that a target is not compared with a damaged document.

        Raises:
            CorruptStore: A node is not of the form that its tag has.
        """
        if not self._checked:
            self._number()
            self._checked = True

    def value(self, node: object, path: Path) -> Any:
        """The value of a node.

        Raises:
            CorruptStore: The document is damaged.
            UnsupportedValue: It holds something that was pickled, or a dtype that this torch lacks.
        """
        stack: list[Decoding] = []
        try:
            value = self._step(node, path, stack)
            while stack:
                try:
                    node, path = stack[-1].send(None if value is PENDING else value)
                except StopIteration as stop:
                    stack.pop()
                    value = stop.value
                else:
                    value = self._step(node, path, stack)
        except DAMAGE as error:
            if isinstance(error, (CorruptStore, UnsupportedValue, UnsupportedFormat)):
                raise
            raise CorruptStore(f"{path.shown()} cannot be rebuilt: {error!r}") from error
        return value

    def unfiltered(self, node: object, path: Path) -> Any:
        """The value of a node that is one thing to the user, whatever the key filter says of its parts."""
        keys, self.keys = self.keys, None
        try:
            return self.value(node, path)
        finally:
            self.keys = keys

    def keep(self, node: object, value: object) -> None:
        """Remember the container that a node became, for references to it."""
        if self._numbered is not None:
            self._objects[id(node)] = value

    def forget(self, node: object) -> None:
        """A container that the key filter left empty is not there for references either."""
        self._objects.pop(id(node), None)

    def opened(self, node: object, is_open: bool) -> None:
        """Between these two calls a reference to the node has nothing to point at."""
        (self._open.add if is_open else self._open.discard)(id(node))

    def note(self, text: str) -> None:
        """A remark for the user, once."""
        self.notes[text] = None

    def wants(self, path: Path) -> bool:
        """Whether the key filter lets a value at ``path`` through."""
        return self.keys is None or self.keys.wants(path)

    def once(self, content: object, make: Callable[[], object]) -> Any:
        """What ``make`` gives for the content of a node, however often that is decoded."""
        if id(content) not in self._made:
            self._made[id(content)] = make()
        return self._made[id(content)]

    def target(self, number: object) -> object:
        """The node that a ``ref`` names."""
        if type(number) is not int or self._numbered is None or not 0 <= number < len(self._numbered):
            raise CorruptStore(f"the state document refers to container {number!r:.40}")
        return self._numbered[number]

    def view(self, content: Any, path: Path) -> TensorView:
        """A checked ``t``; its place is noted as a user of the chunk."""
        view = self._views.get(id(content))
        if view is None:
            view = self._views[id(content)] = read_view(content, self.memory)
            self.users[view.chunk].append(path)
        return view

    def key(self, node: object, level: int = 0) -> Any:
        """The value of a dict key or an element of a set."""
        if type(node) in SCALARS:
            return node
        tag, content = tag_of(node)
        if level >= HASHABLE_DEPTH_MAX:
            raise CorruptStore(f"a key or set in the state document nests deeper than {HASHABLE_DEPTH_MAX} levels")
        if tag in READERS:
            return READERS[tag](content)
        return rebuilding.hashable(self, tag, content, lambda inner: self.key(inner, level + 1))

    def element(self, node: object, key: object) -> object:
        """A decoded dict key as an element of a path: the one that the writer used, whatever types are known here."""
        if type(key) in SCALARS and type(node) in SCALARS:
            return key
        text = json.dumps(node, separators=(",", ":"))
        try:
            return key_element(key, ROOT) if hashable_json(key, ROOT) == text else OtherKey(text)
        except UnsupportedValue:
            return OtherKey(text)

    def _step(self, node: object, path: Path, stack: list[Decoding]) -> object:
        """The value of a node that holds no others; else its generator goes onto the stack."""
        if type(node) in SCALARS:
            return node if self.keys is None or self.keys.wants(path) else DROPPED
        if path.depth > DEPTH_MAX:
            raise CorruptStore(f"the state document nests deeper than {DEPTH_MAX} levels")
        tag, content = tag_of(node)
        if tag == "ref":
            node = self.target(content)
            if id(node) in self._objects:
                return self._objects[id(node)]
            if id(node) in self._open:
                raise CorruptStore(f"the state document refers to container {content} inside itself")
            tag, content = tag_of(node)
        leaf = _LEAVES.get(tag)
        if leaf is not None:
            if self.keys is not None and not self.keys.wants(path):
                return DROPPED
            value = leaf(self, content, path)
            self.keep(node, value)
            return value
        decode = decoders.DECODERS.get(tag)
        if decode is None:
            raise CorruptStore(f"the state document has an unknown tag {tag!r:.40}")
        stack.append(decode(self, node, content, path))
        return PENDING

    def _number(self) -> list[object]:
        """All containers that references count, in writing order."""
        found: list[object] = []
        stack: list[tuple[object, Path]] = [(self.root, ROOT)]
        while stack:
            node, path = stack.pop()
            if type(node) in SCALARS:
                continue
            if path.depth > DEPTH_MAX:
                raise CorruptStore(f"the state document nests deeper than {DEPTH_MAX} levels")
            tag, content = tag_of(node)
            if tag not in decoders.DECODERS and tag not in _LEAVES and tag != "ref":
                raise CorruptStore(f"the state document has an unknown tag {tag!r:.40}")
            if tag in members.COUNTED:
                found.append(node)
            try:
                if (tag == "d" and type(content) is dict) or tag == "list":
                    below = [(child, path.child(key)) for key, child in _native.inner_nodes(content)]
                else:
                    below = [(child, place) for place, child in members.members(self, tag, content, path)]
                stack.extend(reversed(below))
            except DAMAGE as error:
                raise CorruptStore(f"{path.shown()} cannot be read: {error!r}") from error
        return found

    def _tensor(self, content: Any, path: Path) -> object:
        made = self._made.get(id(content))
        if made is not None:
            return made
        chunk = whole_chunk(content, self.memory)
        made = None if chunk is None else self.memory.whole(chunk.number)
        if chunk is not None and made is not None:
            self.users[chunk.number].append(path)
        else:
            view = self.view(content, path)
            made = self._tied.get(view) if view.tied else None
            if made is None:
                made = view.tensor(self.memory)
                if view.tied:
                    self._tied[view] = made
        self._made[id(content)] = made
        return made

    def _array(self, content: Any, path: Path) -> object:
        made = self._made.get(id(content))
        if made is None:
            number, dtype, shape, order = fields_of(content, "chunk", "dtype", "shape", "order")
            if len(sized(shape)) > 64 or any(type(count) is not int for count in shape) or order not in ("C", "F"):
                raise CorruptStore(f"{path.shown()} is a damaged array")
            made = self._made[id(content)] = self.memory.array(number, shape, read_numpy_dtype(dtype), order)
            self.users[number].append(path)
        return made

    def raw(self, number: Any, content: object, path: Path) -> np.ndarray[Any, Any]:
        """The bytes of a chunk of raw bytes."""
        made = self._made.get(id(content))
        if made is None:
            chunk, _ = self.memory.row(number)
            made = self._made[id(content)] = self.memory.array(number, (chunk.nbytes,), np.dtype(np.uint8), "C")
            self.users[number].append(path)
        assert isinstance(made, np.ndarray)
        return made

    def _blob(self, content: Any, path: Path) -> object:
        number, kind = fields_of(content, "chunk", "as")
        if kind not in ("bytes", "bytearray"):
            raise CorruptStore(f"{path.shown()} is damaged")
        raw = self.raw(number, content, path)
        self.late = True
        data = raw.tobytes() if self.ready else b""
        return data if kind == "bytes" else bytearray(data)

    def _pickle(self, content: Any, path: Path) -> object:
        if not self._allow_pickle:
            raise UnsupportedValue(
                f"{path.shown()} (key {path.text()!r}) was pickled, which can run any code: if you trust the store, "
                "pass allow_pickle=True"
            )
        return self.once(content, lambda: pickle.loads(bytes_of(content)))


Leaf = Callable[[Reader, Any, Path], object]


def _scalar(read: Callable[[Any], object]) -> Leaf:
    return lambda reader, content, path: read(content)


_LEAVES: dict[str, Leaf] = {tag: _scalar(read) for tag, read in READERS.items()} | {
    "t": Reader._tensor,
    "ndarray": Reader._array,
    "blob": Reader._blob,
    "bytearray": lambda reader, content, path: bytearray(bytes_of(content)),
    "file": file_nodes.read_file,
    "folder": file_nodes.read_folder,
    "pickle": Reader._pickle,
    "set": lambda reader, content, path: {reader.key(node) for node in sized(content)},
    "frozenset": lambda reader, content, path: frozenset(reader.key(node) for node in sized(content)),
}
