"""The random numbers that batches are drawn with, so that a resumed epoch draws them as the interrupted one did.

Accelerate's loader is a batch ahead: when step N is saved, the first batch of step N+1 has been drawn already, with
random numbers that are gone. And what shuffles by the global generators has done so when the epoch began. So a commit
in the middle of an epoch has, beside the generators as they are, what they were then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tierload.state import RNG
from tierload.state.rng import capture, restore

__all__ = ["DrawnBatches", "drawn", "generators", "set_generators"]


def generators() -> object:
    """The states of the process's random number generators."""
    return capture(RNG())


def set_generators(state: object) -> None:
    """Sets them."""
    restore(RNG(), state)


class DrawnBatches(BatchSampler):
    """A batch sampler that knows what the generators were when this epoch began, and its newest batch.

    A loader takes the indices of a batch just before it draws it. All but the iteration is the inner sampler's.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.drawn: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self._since: object = None

    def replay(self, drawn: dict[str, Any], since: object) -> None:
        """The next epoch is one that was interrupted: its newest batch was drawn as ``drawn`` says, and what is drawn
        after that goes on from the generators ``since``."""
        self._before, self._since = drawn, since

    def replayed(self) -> bool:
        """Whether the generators have been set as they were when the epoch was interrupted; if not, it is over."""
        pending, self._before = self._before, None
        return pending is None

    def __iter__(self) -> Iterator[list[int]]:
        if self._before is not None:
            set_generators(self._before["epoch"])  # the inner sampler may shuffle with them when it is asked first
        epoch = generators()
        for number, batch in enumerate(self.inner):
            before = self._before
            if before is not None and number < before["number"]:
                yield batch  # it is skipped
                continue
            if before is not None and number == before["number"]:
                set_generators(before["batch"])
            elif before is not None:
                set_generators(self._since)
                self._before = None
            self.drawn = {"number": number, "epoch": epoch, "batch": generators()}
            yield batch

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # of one that is being unpickled
        return getattr(self.inner, name)


def drawn(loader: Any) -> DrawnBatches | None:
    """Lets a loader, accelerate's or torch's own, draw through a ``DrawnBatches``, which it gives; None where it has no
    batches of indices."""
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader) or isinstance(inner.dataset, IterableDataset) or inner.batch_sampler is None:
        return None
    batches = DrawnBatches(inner.batch_sampler)
    vars(inner)["batch_sampler"] = batches  # torch refuses to set it: nothing that it was checked for is different
    return batches
