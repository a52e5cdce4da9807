"""The torch edge: a state ⇄ chunks of bytes and a document of typed values; filling a target in place."""

from tierload.state.bind import plan_bind
from tierload.state.files import File, Folder
from tierload.state.flatten import flatten
from tierload.state.memory import NO_CHUNKS
from tierload.state.plan import LoadPlan, plan_load
from tierload.state.registry import register_type
from tierload.state.rng import RNG

__all__ = [
    "NO_CHUNKS",
    "RNG",
    "File",
    "Folder",
    "LoadPlan",
    "flatten",
    "plan_bind",
    "plan_load",
    "register_type",
]
