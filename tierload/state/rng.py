"""Random number generators: their state out of them and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tierload.errors import CorruptStore
from tierload.state.containers import Parts
from tierload.state.keys import Path

__all__ = ["GENERATORS", "RNG", "capture", "encode", "kind_of", "mismatch", "rebuild", "restore"]


class RNG:
    """Stands in a state for the process's own random number generators: Python's, numpy's, torch's, and CUDA's.

    Saving reads their state; loading into it (``load(into={"rng": RNG(), ...})``) sets it, after everything else has
    been loaded. Loaded plainly it is a dict of the states. Generator objects can stand in a state by themselves.
    """

    def __repr__(self) -> str:
        return "tierload.RNG()"


_BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}

_KINDS: dict[type, str] = {
    random.Random: "python",
    np.random.RandomState: "numpy.RandomState",
    np.random.Generator: "numpy.Generator",
    torch.Generator: "torch.Generator",
    RNG: "all",
} | dict.fromkeys(_BIT_GENERATORS.values(), "numpy.BitGenerator")

GENERATORS = tuple(cls for cls in _KINDS if cls is not RNG)
"""The generator types that can stand in a state."""


def kind_of(value: object) -> str | None:
    """The kind of a generator as the document names it, or None for anything else."""
    return _KINDS.get(type(value))


def capture(value: Any) -> object:
    """The state of a generator, as a value that the document can hold."""
    kind = _KINDS[type(value)]
    if kind == "python":
        return value.getstate()
    if kind == "numpy.RandomState":
        return value.get_state(legacy=False)
    if kind == "numpy.Generator":
        return value.bit_generator.state
    if kind == "numpy.BitGenerator":
        return value.state
    if kind == "torch.Generator":
        return {"device": str(value.device), "state": value.get_state()}
    own: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state_all()
    return own


def encode(value: object, path: Path) -> Parts:
    """The parts of a generator."""
    return [f'{{"rng":{{"kind":"{_KINDS[type(value)]}","state":', (capture(value), path.inner()), "}}"]


def rebuild(kind: str, state: Any) -> object:
    """A new generator with this state; for the process's own, and for devices that are not here, the state itself.

    Raises:
        CorruptStore: It is no state of such a generator.
    """
    if kind not in ("python", "all") and type(state) is not dict:
        raise CorruptStore(f"the state document has a damaged {kind} state")
    try:
        if kind == "all" or (kind == "torch.Generator" and state["device"] != "cpu" and not torch.cuda.is_available()):
            return state
        if kind == "python":
            value: Any = random.Random()
        elif kind == "numpy.RandomState":
            value = np.random.RandomState()
        elif kind == "torch.Generator":
            value = torch.Generator(state["device"])
        else:
            bits = _BIT_GENERATORS[state["bit_generator"]]()
            value = np.random.Generator(bits) if kind == "numpy.Generator" else bits
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptStore(f"the state document has a damaged {kind} state: {error!r}") from error
    restore(value, state)
    return value


def _checked(state: Any) -> Any:
    """A numpy state whose positions lie inside its buffers: numpy itself would read beyond them.

    Raises:
        ValueError: One does not.
    """
    name = state["bit_generator"]
    if name == "MT19937":
        position, last = state["state"]["pos"], 624
    elif name == "Philox":
        position, last = state["buffer_pos"], 4
    else:
        return state
    if type(position) is not int or not 0 <= position <= last:
        raise ValueError(f"position {position!r} in a buffer of {last}")
    return state


def mismatch(value: Any, state: Any) -> str:
    """Why a live generator cannot take this state; empty when it can. Looks at what is known before any bytes are."""
    if not isinstance(state, dict):
        return ""
    if isinstance(value, torch.Generator):
        here, there = value.device.type, str(state.get("device")).partition(":")[0]
        return "" if here == there else f"is a generator on {here} in the target and on {there} in the store"
    if isinstance(value, RNG):
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        saved = len(state.get("cuda") or ())
        return "" if saved <= devices else f"holds the states of {saved} CUDA devices, and {devices} are here"
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    name = type(bits).__name__
    saved_name = state.get("bit_generator", name)
    if isinstance(value, np.random.RandomState) or saved_name == name:
        return ""
    return f"is a {name} in the target and a {saved_name!s} in the store"


def restore(value: Any, state: Any) -> None:
    """Set the state of a generator that exists.

    Raises:
        CorruptStore: It is no state of such a generator.
    """
    kind = _KINDS[type(value)]
    try:
        if kind == "python":
            value.setstate(state)
        elif kind == "numpy.RandomState":
            value.set_state(_checked(state))
        elif kind == "numpy.Generator":
            value.bit_generator.state = _checked(state)
        elif kind == "numpy.BitGenerator":
            value.state = _checked(state)
        elif kind == "torch.Generator":
            value.set_state(state["state"])
        else:
            random.setstate(state["python"])
            np.random.set_state(_checked(state["numpy"]))
            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptStore(f"the state document has a damaged {kind} state: {error!r}") from error
