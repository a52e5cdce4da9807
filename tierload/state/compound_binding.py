"""Loading into tensors that are made of others. They stay the same objects; what happens to their memory differs:

* a wrapper subclass: its parts are filled in place, like any tensors, when its context is the stored one;
* quantized: integers, scale and zero point are copied into it;
* sparse: it gets new indices and values, since their number may differ;
* nested: it is exchanged for a new one (``torch.utils.swap_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tierload.errors import KeyMismatch
from tierload.state.assembly import CompoundNode, read_compound
from tierload.state.compounds import COMPRESSED, QUANTIZED, Compound, is_compound, kind_of_tensor, take_apart
from tierload.state.containers import unsupported
from tierload.state.fills import Fill, obstacle
from tierload.state.flatten import flatten
from tierload.state.keys import Part, Path
from tierload.state.memory import NO_CHUNKS
from tierload.state.nodes import tag_of
from tierload.state.reader import Reader
from tierload.state.scalars import Unwritable
from tierload.state.targets import Put

if TYPE_CHECKING:
    from tierload.state.bind import Binder

__all__ = ["bind_compound", "fill_if_alike", "is_handed_over"]

Step = Fill | Callable[[], None]


def bind_compound(binder: Binder, live: torch.Tensor, node: object, path: Path, put: Put | None) -> None:
    """Bind a compound tensor, as a whole. What differs is told under its key, or under that of one of its parts."""
    steps = _steps(binder, live, node, path, put) if binder.wants_any(node, path) else None
    if steps is None:
        return
    for step in steps:
        if isinstance(step, Fill):
            binder.fill(step)
        else:
            binder.actions.append(step)
    binder.loaded.append(path)


def fill_if_alike(binder: Binder, live: torch.Tensor, node: object, path: Path) -> bool:
    """Fill the parts of a wrapper subclass when the store has the same for it; whether it has."""
    tag, content = tag_of(node)
    if tag != "compound" or live.is_meta:
        return False
    stored, own = read_compound(content, path), _apart(live, path)
    if own.form != "subclass" or _differences(binder.reader, own, stored) or own.parts.keys() != stored.parts.keys():
        return False
    for name, part in own.parts.items():
        inner, place = stored.parts[name], path.child(Part(name))
        if is_compound(part) or tag_of(inner)[0] != "t":
            return False
        view = binder.reader.view(tag_of(inner)[1], place)
        if tuple(part.shape) != view.shape or part.dtype is not view.row.torch or obstacle(part, view):
            return False
    bind_compound(binder, live, node, path, None)
    return True


def is_handed_over(binder: Binder, live: object, node: object, path: Path) -> bool:
    """Whether what is stored can be given to a module's own ``load_state_dict``; if not, that is reported."""
    tag, content = tag_of(node)
    if tag != "compound":
        if is_compound(live) and isinstance(live, torch.Tensor):
            binder.mismatch(kind_of_tensor(live), node, path)
            return False
        return True
    stored = read_compound(content, path)
    if isinstance(live, torch.Tensor) and (
        not is_compound(live) or _differences(binder.reader, _apart(live, path), stored)
    ):
        binder.mismatch(kind_of_tensor(live), node, path)
        return False
    if stored.form == "subclass" and stored.facts["type"] not in binder.reader.types:
        binder.problems.dtypes(path, f"is {stored.told()} in the store; pass the class among types=[...] to load it")
        return False
    return True


def _apart(live: torch.Tensor, path: Path) -> Compound:
    try:
        return take_apart(live)
    except Unwritable as error:
        raise unsupported(live, path, str(error)) from error


def _steps(binder: Binder, live: torch.Tensor, node: object, path: Path, put: Put | None) -> list[Step] | None:
    """What is to be done once the bytes are there; None where the two differ, which is reported."""
    tag, content = tag_of(node)
    if tag == "ref":
        tag, content = tag_of(node := binder.reader.target(content))
    if tag != "compound":
        binder.mismatch(kind_of_tensor(live), node, path)
        return None
    if live.is_meta:
        what = kind_of_tensor(live)
        binder.problems.missing(path, f"is {what} on the meta device in the target; give it memory before loading")
        return None
    stored, own = read_compound(content, path), _apart(live, path)
    differences = _differences(binder.reader, own, stored)
    for is_shape, here, there in differences:
        report = binder.problems.shapes if is_shape else binder.problems.dtypes
        report(path, f"{'has' if is_shape else 'is'} {here} in the target and {there} in the store")
    if differences:
        return None
    if own.form == "subclass":
        return _part_steps(binder, own, stored, path)
    if not _same_parts(binder, own, stored, path):
        return None
    binder.reader.unfiltered(node, path)  # checks it, and makes the memory that it needs
    return [lambda: _overwrite(live, binder.reader.unfiltered(node, path), path, put)]


def _part_steps(binder: Binder, own: Compound, stored: CompoundNode, path: Path) -> list[Step] | None:
    """Those of a wrapper subclass: all of its parts, or none."""
    if own.parts.keys() != stored.parts.keys():
        here, there = ", ".join(own.parts), ", ".join(stored.parts)
        binder.problems.dtypes(path, f"is made of {here} in the target and of {there} in the store")
        return None
    steps: list[Step] = []
    complete = True
    for name, part in own.parts.items():
        inner, place = stored.parts[name], path.child(Part(name))
        if is_compound(part):
            below = _steps(binder, part, inner, place, None)
            steps += below or []
            complete = complete and below is not None
        elif (view := binder.matching_view(part, inner, place)) is not None:
            steps.append(Fill(part, view, place))
        else:
            complete = False
    return steps if complete else None


def _differences(reader: Reader, own: Compound, stored: CompoundNode) -> list[tuple[bool, str, str]]:
    """What differs of the whole: whether it is of a shape, what the target has, and what the store has."""
    if own.form != stored.form or own.facts.get("type") != stored.facts.get("type"):
        return [(False, CompoundNode(own.form, own.facts, {}, None, "", False).told(), stored.told())]
    found = []
    if own.facts.get("dtype") != stored.facts.get("dtype"):
        found.append((False, f"torch.{own.facts['dtype']}", f"torch.{stored.facts['dtype']}"))
    for name in ("shape", "axis", "ragged"):
        if own.facts.get(name) != stored.facts.get(name):
            found.append((True, f"{name} {own.facts[name]}", f"{name} {stored.facts[name]}"))
    if own.form == "subclass" and not found and not _same_context(reader, own.context, stored.context):
        found.append((False, f"of the context {own.context!r:.100}", "of another"))
    return found


def _same_context(reader: Reader, own: object, stored: object) -> bool:
    """Whether the document of a context says what is stored; references, which count from elsewhere, are followed."""
    here = Reader(flatten(own).document, NO_CHUNKS)
    pairs = [(here.root, stored)]
    met: set[tuple[int, int]] = set()
    while pairs:
        one, other = pairs.pop()
        one, other = _followed(here, one), _followed(reader, other)
        if type(one) is not type(other):
            return False
        if (id(one), id(other)) in met:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() == other.keys() == {"d"}:  # what is in it may be called `ref` as well
                one, other = one["d"], other["d"]
            if list(one) != list(other):
                return False
            pairs.extend(zip(one.values(), other.values(), strict=True))
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs.extend(zip(one, other, strict=True))
        elif one != other:
            return False
        met.add((id(one), id(other)))
    return True


def _followed(reader: Reader, node: object) -> object:
    return reader.target(node["ref"]) if isinstance(node, dict) and node.keys() == {"ref"} else node


def _same_parts(binder: Binder, own: Compound, stored: CompoundNode, path: Path) -> bool:
    """Whether parts have the same dtypes, and shapes where these do not depend on the number of elements."""
    alike = True
    for name, part in own.parts.items():
        tag, content = tag_of(stored.parts.get(name))
        if tag != "t":  # no lengths
            continue
        place = path.child(Part(name))
        view = binder.reader.view(content, place)
        here, there = tuple(part.shape), view.shape
        if _fixed(own, name, here) != _fixed(own, name, there):
            binder.problems.shapes(place, f"has shape {here} in the target and {there} in the store")
            alike = False
        elif part.dtype is not view.row.torch:
            binder.problems.dtypes(place, f"is {part.dtype} in the target and {view.row.torch} in the store")
            alike = False
    return alike


def _fixed(own: Compound, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part without the dimension that depends on the number of elements."""
    varies: dict[str, int] = {}
    if own.form == "sparse_coo":
        varies = {"indices": 1, "values": 0}
    elif own.form in COMPRESSED:
        compressed, plain = COMPRESSED[own.form]
        batch_dims = own.parts[compressed].dim() - 1
        varies = {plain: batch_dims, "values": batch_dims}
    elif own.form == "nested":
        varies = {"values": 0}
    elif own.form == "jagged":
        varies = {"values": own.facts["ragged"] - 1}
    at = varies.get(name)
    return shape if at is None else (*shape[:at], -1, *shape[at + 1 :])


def _overwrite(live: torch.Tensor, new: torch.Tensor, path: Path, put: Put | None) -> None:
    """Give a live tensor what has been read."""
    new = new.detach().to(live.device)  # another object than the one that a second place in the target may get
    if live.is_nested:
        _exchange(live, new, path, put)
    elif str(live.layout).removeprefix("torch.") in COMPRESSED:
        with torch.no_grad():
            live.resize_as_sparse_(new).copy_(new)
    elif live.is_quantized and str(live.dtype).removeprefix("torch.") in QUANTIZED:
        with torch.no_grad():
            live.copy_(new)
    else:  # the elements of packed quantized tensors have no copy_
        live.data = new
        torch.autograd.graph.increment_version([live])


def _exchange(live: torch.Tensor, new: torch.Tensor, path: Path, put: Put | None) -> None:
    """Make the live tensor the new one, for torch copies between nested tensors of one geometry only."""
    if isinstance(live, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=live.requires_grad)
    try:
        torch.utils.swap_tensors(live, new.requires_grad_(live.requires_grad))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if put is None:
            raise KeyMismatch(f"{path.shown()} is in use by a graph and cannot be exchanged: {error}") from error
        put(new)
