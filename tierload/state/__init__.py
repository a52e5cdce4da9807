"""The torch edge: a state ⇄ chunks of bytes and a document of typed values; filling a target in place."""

from tierload.state.bind import plan_bind
from tierload.state.cutting import Cut, Unit, cut, matching
from tierload.state.documents import Listed, StoredTensor, WholeState, listed, own_keys, read_documents, write_documents
from tierload.state.dtypes import CODE_NAMES
from tierload.state.files import File, Folder
from tierload.state.flatten import flatten
from tierload.state.gates import Gate, GatedParameter, GatedTensor, await_tensors, uncompiled
from tierload.state.heat_columns import read_heat, write_heat
from tierload.state.hot_binding import Arriving, HotPlan, plan_hot
from tierload.state.keys import ROOT
from tierload.state.lazy import LazyTensor, Pages, plan_lazy
from tierload.state.memory import NO_CHUNKS
from tierload.state.modules import is_stateful
from tierload.state.names import ParameterNames
from tierload.state.nodes import tag_of
from tierload.state.outline import Outline, Unread, Wanted
from tierload.state.plan import LoadPlan, plan_load
from tierload.state.registry import register_type
from tierload.state.rng import RNG
from tierload.state.sharding import is_spread, local_part
from tierload.state.tensors import TORCH, device_of, is_plain_tensor

__all__ = [
    "CODE_NAMES",
    "NO_CHUNKS",
    "RNG",
    "ROOT",
    "TORCH",
    "Arriving",
    "Cut",
    "File",
    "Folder",
    "Gate",
    "GatedParameter",
    "GatedTensor",
    "HotPlan",
    "LazyTensor",
    "Listed",
    "LoadPlan",
    "Outline",
    "Pages",
    "ParameterNames",
    "StoredTensor",
    "Unit",
    "Unread",
    "Wanted",
    "WholeState",
    "await_tensors",
    "cut",
    "device_of",
    "flatten",
    "is_plain_tensor",
    "is_spread",
    "is_stateful",
    "listed",
    "local_part",
    "matching",
    "own_keys",
    "plan_bind",
    "plan_hot",
    "plan_lazy",
    "plan_load",
    "read_documents",
    "read_heat",
    "register_type",
    "tag_of",
    "uncompiled",
    "write_documents",
    "write_heat",
]
