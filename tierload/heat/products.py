"""Products of the Hessian's diagonal blocks, one for each parameter, with vectors: exact ones by differentiating twice,
or by differences of gradients where that is impossible (fused attention kernels, compiled models)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tierload.errors import InvalidRequest
from tierload.heat.isolation import same_random_numbers

__all__ = ["Closure", "DoubleBackward", "FiniteDifferences", "resolves_differences", "work_dtype"]

Closure = Callable[[], torch.Tensor]
"""Returns the loss of a fixed batch, a scalar with its graph; it calls the model, and neither backward nor step."""

_STEPS = {torch.float32: 0.03, torch.float64: 1e-4}
"""Lengths of the step that a difference of gradients takes, by the parameters' precision."""


def work_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """The precision of vectors for a parameter: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def resolves_differences(parameter: torch.nn.Parameter) -> bool:
    """Whether a small step of this parameter is more than its rounding."""
    return parameter.dtype in _STEPS


def _flat(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient as a vector; zeros for one that is not there."""
    dtype = work_dtype(parameter)
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    return gradient.reshape(-1).to(dtype)


def _loss(closure: Closure, model: torch.nn.Module) -> torch.Tensor:
    """The closure's loss, of the same random numbers each time.

    Raises:
        InvalidRequest: It is no scalar with a graph, or the closure went backward itself.
    """
    with same_random_numbers(model):
        loss = closure()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InvalidRequest(
            f"the closure of an audit returned {found}; it has to return the loss of a fixed batch, a scalar that "
            "depends on the parameters, without calling backward"
        )
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise InvalidRequest("the closure of an audit called backward; it has to return the loss alone")
    return loss.reshape(())


class DoubleBackward:
    """Exact products, by differentiating the gradient once more. Kernels have to allow that: whoever makes one asks
    torch for its plain attention."""

    name = "double backward"

    def __init__(self, closure: Closure, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        loss = _loss(closure, model)
        self._gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, flat."""
        found = zip(self._parameters, self._gradients, strict=True)
        return [_flat(parameter, gradient).detach() for parameter, gradient in found]

    def products(self, vectors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The part of the Hessian that belongs to these parameters, by number, times a vector, flat part by flat part;
        zeros where the loss is linear in them."""
        of = [self._parameters[at] for at in vectors]
        pairs = [(gradient, vectors[at]) for at in vectors if (gradient := self._gradients[at]) is not None]
        pairs = [(gradient, vector) for gradient, vector in pairs if gradient.requires_grad]
        if not pairs:
            return [_flat(parameter, None) for parameter in of]
        along = [vector.view(gradient.shape).to(gradient.dtype) for gradient, vector in pairs]
        outputs = [gradient for gradient, _ in pairs]
        found = torch.autograd.grad(outputs, of, along, retain_graph=True, allow_unused=True)
        return [_flat(*pair) for pair in zip(of, found, strict=True)]


class FiniteDifferences:
    """Products as central differences of gradients: two passes each. The parameter's own memory is never touched (a
    save may be copying it): other tensors stand in its place for a moment."""

    name = "finite differences"

    def __init__(self, closure: Closure, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._closure, self._model, self._parameters = closure, model, parameters

    def products(self, vectors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The part of the Hessian that belongs to these parameters, by number, times a vector of length 1, flat part by
        flat part.

        Raises:
            InvalidRequest: A parameter has half precision, in which such differences are noise.
        """
        for at in vectors:
            if not resolves_differences(self._parameters[at]):
                raise InvalidRequest(
                    f"the model cannot be differentiated twice, and differences of gradients say nothing in "
                    f"{self._parameters[at].dtype}; give the meter no closure, so that it goes by the optimizer's "
                    "second moments"
                )
        step = max(_STEPS[self._parameters[at].dtype] for at in vectors)
        ahead, behind = (self._gradients(vectors, sign * step) for sign in (1, -1))
        return [(after - before) / (2 * step) for after, before in zip(ahead, behind, strict=True)]

    def _gradients(self, vectors: Mapping[int, torch.Tensor], step: float) -> list[torch.Tensor]:
        with ExitStack() as stack:
            moved = []
            for at, vector in vectors.items():
                parameter = self._parameters[at]
                other = torch.nn.Parameter(parameter.detach().add(vector.view(parameter.shape), alpha=step))
                moved.append(stack.enter_context(_in_place_of(self._model, parameter, other)))
            gradients = torch.autograd.grad(_loss(self._closure, self._model), moved, allow_unused=True)
        return [_flat(*pair) for pair in zip(moved, gradients, strict=True)]


@contextmanager
def _in_place_of(
    model: torch.nn.Module, parameter: torch.nn.Parameter, other: torch.nn.Parameter
) -> Iterator[torch.nn.Parameter]:
    """Wherever the model has ``parameter``, also tied, it has ``other`` in the meantime."""
    places = [
        (module, name) for module in model.modules() for name, found in module._parameters.items() if found is parameter
    ]
    try:
        for module, name in places:
            setattr(module, name, other)  # not into the dict alone: recurrent modules keep a list beside it
        yield other
    finally:
        for module, name in places:
            setattr(module, name, parameter)
