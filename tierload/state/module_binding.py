"""Loading into modules: straight into their parameters where torch's own loading would do no more than that."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from tierload.errors import KeyMismatch
from tierload.state.compound_binding import is_handed_over
from tierload.state.fills import Fill
from tierload.state.keys import Path
from tierload.state.members import entries
from tierload.state.memory import Memory
from tierload.state.nodes import tag_of
from tierload.state.sharding import is_spread, like
from tierload.state.spread_binding import fresh_for, matching_view
from tierload.state.stored_names import StoredNames
from tierload.state.wrappers import CHECKPOINT_MODULE, bare_module

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tierload.state.bind import Binder

__all__ = ["bind_module", "materialize", "materialize_spread"]

_MAPPINGS = ("d", "map", "odict", "statedict")

_OWN_LOADING = {torch.nn.Module._load_from_state_dict} | {
    cls._load_from_state_dict for cls in (_NormBase, _InstanceNorm)
}
"""Loading that copies tensors by name, and beyond that only mends state dicts of torch before 0.4.1."""

_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether copying tensors by name is all that ``load_state_dict`` would do for this module and those inside it."""
    base = torch.nn.Module
    for inner in module.modules():
        cls = type(inner)
        if (
            cls._load_from_state_dict not in _OWN_LOADING
            or cls._save_to_state_dict is not base._save_to_state_dict
            or cls.load_state_dict is not base.load_state_dict
            or cls.state_dict is not base.state_dict
            or not vars(inner).keys().isdisjoint(("load_state_dict", "state_dict", "_load_from_state_dict"))
            or not all(_is_known(hook) for name in _HOOKS for hook in (getattr(inner, name, None) or {}).values())
        ):
            return False
    return True


def _is_known(hook: Any) -> bool:
    """Whether a hook around state dicts does no more than change names, as those of activation checkpointing do, or
    bring the parameters into their spread form, as those of fully_shard do: before a state dict is taken or loaded, and
    after, to look at new parameters."""
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    owner = getattr(hook, "__module__", "") or ""
    return owner.startswith("torch.distributed.fsdp._fully_shard.") or owner == CHECKPOINT_MODULE


def bind_module(binder: Binder, live: torch.nn.Module, node: object, path: Path) -> None:
    """Bind a module and the state dict that is stored for it, as an object or as a dict."""
    tag, content = tag_of(node)
    if tag == "object" and "state" in content:
        tag, content = tag_of(content["state"])
    if tag not in _MAPPINGS:
        binder.mismatch("a module", node, path)
        return
    plain = _is_plain(live)
    own = live.state_dict(keep_vars=plain)
    names = StoredNames(binder, live, own, tag, content, path)
    if names.note and binder.wants_any(node, path):
        binder.reader.note(names.note)
    own = names.named(own)
    if plain:
        stored, rest = binder.bind_alike(own, tag, content, path)
        for name in _matching(binder, rest, stored, path, renames=False):
            place, inner = stored[name]
            if name.rpartition(".")[2] == "_extra_state":
                holder = bare_module(live.get_submodule(names.own(name).rpartition(".")[0]))
                binder.plain(inner, place, holder.set_extra_state)
            else:
                binder.tensor(own[name], inner, place, None, module=True)
    else:
        stored = {key: (place, node) for key, place, node in entries(binder.reader, tag, content, path)}
        metadata = content["metadata"] if tag == "statedict" else None
        _hand_over(binder, live, own, names, stored, metadata, path)
    _check_meta(binder, live, names, path)


def _matching(
    binder: Binder, own: Iterable[str], stored: dict[Any, tuple[Path, object]], path: Path, *, renames: bool
) -> list[str]:
    """The names on both sides that the load wants; the others are reported, unless hooks may rename them."""
    own = list(own)
    if not renames:
        for name in own:
            if name not in stored and binder.reader.wants(path.child(name)):
                binder.problems.missing(path.child(name))
        for name in stored.keys() - set(own):
            for leaf in binder.leaves(stored[name][1], stored[name][0]):
                binder.problems.unexpected(leaf)
        return [name for name in own if name in stored and binder.wants_any(stored[name][1], stored[name][0])]
    return [name for name, (place, node) in stored.items() if binder.wants_any(node, place)]


def _hand_over(
    binder: Binder,
    live: torch.nn.Module,
    own: dict[str, Any],
    called: StoredNames,
    stored: dict[Any, tuple[Path, object]],
    metadata: object,
    path: Path,
) -> None:
    """Give the module what is stored by its own ``load_state_dict``, with all its hooks."""
    renames = any(getattr(inner, "_load_state_dict_pre_hooks", None) for inner in live.modules())
    named = dict(live.named_parameters(remove_duplicate=False)) | dict(live.named_buffers(remove_duplicate=False))
    tensors = {called.bare.of(name): tensor for name, tensor in named.items()}
    names = []
    fresh: dict[str, torch.Tensor | None] = {}  # those that are spread over ranks
    for name in _matching(binder, own, stored, path, renames=renames):
        place, node = stored[name]
        if not is_spread(own.get(name)) and not is_handed_over(binder, own.get(name), node, place):
            continue
        if is_spread(own.get(name)):
            if matching_view(binder, own[name], node, place) is not None:
                fresh[name] = fresh_for(binder, own[name], node, place)
                binder.loaded.append(place)
                names.append(name)
            continue
        if isinstance(own.get(name), torch.Tensor) and tag_of(node)[0] == "t" and not is_lazy(own[name]):
            view = binder.matching_view(own[name], node, place)
            if view is None:
                continue
            tensor = tensors.get(called.bare.of(called.own(name)))
            if tensor is not None and tensor.is_meta:
                binder.materials.append(Fill(tensor, view, place))
        binder.reader.unfiltered(node, place)  # checks it, and makes the memory that it needs
        binder.loaded.append(place)
        names.append(name)
    if metadata is not None:
        binder.reader.unfiltered(metadata, path.inner())
    strict = binder.strict and binder.reader.keys is None

    def act() -> None:
        state: collections.OrderedDict[str, Any] = collections.OrderedDict()
        for name in names:
            place, node = stored[name]
            value = fresh[name] if name in fresh else binder.reader.unfiltered(node, place)
            state[called.own(name) if type(name) is str else name] = value
        if metadata is not None:
            found = binder.reader.unfiltered(metadata, path.inner())
            state._metadata = called.metadata(found)  # type: ignore[attr-defined]
        try:
            live.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise KeyMismatch(
                f"{path.shown()}: {type(live).__qualname__}.load_state_dict refused what is stored, and may have "
                f"changed a part of itself: {error}"
            ) from error

    binder.actions.append(act)


def _check_meta(binder: Binder, live: torch.nn.Module, names: StoredNames, path: Path) -> None:
    """Report what would stay without memory: not even loading all that is stored makes such a module work."""
    given = {id(fill.live) for fill in binder.materials} | binder.spread_materials.keys()
    left = [
        (kind, names.bare.of(name))
        for kind, named in (
            ("parameter", live.named_parameters(remove_duplicate=False)),
            ("buffer", live.named_buffers(remove_duplicate=False)),
        )
        for name, tensor in named
        if tensor.is_meta and id(tensor) not in given
    ]
    persistent = {names.bare.of(name) for name in live.state_dict()} if left else set()
    for kind, name in left:
        place = path.child(name)
        if binder.reader.keys is not None:
            binder.reader.note(f"{place.text()} is left on the meta device")
        else:
            why = "the store does not fill it" if name in persistent else "it is not part of state_dict()"
            binder.problems.missing(
                place, f"is a {kind} on the meta device and would stay there: {why}; compute it before loading"
            )


def materialize(materials: Iterable[Fill], memory: Memory, modules: Iterable[torch.nn.Module]) -> None:
    """Give tensors on meta their memory. They stay the same objects, so ties and optimizers that hold them do too."""
    materials = list(materials)
    if materials:
        with _without_weak_references(modules):
            _materialize(materials, memory)


@contextmanager
def _without_weak_references(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Recurrent modules refer to their parameters weakly, which keeps these from being exchanged."""
    recurrent = [inner for module in modules for inner in module.modules() if isinstance(inner, torch.nn.RNNBase)]
    recurrent = [module for module in recurrent if any(one.is_meta for one in module.parameters(recurse=False))]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


def _materialize(materials: Iterable[Fill], memory: Memory) -> None:
    used: set[int] = set()
    for fill in materials:
        live = fill.live
        if not live.is_meta:
            continue  # tied: another name of the same tensor
        data = fill.view.data(memory)
        if fill.view.chunk in used:
            data = data.clone()
        used.add(fill.view.chunk)
        if data.dtype is not live.dtype:
            data = data.to(live.dtype)
        _exchange(live, data)


def materialize_spread(materials: Iterable[tuple[DTensor, torch.Tensor]]) -> None:
    """The same for tensors that are spread over ranks, by this rank's part of each."""
    for live, part in materials:
        _exchange(live, like(live, part))


def _exchange(live: torch.Tensor, data: torch.Tensor) -> None:
    if isinstance(live, torch.nn.Parameter):
        data = torch.nn.Parameter(data, requires_grad=live.requires_grad)
    vars(data).update(vars(live))
    torch.utils.swap_tensors(live, data)  # type: ignore[no-untyped-call]
