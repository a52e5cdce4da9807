"""Modules that only wrap another one, and names without them: a model is the same in DistributedDataParallel or bare.

Of a live module, its type says whether it is a wrapper; of a name in a store, nobody can say any more, so those are
only read without the elements of wrappers where that is one to one.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

__all__ = [
    "ADVICE",
    "CHECKPOINT_MODULE",
    "BareNames",
    "alike",
    "bare_module",
    "has_wrapper_element",
    "told",
    "unwrapped",
    "unwrapped_module",
    "wrapper_of",
]

Wrapper = tuple[str, str]
"""The name that a wrapper gives to the module in it, and what the wrapper is called."""

CHECKPOINT_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""Where torch's activation checkpointing stands; its wrappers have hooks that drop their element."""

_ELEMENTS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    (CHECKPOINT_MODULE, "CheckpointWrapper"): "_checkpoint_wrapped_module",
    (CHECKPOINT_MODULE, "OffloadWrapper"): "_checkpoint_wrapped_module",
}
_WRAPPERS: dict[tuple[str, str], Wrapper] = {kind: (element, kind[1]) for kind, element in _ELEMENTS.items()}
"""By module and name of the class: most are not imported before somebody uses them."""

_IN_TEXT = re.compile(rf"(?:^|(?<=[./]))(?:{'|'.join(sorted(set(_ELEMENTS.values())))})\.")
_BETWEEN = re.compile("[./]")

_SHOWN = ", ".join(sorted({f"{element}." for element in _ELEMENTS.values()}))

ADVICE = f"Names were also tried without the elements of wrappers ({_SHOWN}), which are only dropped one to one."


def wrapper_of(cls: type) -> Wrapper | None:
    """What the modules of a class are as wrappers; None when they are none."""
    for base in cls.__mro__:
        found = _WRAPPERS.get((base.__module__, base.__qualname__))
        if found is not None:
            return found
    return None


def _inside(module: torch.nn.Module, wrapper: Wrapper | None) -> torch.nn.Module | None:
    if wrapper is None or module._parameters or module._buffers or len(module._modules) != 1:
        return None
    return module._modules.get(wrapper[0])


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, out of the wrappers around it."""
    while (inner := _inside(module, wrapper_of(type(module)))) is not None:
        module = inner
    return module


def told(wrappers: Iterable[Wrapper]) -> str:
    """What is said of names without these."""
    return "names without " + ", ".join(f"`{element}.` of {name}" for element, name in wrappers)


class BareNames:
    """Names in a live module, as they are without its wrappers. ``wrappers`` has each kind of those once.

    A module of a wrapper's type that has anything beside the module inside is none: nothing can then have two names.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        kinds = {kind: wrapper_of(kind) for kind in {type(inner) for inner in module.modules()}}
        self._module = module
        self._kinds = {kind: wrapper for kind, wrapper in kinds.items() if wrapper is not None}
        every = module.modules() if self._kinds else ()
        self.wrappers = list(dict.fromkeys(self._kinds[type(one)] for one in every if self._inside(one) is not None))
        # By path as it is: the module there, and the path without wrappers, with a dot behind it.
        self._places: dict[str, tuple[torch.nn.Module | None, str]] = {"": (module, "")}

    def of(self, name: str) -> str:
        """The name of a tensor; one that the wrapper itself has cleaned already stays as it is."""
        if not self.wrappers:
            return name
        above, _, last = name.rpartition(".")
        return self._at(above)[1] + last

    def unique(self, names: Iterable[str]) -> dict[str, str]:
        """The bare name of each; those that hooks have given so that two would become one stay as they are."""
        if not self.wrappers:
            return {name: name for name in names}
        bare = {name: self.of(name) for name in names}
        users = collections.Counter(bare.values())
        return {name: found if users[found] == 1 else name for name, found in bare.items()}

    def modules(self) -> dict[str, str]:
        """The path of every module that is no wrapper, by its path without wrappers."""
        found = {}
        for path, module in self._module.named_modules(remove_duplicate=False):
            if self._inside(module) is None:
                found[self._at(path)[1][:-1]] = path
        return found

    def state_dict(self) -> Any:
        """What the module's ``state_dict()`` gives, with bare names."""
        state = self._module.state_dict()
        if not self.wrappers or type(state) not in (dict, collections.OrderedDict):
            return state
        bare = self.unique(state)
        renamed = type(state)((bare[name], value) for name, value in state.items())
        metadata = getattr(state, "_metadata", None)
        if isinstance(metadata, Mapping):
            kept = ((path, metadata[raw]) for path, raw in self.modules().items() if raw in metadata)
            renamed._metadata = collections.OrderedDict(kept)  # type: ignore[attr-defined]
        return renamed

    def _inside(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The module in a wrapper; None when this is none."""
        return _inside(module, self._kinds.get(type(module)))

    def _at(self, path: str) -> tuple[torch.nn.Module | None, str]:
        found = self._places.get(path)
        if found is None:
            above, _, last = path.rpartition(".")
            found = self._places[path] = self._below(*self._at(above), last)
        return found

    def _below(self, module: torch.nn.Module | None, path: str, element: str) -> tuple[torch.nn.Module | None, str]:
        while module is not None and (inside := self._inside(module)) is not None:
            if element == self._kinds[type(module)][0]:
                return inside, path
            module = inside  # the wrapper has dropped its own element
        return None if module is None else module._modules.get(element), f"{path}{element}."


def has_wrapper_element(name: str) -> bool:
    """Whether a name in a store may be one in a wrapper."""
    return _IN_TEXT.search(name) is not None


def unwrapped(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """The stored name of each of ``own``, a live module's, that is in the store with the elements of wrappers, and only
    so.

    Of several stored names that are one without them, none is taken: which one is meant, nobody can say.
    """
    if not any(has_wrapper_element(name) for name in stored):
        return {}
    return {ours: theirs for ours, theirs in alike(stored, own).items() if _is_within(ours, theirs)}


def unwrapped_module(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """The same for all the names of one module. The live module has nothing beside what is in a wrapper, so an element
    beside which something stands that is loaded too is none."""
    pairs = unwrapped(stored, own)
    beside: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
    for name in {*pairs.values(), *(set(stored) & set(own))} if pairs else ():
        elements = name.split(".")
        for at, element in enumerate(elements):
            beside[(*elements[:at],)].add(element)
    found = {}
    for ours, theirs in pairs.items():
        elements = theirs.split(".")
        alone = [element for at, element in enumerate(elements) if len(beside[(*elements[:at],)]) == 1]
        dropped = collections.Counter(elements) - collections.Counter(ours.split("."))
        if dropped <= collections.Counter(alone):
            found[ours] = theirs
    return found


def alike(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """The same for names that do not come from a live module, so that either may have elements of wrappers."""
    groups: dict[str, tuple[list[str], list[str]]] = collections.defaultdict(lambda: ([], []))
    for side, names in enumerate((stored, own)):
        for name in names:
            groups[_IN_TEXT.sub("", name)][side].append(name)
    pairs = [(ours[0], theirs[0]) for theirs, ours in groups.values() if len(theirs) == len(ours) == 1]
    return {ours: theirs for ours, theirs in pairs if ours != theirs}


def _is_within(short: str, long: str) -> bool:
    """Whether dropping elements of one name gives the other: an element of the user's own is never dropped."""
    elements = iter(_BETWEEN.split(long))
    return all(element in elements for element in _BETWEEN.split(short))
