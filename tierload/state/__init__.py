"""The torch edge: a state ⇄ chunks of bytes and a document of typed values; filling a target in place."""

from tierload.state.bind import plan_bind
from tierload.state.files import File, Folder
from tierload.state.flatten import flatten
from tierload.state.memory import NO_CHUNKS
from tierload.state.plan import LoadPlan, plan_load
from tierload.state.registry import register_type
from tierload.state.rng import RNG
from tierload.state.tensors import TORCH, is_plain_tensor

__all__ = [
    "NO_CHUNKS",
    "RNG",
    "TORCH",
    "File",
    "Folder",
    "LoadPlan",
    "flatten",
    "is_plain_tensor",
    "plan_bind",
    "plan_load",
    "register_type",
]
