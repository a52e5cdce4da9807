"""The order of first use by graphs of a model: of torch.export with example arguments, of torch.fx without."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tierload.tiers.stand_in import stand_in
from tierload.tiers.steps import computes
from tierload.tiers.uses import FirstUse, Recorder, tensor_names

__all__ = ["of_export", "of_trace"]

_WITHOUT_KERNEL = frozenset(
    "size dim view reshape flatten transpose permute t expand squeeze unsqueeze contiguous chunk split".split()
)
"""Methods and functions that a trace has and no kernel runs for, as a rule."""


def of_export(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> FirstUse:
    """The order of the nodes of a graph by torch.export. Nothing is computed and the model stays as it is, whatever
    device it is on.

    Raises:
        RuntimeError: The graph depends on values; torch's own errors of an export (``torch._dynamo.exc``) are of this
            kind.
        TypeError: The model cannot be copied, or does not take these arguments.
    """
    from torch._export.verifier import SpecViolationError  # takes long to import, as all of torch.export

    with stand_in(model, args, kwargs or {}) as copied:
        ties = {name: names for names in tensor_names(copied.model).values() for name in names}
        with copied.mode, warnings.catch_warnings(action="ignore"):  # of what would not do in a program to run
            try:
                program = torch.export.export(copied.model, copied.args, copied.kwargs)
            except SpecViolationError as error:  # which is no kind of RuntimeError, unlike all others
                raise RuntimeError(f"the exported graph is not valid: {error}") from error
    signature = program.graph_signature
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    recorder = Recorder(ties)
    held: dict[torch.fx.Node, tuple[str, ...]] = {}  # of tensors of the model and views of them
    for node in program.graph.nodes:
        if node.op == "placeholder":
            held[node] = (inputs[node.name],) if node.name in inputs else ()
        elif node.op == "call_function":
            names = tuple(name for used in node.all_input_nodes for name in held.get(used, ()))
            if node.target is operator.getitem or not computes(node.target):
                held[node] = names
                continue
            stack = {"": ("", None), **node.meta.get("nn_module_stack", {})}
            for key, (module, _) in stack.items():
                recorder.call(key, module)
            recorder.kernel(key, names)
    return recorder.result("export")


def of_trace(model: torch.nn.Module) -> FirstUse:
    """The order of the nodes of a symbolic trace by torch.fx, which needs no arguments. A module of torch.nn counts as
    one kernel. Nothing is computed and the model stays as it is.

    Raises:
        ValueError: The model branches on its inputs (``torch.fx.proxy.TraceError`` is of this kind).
        TypeError, RuntimeError: It asks its inputs for what a trace does not have, or cannot be copied.
    """
    with stand_in(model, (), {}) as copied, copied.mode:
        ties = {name: names for names in tensor_names(copied.model).values() for name in names}
        tracer = torch.fx.Tracer()
        graph = tracer.trace(copied.model)
        modules = dict(copied.model.named_modules())
    recorder = Recorder(ties)
    recorder.call("", "")
    for node in graph.nodes:
        if node.op == "call_module":
            recorder.call(node, node.target)
            own = tensor_names(modules[node.target]).values()
            recorder.kernel(node, (f"{node.target}.{names[0]}" for names in own))
        elif node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else node.target.__name__
            if node.target not in (operator.getitem, getattr) and name not in _WITHOUT_KERNEL:
                used = (str(one.target) for one in node.all_input_nodes if one.op == "get_attr")
                recorder.kernel("", (name for name in used if name in ties))
    return recorder.result("trace")
