"""Spectral radii of the Hessian's blocks as they are known: measured a while ago, and carried on by what is free."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierload.heat.isolation import undisturbed
from tierload.heat.lanczos import PRODUCTS, Radius, spectral_radius
from tierload.heat.products import Closure, DoubleBackward, FiniteDifferences, resolves_differences, work_dtype

__all__ = ["Curvature"]

_log = logging.getLogger("tierload")

WARM_PRODUCTS = 3
"""As many products the refresh of a radius takes at most."""

_FRESH = 0.1
"""How much of a new direction a refresh starts with: from the old vector alone it would never find another one."""

_AGREEMENT, _NOISE = 0.1, 1e-3
"""How far a second derivative may be from a difference of gradients, as a part of that and of the gradient."""

_BASIS_BYTES = 1 << 30
"""Memory that the vectors of one radius may take; a parameter of which it holds few gets fewer products."""


class Curvature:
    """Radii of parameters, by position. Of each that was measured the vector is kept, in bfloat16, so that the next
    time takes 1 to 3 products.

    Between measurements a radius follows the parameter's share of a proxy for it, which costs nothing: the sum of the
    squared gradients that Adam averages (the trace of the empirical Fisher matrix). Shares, so that what all parameters
    have in common (Adam's average begins at 0; gradients fade) plays no part.
    """

    def __init__(self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._kind: type[DoubleBackward] | type[FiniteDifferences] = DoubleBackward
        self._proven = False
        self._vectors: dict[int, torch.Tensor] = {}
        self._measured: dict[int, tuple[float, float]] = {}  # radius, and share of the proxy then
        self._count = 0

    @property
    def method(self) -> str:
        """How products are computed: ``"double backward"`` or ``"finite differences"``."""
        return self._kind.name

    def measurable(self) -> list[int]:
        """Positions of the parameters that have a radius."""
        return [
            at
            for at, one in enumerate(self._parameters)
            if one.requires_grad and one.is_floating_point() and one.numel()
        ]

    def measure(self, positions: Sequence[int], closure: Closure, proxies: Sequence[float]) -> dict[int, Radius]:
        """Measures these radii, all of one loss. The model, its gradients and all random numbers stay as they are."""
        shares = _shares(proxies)
        with undisturbed(self._model):
            found = self._measure(positions, closure)
        for at, radius in found.items():
            if math.isfinite(radius.value):  # a loss that has left the numbers says nothing; what was known stays
                self._measured[at] = radius.value, shares[at]
        return found

    def radii(self, proxies: Sequence[float]) -> list[float]:
        """All radii as of now; 0 for parameters that are not trained."""
        shares = _shares(proxies)
        ratios = [radius / share for radius, share in self._measured.values() if share > 0]
        typical = statistics.median(ratios) if ratios else 1.0
        trained = set(self.measurable())
        return [self._carried(at, share, typical) if at in trained else 0.0 for at, share in enumerate(shares)]

    def state_dict(self) -> dict[str, object]:
        """What was measured, without the vectors: these are as large as the model, and soon found again."""
        return {"measured": {at: list(pair) for at, pair in self._measured.items()}, "count": self._count}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on from such a state."""
        measured, count = state["measured"], state["count"]
        if not isinstance(measured, Mapping) or not isinstance(count, int):
            raise ValueError("the state is none of measured radii")
        self._measured = {int(at): (float(radius), float(share)) for at, (radius, share) in measured.items()}
        self._count = count
        self._vectors.clear()

    def _carried(self, at: int, share: float, typical: float) -> float:
        radius, then = self._measured.get(at, (typical, 1.0))
        if at not in self._measured:
            return typical * share
        return radius * share / then if share > 0 and then > 0 else radius

    def _measure(self, positions: Sequence[int], closure: Closure) -> dict[int, Radius]:
        if not self._proven:
            reason = self._refutation(closure)
            if reason:
                _log.info("this model cannot be differentiated twice, radii are by finite differences: %s", reason)
                self._kind = FiniteDifferences
            self._proven = reason is not None
        with _kernels(self._kind):
            products = self._kind(closure, self._model, [self._parameters[at] for at in positions])
            return {at: self._radius(products, place, at) for place, at in enumerate(positions)}

    def _refutation(self, closure: Closure) -> str | None:
        """Why the model cannot be differentiated twice; empty when it can, None when the loss is no number.

        A kernel may say so, or leave a part of the second derivative out in silence, so one product is held against a
        difference of gradients (but not in half precision, where such a difference is noise).
        """
        parameters = [self._parameters[at] for at in self.measurable()]
        starts = [self._random(parameter) for parameter in parameters]
        length = math.hypot(*(float(torch.linalg.vector_norm(start)) for start in starts))
        along = {at: start / length for at, start in enumerate(starts)}
        try:
            with _kernels(DoubleBackward):
                exact = DoubleBackward(closure, self._model, parameters)
                gradients, products = exact.gradients(), exact.products(along)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no type of its own for this; a closure that fails will fail again
            return str(error)
        if not all(map(resolves_differences, parameters)):
            return ""
        differences = FiniteDifferences(closure, self._model, parameters).products(along)
        for product, difference, gradient in zip(products, differences, gradients, strict=True):
            off, size, noise = (
                float(torch.linalg.vector_norm(one)) for one in (product - difference, difference, gradient)
            )
            if not math.isfinite(off + size + noise):
                return None
            if off > _AGREEMENT * size + _NOISE * noise:
                return f"a second derivative is {off:.3g} away from a difference of gradients of size {size:.3g}"
        return ""

    def _radius(self, products: DoubleBackward | FiniteDifferences, place: int, at: int) -> Radius:
        start, most = self._start(at)
        radius, vector = spectral_radius(lambda along: products.products({place: along})[0], start, most=most)
        if math.isfinite(radius.value):
            self._vectors[at] = vector.to(torch.bfloat16)
        return radius

    def _start(self, at: int) -> tuple[torch.Tensor, int]:
        """The vector to start with, and how many products may follow."""
        parameter = self._parameters[at]
        start = self._random(parameter)
        room = max(WARM_PRODUCTS, _BASIS_BYTES // start.nbytes)
        known = self._vectors.get(at)
        if known is None:
            return start, min(PRODUCTS, room)
        start *= _FRESH / torch.linalg.vector_norm(start)
        return start.add_(known.to(start.dtype)), WARM_PRODUCTS

    def _random(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """A random vector for a parameter, from a generator that is never the training's own."""
        self._count += 1
        device, dtype = parameter.device, work_dtype(parameter)
        generator = torch.Generator(device).manual_seed(self._count)
        return torch.randn(parameter.numel(), dtype=dtype, device=device, generator=generator)


def _kernels(kind: type[DoubleBackward] | type[FiniteDifferences]) -> AbstractContextManager[object]:
    """Of torch's ways to compute attention only the plain one can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH) if kind is DoubleBackward else nullcontext()


def _shares(proxies: Iterable[float]) -> list[float]:
    known = [value if math.isfinite(value) else 0.0 for value in proxies]
    total = sum(known) or 1.0
    return [value / total for value in known]
