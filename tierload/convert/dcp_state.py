"""A state fitted to what torch.distributed.checkpoint keeps: dicts with text for keys, tensors, plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tierload.convert.torch_file import Loadable
from tierload.errors import InvalidRequest
from tierload.state.containers import key_element
from tierload.state.keys import ROOT, Path

__all__ = ["DcpState"]


class DcpState:
    """``state`` is what a directory of DCP gives back. ``changed`` are places whose value has another form in it,
    ``left_out`` those that it cannot hold.

    Raises:
        InvalidRequest: The state is no dict, or has keys that are the same once they are flat.
    """

    def __init__(self, state: object) -> None:
        loadable = Loadable(state)
        self.changed = loadable.changed
        self.left_out = loadable.left_out
        self._flat: dict[str, str] = {}
        if not isinstance(loadable.state, Mapping):
            raise InvalidRequest(
                f"the state is a {type(state).__qualname__}, and DCP keeps dicts: export a part that is one (--root)"
            )
        self.state: dict[str, Any] = self._dict(loadable.state, ROOT, ())

    def _dict(self, value: Mapping[Any, Any], path: Path, flat: tuple[str, ...]) -> dict[str, Any]:
        made = {}
        for key, inner in value.items():
            place = path.child(key_element(key, path))
            if not isinstance(key, str):
                self.changed.append((place.text(), f"its key was a {type(key).__qualname__}, is text"))
            fitted = self._fitted(inner, place, (*flat, str(key)))
            if fitted is not _LEFT_OUT:
                made[str(key)] = fitted
        return made

    def _fitted(self, value: Any, path: Path, flat: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            if not value:
                self.left_out.append((path.text(), "an empty dict, of which DCP keeps nothing"))
                return _LEFT_OUT
            return self._dict(value, path, flat) or _LEFT_OUT
        if isinstance(value, list) and _is_walked(value):
            found = [self._fitted(each, path.child(number), (*flat, str(number))) for number, each in enumerate(value)]
            return [None if each is _LEFT_OUT else each for each in found]
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_quantized):
            kind = "quantized" if value.is_quantized else str(value.layout)
            self.left_out.append((path.text(), f"a tensor that is {kind}, of which DCP cannot keep parts"))
            return _LEFT_OUT
        name = ".".join(flat)
        if self._flat.setdefault(name, path.text()) != path.text():
            raise InvalidRequest(
                f"{path.text()!r} and {self._flat[name]!r} are both {name!r} in DCP: export one of them (--root, "
                "--keys)"
            )
        return value


_LEFT_OUT = object()


def _is_walked(value: list[Any]) -> bool:
    """Whether DCP looks for tensors in a list; else it is one value."""
    return any(
        isinstance(each, (Mapping, torch.Tensor)) or (isinstance(each, list) and _is_walked(each)) for each in value
    )
