"""The parameters of a live optimizer, found by the names that a store has for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch

from tierload.state.keys import element_text
from tierload.state.names import ParameterNames
from tierload.state.optimizers import own_names, parameters_of
from tierload.state.wrappers import alike, unwrapped

__all__ = ["LiveParameters"]


class LiveParameters:
    """Positions of parameters, by all that the store may call them: their keys in the target; the names that the
    optimizer was given with them; their names in the module that has them, where only one has that name. Where the
    ``saved`` names are none of these, they are tried without the elements of wrappers.
    """

    def __init__(self, names: ParameterNames, live: torch.optim.Optimizer, saved: Collection[str]) -> None:
        parameters = parameters_of(live)
        self._keys = [names.of(parameter) for parameter in parameters]
        self._own = own_names(live)
        self._found = {key: at for at, keys in enumerate(self._keys) for key in keys}
        self._found = {name: at for at, name in self._own.items()} | self._found
        self.named = bool(self._found)
        self.without_wrappers = 0
        """How many saved names were found without the elements of wrappers."""
        if not self._found.keys() >= set(saved):
            self._look_further(saved)

    def find(self, name: str | None) -> int | None:
        """The position of the parameter that the store calls ``name``."""
        return None if name is None else self._found.get(name)

    def label(self, position: int) -> str | int:
        """What a parameter is called in messages."""
        return next(iter(self._keys[position]), self._own.get(position, position))

    def _look_further(self, saved: Collection[str]) -> None:
        users: dict[str, set[int]] = defaultdict(set)
        for at, keys in enumerate(self._keys):
            for key in keys:
                users[key.rpartition("/")[2]].add(at)
        in_module = {name: next(iter(found)) for name, found in users.items() if len(found) == 1}
        elements = {element_text(name): name for name in saved}
        keys_at = {key: at for at, keys in enumerate(self._keys) for key in keys}
        names_at = {name: at for at, name in self._own.items()}
        changed = {stored: keys_at[key] for key, stored in unwrapped(saved, keys_at).items()}
        changed |= {stored: names_at[name] for name, stored in alike(saved, names_at).items()}
        changed |= {elements[text]: in_module[name] for name, text in unwrapped(elements, in_module).items()}
        exact = {elements[text]: at for text, at in in_module.items() if text in elements}
        self.without_wrappers = len(changed.keys() - exact.keys() - self._found.keys())
        self._found = changed | exact | self._found
