"""The meter: attached to a model and its optimizer, it follows a training and says what of the model is hot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tierload.errors import InvalidRequest, KeyMismatch, UnsupportedValue
from tierload.heat.curvature import Curvature
from tierload.heat.gradients import GradientActivity, second_moments
from tierload.heat.lanczos import Radius
from tierload.heat.locality import Locality
from tierload.heat.pages import page_locality, page_shares
from tierload.heat.products import Closure
from tierload.heat.ranking import Heat, Weights, checked_weights, heats
from tierload.types import HeatTable

__all__ = ["HeatMeter"]

_PAGE_BYTES = 1 << 20


class HeatMeter:
    """Follows a training through hooks on ``optimizer.step`` and the model's modules, from its construction to
    ``close``. The training's own numbers stay the same bit for bit.

    ``weights`` are those of gradient, radius and locality, and sum to 1. ``half_lives`` are in steps: of the gradient
    norms, and of the recent and the long average of accesses. Both can be set at any time. Radii are a proxy, the
    second moments of Adam, and that is enough to place and to prefetch: measured ones hardly change what is hottest
    (docs/decisions/0021).

    With ``closure``, which returns the loss of a fixed batch with its graph, they are measured, one parameter after
    another, whenever the last measurement has come down to ``share`` of the time since, pauses included. An eighth of a
    batch does. It calls the bare model, not DistributedDataParallel around it.

    ``parameters`` are those to follow, by name; as a rule the model's own. Tied ones are one, under each of their
    names. What the model gets later is not followed: make another meter then. A state as the meter's ``state_dict`` can
    be a part of a commit.

    Raises:
        InvalidRequest: The model has no parameters, or some without a shape (lazy modules).
        UnsupportedValue: A parameter is spread over ranks (DTensor).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[float] = (0.40, 0.35, 0.25),
        *,
        half_lives: Sequence[float] = (100, 20, 1000),
        closure: Closure | None = None,
        share: float = 0.01,
        parameters: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        named = dict(model.named_parameters(remove_duplicate=False)) if parameters is None else dict(parameters)
        if not named:
            raise InvalidRequest(f"a {type(model).__name__} has no parameters, so there is nothing to measure")
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; use a part of the training's time, above 0 and at most 1")
        for name, parameter in named.items():
            if isinstance(parameter, torch.nn.UninitializedParameter):
                raise InvalidRequest(f"{name} has no shape yet (a lazy module); let one batch through the model first")
            if isinstance(parameter, DTensor):
                raise UnsupportedValue(f"{name} is spread over ranks (DTensor), whose heat cannot be measured yet")
        self.weights = weights
        self.half_lives = half_lives
        self._named = named
        self._parameters = list(dict.fromkeys(named.values()))
        self._names = {parameter: name for name, parameter in reversed(named.items())}
        self._optimizer = optimizer
        self._closure, self._share = closure, share
        self._gradients = GradientActivity(self._parameters)
        self._curvature = Curvature(model, self._parameters)
        self._locality = Locality(model, self._parameters)
        self._turn = 0
        self._debt = 0.0  # seconds that the last measurement took, less what has been granted since
        self._clock = time.perf_counter
        self._last: float | None = None
        # After a step, not before it: a closure of step() leaves its gradients then, and fused ones are unscaled then.
        self._hook = optimizer.register_step_post_hook(self._on_step)

    @property
    def weights(self) -> Weights:
        """The weights of gradient, radius and locality."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        self._weights = checked_weights(weights)

    @property
    def half_lives(self) -> tuple[float, float, float]:
        """Half-lives in steps: of gradient norms, of recent accesses, of accesses over a long time."""
        return self._half_lives

    @half_lives.setter
    def half_lives(self, half_lives: Sequence[float]) -> None:
        if len(half_lives) != 3 or not all(half_life > 0 for half_life in half_lives):
            raise ValueError(f"half_lives are {tuple(half_lives)}; use three numbers of steps, each more than 0")
        gradient, recent, long = map(float, half_lives)
        self._half_lives = gradient, recent, long

    @property
    def method(self) -> str:
        """How radii are measured: ``"double backward"``, or ``"finite differences"`` once that was found impossible."""
        return self._curvature.method

    def scores(self) -> dict[str, Heat]:
        """The heat of every parameter, by name."""
        by_parameter = dict(zip(self._parameters, heats(*self._measured(), self._weights), strict=True))
        return {name: by_parameter[parameter] for name, parameter in self._named.items()}

    def pages(self, page_bytes: int = _PAGE_BYTES) -> dict[str, list[Heat]]:
        """The heat of every page of each parameter, ranked among all pages of all parameters; the last may be short.

        A page's gradient and radius are its part of the parameter's, by the second moments of Adam where there are
        some; its locality is that of the most used row in it.
        """
        by_parameter = dict(zip(self._parameters, self._pages(self._measured(), page_bytes), strict=True))
        return {name: by_parameter[parameter] for name, parameter in self._named.items()}

    def next_uses(self) -> dict[str, int]:
        """How many parameters a step uses before each one, as the last step did; without those that it did not use."""
        uses = self._locality.next_uses()
        return {name: uses[at] for name, at in self._positions().items() if at in uses}

    def table(self, key_of: Callable[[torch.Tensor], str | None], page_bytes: int = _PAGE_BYTES) -> HeatTable:
        """What is known of the parameters, as commits carry it: under the key that ``key_of`` gives, without those that
        have none. Gradient norm, radius and locality are as measured, not ranked. Pages are those of ``pages``; a
        parameter that does not lie in memory row by row has none of its own."""
        keys: dict[str, int] = {}
        for at, parameter in enumerate(self._parameters):
            key = key_of(parameter)
            if key is not None:
                keys.setdefault(key, at)
        which = list(keys.values())
        measured = self._measured()
        scores, by_page = heats(*measured, self._weights), self._pages(measured, page_bytes)
        uses = self._locality.next_uses()
        gradient, radius, locality = (np.array([column[at] for at in which], np.float32) for column in measured)
        pages = {
            key: np.array([page.heat for page in by_page[at]], np.float32)
            for key, at in keys.items()
            if len(by_page[at]) > 1 and self._parameters[at].is_contiguous()
        }
        return HeatTable(
            keys=tuple(keys),
            gradient=gradient,
            radius=radius,
            locality=locality,
            heat=np.array([scores[at].heat for at in which], np.float32),
            first_use=np.array([uses.get(at, -1) for at in which], np.int32),
            pages=pages,
        )

    def touch(self, name: str, rows: torch.Tensor) -> None:
        """Says that this step uses these rows (indices of the first dimension) of a parameter, and no others; from then
        on the rows of that parameter are only what is said. Rows of embeddings are seen anyway, experts that are
        modules too, and of experts stacked in one tensor those whose indices, or numbers of tokens, are handed to the
        module that owns them, or, where they are not, those that have a gradient. So it is for frozen experts that are
        chosen in another way, and for other tables.

        Raises:
            InvalidRequest: No parameter has that name.
        """
        try:
            at = self._positions()[name]
        except KeyError:
            raise InvalidRequest(f"the model has no parameter {name!r}") from None
        self._locality.touch(at, rows)

    def audit(self, closure: Closure | None = None) -> dict[str, Radius]:
        """Measures the radii of all trained parameters now, by ``closure`` or the one of the construction, and returns
        them by name. It may take as long as some hundreds of steps.

        Raises:
            InvalidRequest: There is no closure, it returns no loss, or it goes backward itself.
        """
        closure = closure or self._closure
        if closure is None:
            raise InvalidRequest("an audit needs a closure that returns the loss of a fixed batch")
        found = self._measure(self._curvature.measurable(), closure)
        return {name: found[at] for name, at in self._positions().items() if at in found}

    def close(self) -> None:
        """Takes all hooks off; the scores stay as they are."""
        self._hook.remove()
        self._locality.remove()

    def state_dict(self) -> dict[str, object]:
        """All that was measured, by parameter names; tensors of it are live. Settings are the caller's."""
        return {
            "names": [self._names[parameter] for parameter in self._parameters],
            "gradients": self._gradients.average.state_dict(),
            "curvature": self._curvature.state_dict(),
            "locality": self._locality.state_dict(),
            "turn": self._turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state.

        Raises:
            KeyMismatch: It is one of other parameters; nothing was changed.
        """
        own, saved = [self._names[parameter] for parameter in self._parameters], list(state["names"])
        if own != saved:
            raise KeyMismatch(
                "the heat that was saved is that of other parameters, or of the same in another order",
                missing=sorted(set(own) - set(saved)),
                unexpected=sorted(set(saved) - set(own)),
            )
        self._gradients.average.load_state_dict(state["gradients"])
        self._curvature.load_state_dict(state["curvature"])
        self._locality.load_state_dict(state["locality"])
        self._turn = state["turn"]

    def _on_step(self, *_: object) -> None:
        now = self._clock()
        gradient, *accesses = self._half_lives
        norms = self._gradients.update(gradient)
        self._locality.step((accesses[0], accesses[1]), norms)
        if self._closure is not None:
            if self._last is not None:
                self._debt = max(self._debt - self._share * (now - self._last), 0.0)
            if self._last is not None and self._debt == 0.0:
                self._next_audit(self._closure)
                self._debt = self._clock() - now
        self._last = self._clock()

    def _next_audit(self, closure: Closure) -> None:
        positions = self._curvature.measurable()
        if positions:
            self._measure([positions[self._turn % len(positions)]], closure)
            self._turn += 1

    def _measure(self, positions: Sequence[int], closure: Closure) -> dict[int, Radius]:
        proxies = self._proxies()
        self._locality.paused = True
        try:
            return self._curvature.measure(positions, closure, proxies)
        finally:
            self._locality.paused = False

    def _measured(self) -> tuple[list[float], list[float], list[float]]:
        """Gradient norm, radius and locality of each parameter."""
        radii = self._curvature.radii(self._proxies())
        return self._gradients.average.mean().tolist(), radii, self._locality.values()

    def _pages(self, measured: tuple[list[float], list[float], list[float]], page_bytes: int) -> list[list[Heat]]:
        gradients, radii, locality = measured
        raw: list[tuple[float, float, float]] = []
        counts: list[int] = []
        for at, (parameter, moment) in enumerate(self._moments()):
            elements = max(page_bytes // parameter.element_size(), 1)
            count = max(-(-parameter.numel() // elements), 1)
            even = [1 / count] * count
            shares = even if moment is None or count == 1 else page_shares(moment, elements)
            rows = self._locality.rows(at) if count > 1 else None
            used = [1.0] * count if rows is None else page_locality(rows, parameter[0].numel(), elements)
            most = max(shares)
            raw += [
                (gradients[at] * part**0.5, radii[at] * part / most, locality[at] * use)
                for part, use in zip(shares, used, strict=True)
            ]
            counts.append(count)
        by_page, radii_by_page, locality_by_page = zip(*raw, strict=True)
        found = iter(heats(by_page, radii_by_page, locality_by_page, self._weights))
        return [[next(found) for _ in range(count)] for count in counts]

    def _moments(self) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
        moments = second_moments(self._parameters, self._optimizer)
        return list(zip(self._parameters, moments, strict=True))

    def _proxies(self) -> list[float]:
        """What stands for each radius when it is not measured: the sum of Adam's second moments; with an optimizer that
        keeps none, the square of the average gradient norm."""
        moments = [moment for _, moment in self._moments()]
        known = [moment for moment in moments if moment is not None]
        if not known:
            return self._gradients.average.mean().square().tolist()
        device = known[0].device
        sums = torch.stack([norm.to(device, torch.float32) for norm in torch._foreach_norm(known, 1)])
        each = iter(sums.tolist())
        return [0.0 if moment is None else next(each) for moment in moments]

    def _positions(self) -> dict[str, int]:
        at = {parameter: position for position, parameter in enumerate(self._parameters)}
        return {name: at[parameter] for name, parameter in self._named.items()}
