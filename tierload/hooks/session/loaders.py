"""The batches of a loader, epoch after epoch, and their position in a commit.

A position is right when the batches after it, and every random number that training draws beside them, are those of the
run that was never interrupted. torchdata's ``StatefulDataLoader`` remembers which samples it has given; what it leaves
to its user is done here:

* To begin an epoch draws from the process's random numbers. So an iterator is made at one place, when the epoch begins,
  and one that goes on in the midst of an epoch is made before the random states of the commit are set.
* A sampler without ``state_dict`` is stepped to its position in an order that it draws anew: it has to find the random
  states, and its generator, as they were when the epoch began (torchdata steps one that it takes from directly, as a
  ``batch_sampler``, only with the next batch, when these are others). A generator that a loader was given goes on
  afterwards from where it was, and not from where the epoch began.
* What torchdata cannot find its position in, or finds wrongly, is read again from the beginning of the epoch: datasets
  without a state (it counts their batches twice, so that the next resume goes wrong), and samplers of the user's own
  that draw their order when ``iter`` is called (it calls that twice).
* A loader of another kind (workers, ranks, batch size, dataset) would begin somewhere else without a word. It is
  refused in the midst of an epoch, and at an epoch's end begins the next one.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset

from tierload.engine import place
from tierload.errors import InvalidRequest
from tierload.state import RNG, rng

__all__ = ["Batches"]

_log = logging.getLogger("tierload")


class Batches:
    """An iterator over a loader's batches without an end: after the last one of an epoch comes the first of the next.

    ``epoch`` is the current one, from 0: a sampler, batch sampler or dataset with ``set_epoch`` is told of it.
    ``position`` is how many batches of it were given. Batches are given ``in_step`` only: one that is taken between two
    steps would be in the commit of the one before, and used by none.
    """

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        self.epoch = 0
        self.position = 0
        self.in_step = False
        self._name = name
        self._loader: Any = loader
        self._iterator: Iterator[Any] | None = None  # None: the next batch begins the epoch
        self._began: dict[str, Any] = {}  # the random states when it began
        self._loaded: dict[str, Any] | None = None  # what a load has brought, until it is taken up
        self._check_kind()

    def of(self, loader: object) -> bool:
        """Whether these are the batches of this loader."""
        return self._loader is loader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self.in_step:
            raise InvalidRequest(
                f"a batch of {self._name} was taken outside of a step, so a resumed run would take it twice or never; "
                "take it in the loop's body, as in `for step in run.steps(n): batch = next(batches)`"
            )
        if self._iterator is not None:
            try:
                return self._give(self._iterator)
            except StopIteration:
                self.epoch += 1
        self._set_epoch()
        self.position = 0
        self._began = {"rng": rng.capture(RNG()), "generators": self._generator_states()}
        self._iterator = iter(self._loader)
        try:
            return self._give(self._iterator)
        except StopIteration:
            raise InvalidRequest(f"{self._name} is a loader without batches") from None

    def _give(self, iterator: Iterator[Any]) -> Any:
        batch = next(iterator)
        self.position += 1
        return batch

    # For the session

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is.

        Raises:
            InvalidRequest: Somebody else has moved it.
        """
        if self._iterator is not None or self._loader._iterator is not None:
            self._check_position("it was iterated over by itself; take its batches from run.batches() only")
        return {
            "epoch": self.epoch,
            "position": self.position,
            "batches": self._batches,
            "kind": self._kind,
            "began": self._began,
            "generators": self._generator_states(),
            "loader": {} if self._iterator is None else self._loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps it for ``start``: random states come after it."""
        self._loaded = state

    def start(self) -> None:
        """Goes on from where a load says, if there was one. That draws random numbers, so a commit's are set after it.

        Raises:
            InvalidRequest: This loader cannot go on from where the other one was.
        """
        self._loader.load_state_dict({})  # torchdata's word for: whoever has iterated over it is done
        self._iterator, self.epoch, self.position, self.in_step = None, 0, 0, False
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._take_up(state)

    def _take_up(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._began = state["epoch"], state["position"], state["began"]
        different = [
            f"{what} was {there!r} and is {self._kind.get(what)!r}"
            for what, there in state["kind"].items()
            if there != self._kind.get(what)
        ]
        if different and self.position == state["batches"]:
            self.epoch, self.position = self.epoch + 1, 0
        elif different and self.position:
            raise InvalidRequest(
                f"{self._name} was saved in the midst of epoch {self.epoch}, after {self.position} batches, and cannot "
                f"go on from there: {'; '.join(different)}. Samples would be given twice, or never. Resume with the "
                "loader as it was, or roll back to a commit at the end of an epoch (run.save() makes one)"
            )
        elif self.position:
            self._go_on(state["loader"])
        self._set_generators(state["generators"])

    def _go_on(self, saved: dict[str, Any]) -> None:
        rng.restore(RNG(), self._began["rng"])
        self._set_generators(self._began["generators"])
        self._set_epoch()
        if self._reads_again(saved):
            _log.warning("%s: the first %s batches of the epoch are read again", self._name, self.position)
            self._iterator = iter(self._loader)
            for _ in range(self.position):
                next(self._iterator)
        else:
            self._loader.load_state_dict(saved)
            self._iterator = iter(self._loader)
            self._step_order()
        self._check_position("torchdata went on from elsewhere")

    def _step_order(self) -> None:
        """Draws the order now where torchdata has only noted how far to step; workers have had it drawn."""
        iterator: Any = self._iterator
        if self._loader.num_workers == 0 and isinstance(iterator._sampler_iter, itertools.islice):
            order = iter(self._order)
            for _ in range(self.position):
                next(order)
            iterator._sampler_iter = order

    def _set_epoch(self) -> None:
        for each in (*self._samplers(), self._loader.dataset):
            told = getattr(each, "set_epoch", None)
            if callable(told):
                told(self.epoch)

    # The loader

    def _check_kind(self) -> None:
        if not callable(getattr(self._loader, "state_dict", None)):
            raise InvalidRequest(
                f"{self._name} is a {type(self._loader).__qualname__}, which cannot say where it is. Use "
                "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments"
            )
        if self._loader.num_workers > 0 and not getattr(self._loader, "in_order", True):
            raise InvalidRequest(
                f"{self._name} has in_order=False: which samples it has given cannot be told; use True"
            )

    def _reads_again(self, saved: dict[str, Any]) -> bool:
        if isinstance(self._loader.dataset, IterableDataset):
            return not _remembered(saved)
        sampler = self._order
        known = type(sampler).__module__.startswith(("torch.", "torchdata."))
        lazy = inspect.isgeneratorfunction(type(sampler).__iter__)
        return not (known or lazy or callable(getattr(sampler, "state_dict", None)))

    def _check_position(self, why: str) -> None:
        iterator: Any = self._iterator
        if self._loader._iterator is not iterator or getattr(iterator, "_num_yielded", None) != self.position:
            raise InvalidRequest(f"{self._name} is not after {self.position} batches of epoch {self.epoch}: {why}")

    @property
    def _kind(self) -> dict[str, object]:
        """What a position depends on."""
        loader = self._loader
        return {
            "num_workers": loader.num_workers,
            "batch_size": getattr(loader.batch_sampler, "batch_size", loader.batch_size),
            "number of ranks": place()[1],
            "sampler": " of ".join(type(each).__qualname__ for each in _with_inner(self._order)),
            "number of samples": _length(loader.dataset),
        }

    @property
    def _order(self) -> Any:
        """Who says which samples come next."""
        loader = self._loader
        return loader.batch_sampler if loader.batch_size is None and loader.batch_sampler else loader.sampler

    @property
    def _batches(self) -> int | None:
        """Of an epoch; None where only the dataset or a sampler knows."""
        return None if isinstance(self._loader.dataset, IterableDataset) else _length(self._loader)

    def _samplers(self) -> list[Any]:
        """Each once, those in a sampler of batches too."""
        both = (self._loader.sampler, self._loader.batch_sampler)
        return list({id(each): each for sampler in both for each in _with_inner(sampler)}.values())

    def _generators(self) -> list[torch.Generator]:
        """Those that the loader was given; others are the process's own."""
        found = [getattr(each, "generator", None) for each in (self._loader, *self._samplers())]
        return [each for each in dict.fromkeys(found) if isinstance(each, torch.Generator)]

    def _generator_states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self._generators(), states, strict=False):  # another kind may have others
            each.set_state(state)


def _with_inner(sampler: Any) -> Iterator[Any]:
    """A sampler, and the ones that it takes samples from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _length(of: Any) -> int | None:
    """None where there is none, though there may be a ``__len__``: torch's loaders and chains ask what is in them."""
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


def _remembered(saved: dict[str, Any]) -> bool:
    """Whether a dataset, or its iterator, has put a state of its own into a loader's."""
    return any(
        value is not None if key in ("dataset_state", "dataset_iter_state") else _remembered(value)
        for key, value in saved.items()
        if isinstance(value, dict) or key in ("dataset_state", "dataset_iter_state")
    )
