"""B86, B84: batches after a resume are those of the run that was never interrupted, and so is what is drawn beside
them; or the resume is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import tierload
from tierload import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'", "ignore:using in_order")

SAMPLES, BATCH, EPOCH = 100, 10, 10
STEPS = 24
Drawn = tuple[list[int], float, float]


class Numbers(Dataset[int]):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def mine() -> range:
    """The samples of this worker."""
    worker = torch.utils.data.get_worker_info()
    return range(worker.id, SAMPLES, worker.num_workers) if worker else range(SAMPLES)  # type: ignore[union-attr]


class Stream(IterableDataset[int]):
    """It does not know where it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(mine())


class StatefulStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        samples, skipped, self.given = mine(), self.given, 0
        for self.given, sample in enumerate(samples[skipped:], skipped + 1):
            yield sample
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Lengthless(Sampler[list[int]]):
    """A sampler of batches that knows no length."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for at in range(0, SAMPLES, BATCH):
            yield order[at : at + BATCH]


def of_batches(sampler: Sampler[int]) -> Any:
    return StatefulDataLoader(Numbers(), batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))


class Eager(Sampler[int]):
    """Its order is drawn by ``iter``, and not by the first ``next``."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SAMPLES), SAMPLES))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def loader(dataset: Any = None, **options: Any) -> Any:
    return StatefulDataLoader(Numbers() if dataset is None else dataset, BATCH, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "shuffled by a generator": lambda: loader(shuffle=True, generator=seeded()),
    "torch's sampler": lambda: loader(sampler=RandomSampler(Numbers())),
    "torch's sampler with a generator": lambda: loader(sampler=RandomSampler(Numbers(), generator=seeded())),
    "a sampler that draws eagerly": lambda: loader(sampler=Eager()),
    "a sampler of batches": lambda: of_batches(RandomSampler(Numbers())),
    "a sampler of batches with a generator": lambda: of_batches(RandomSampler(Numbers(), generator=seeded())),
    "a sampler without a length": lambda: StatefulDataLoader(Numbers(), batch_sampler=Lengthless()),
    "torch's sampler of a rank": lambda: loader(sampler=DistributedSampler(Numbers(), 2, 0)),
    "torchdata's sampler of a rank": lambda: loader(sampler=StatefulDistributedSampler(Numbers(), 2, 0)),
    "a stream": lambda: loader(Stream()),
    "streams in a chain": lambda: loader(ChainDataset([Stream()])),
    "a stream with a state": lambda: loader(StatefulStream()),
    "workers": lambda: loader(shuffle=True, num_workers=2, generator=seeded()),
    "workers that stay": lambda: loader(shuffle=True, num_workers=2, persistent_workers=True, snapshot_every_n_steps=3),
    "workers of a stream": lambda: loader(Stream(), num_workers=2),
}


def train(path: Path, loader: Any, steps: int, *, seed: int = 0, every: int = 1) -> dict[int, Drawn]:
    """What each step was given, and what it drew from the process's random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    with tierload.Session(path, every=every, loader=loader) as run:
        batches = run.batches(loader)
        if run.step == 0:
            run.save()
            torch.rand(1)  # what is drawn before the first batch is drawn again
        found = {}
        for step in run.steps(steps):
            found[step] = next(batches).tolist(), torch.rand(1).item(), random.random()
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_b86_every_position_is_gone_on_from(store: Path, kind: str) -> None:
    make = KINDS[kind]
    whole = train(store, make(), STEPS)
    if "rank" not in kind:
        for first in (1, EPOCH + 1):
            assert samples(whole[step] for step in range(first, first + EPOCH)) == [*range(SAMPLES)]
    for step in (0, 3, 4, 9, 10, 11, 20) if kind == "shuffled" else (3, 10, 14):
        tierload.rollback(store, next(c.id for c in commits(store) if c.step == step))
        expected = {after: whole[after] for after in range(step + 1, STEPS + 1)}
        rest = train(store, make(), step + 2, seed=9)  # twice in one epoch
        rest |= train(store, make(), STEPS, seed=10)
        assert rest == expected


def samples(drawn: Iterable[Drawn]) -> list[int]:
    return sorted(sample for batch, *_ in drawn for sample in batch)


def commits(store: Path) -> list[tierload.Commit]:
    with tierload.open(store) as opened:
        return opened.commits()


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "workers": (lambda: loader(shuffle=True, num_workers=2), "num_workers was 0 and is 2"),
    "no shuffling": (lambda: loader(), "sampler was 'RandomSampler' and is 'SequentialSampler'"),
    "other data": (lambda: loader(Numbers(90), shuffle=True), "number of samples was 100 and is 90"),
    "batch size": (lambda: StatefulDataLoader(Numbers(), 5, shuffle=True), "batch_size was 10 and is 5"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_b86_another_loader_goes_on_from_an_epochs_end_alone(store: Path, change: str) -> None:
    make, difference = OTHERS[change]
    train(store, loader(shuffle=True), EPOCH + 4)
    before = commits(store)
    with pytest.raises(InvalidRequest, match=r"in the midst of epoch 1, after 4 batches.*Samples would be") as refused:
        train(store, make(), EPOCH + 5)
    assert difference in str(refused.value)
    assert commits(store) == before, "nothing is lost"
    tierload.rollback(store, EPOCH)
    other = make()
    found = train(store, other, EPOCH + len(other))
    assert samples(found.values()) == [*range(len(other.dataset))]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (BatchSampler(RandomSampler(Numbers()), 5, drop_last=False), "batch_size was 10 and is 5"),
        (
            BatchSampler(range(SAMPLES), BATCH, drop_last=False),
            "sampler was 'BatchSampler of RandomSampler' and is 'BatchSampler of range'",
        ),
    ],
)
def test_b86_what_is_in_a_sampler_of_batches_counts(store: Path, other: BatchSampler, difference: str) -> None:
    train(store, of_batches(RandomSampler(Numbers())), 4)
    with pytest.raises(InvalidRequest, match=difference):
        train(store, StatefulDataLoader(Numbers(), batch_sampler=other), 5)


def test_a_sampler_in_a_sampler_of_batches_is_told_of_the_epoch(store: Path) -> None:
    whole = train(store, of_batches(DistributedSampler(Numbers(), 1, 0)), 2 * EPOCH)
    assert whole[1][0] != whole[EPOCH + 1][0]


def test_a_loader_that_was_looked_into_before_begins_at_its_beginning(store: Path) -> None:
    looked = loader()
    next(iter(looked))
    assert train(store, looked, 1)[1][0] == [*range(10)]


def test_batches_that_were_taken_past_the_session_are_noticed(store: Path) -> None:
    own = loader()
    with tierload.Session(store, every=1, loader=own) as run:
        next(iter(own))
        with pytest.raises(InvalidRequest, match=r"iterated over by itself; take its batches from run\.batches"):
            run.save()
    with tierload.Session(store, every=1, loader=own) as run:
        batches = run.batches(own)
        steps = run.steps(2)
        next(steps)
        next(batches)
        next(iter(own))
        with pytest.raises(InvalidRequest, match="is not after 1 batches of epoch 0"):
            next(steps)


def test_batches_are_taken_in_steps(store: Path) -> None:
    own = loader()
    with tierload.Session(store, every=1, loader=own) as run:
        batches = run.batches(own)
        with pytest.raises(InvalidRequest, match="taken outside of a step"):
            [*zip(batches, run.steps(3), strict=False)]  # the batch of a step before the step
        assert [step for step, _ in zip(run.steps(3), batches, strict=False)] == [1, 2, 3]
        with pytest.raises(InvalidRequest, match="taken outside of a step"):
            next(batches)


@dataclass
class Holder:
    inside: list[Any]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no state": (lambda: DataLoader(Numbers()), "Use torchdata.stateful_dataloader.StatefulDataLoader"),
    "no order": (lambda: loader(num_workers=2, in_order=False), "use True"),
    "not by itself": (lambda: {"train": loader()}, "pass it as a part of its own"),
    "in a dataclass": (lambda: Holder([loader()]), "pass it as a part of its own"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_loaders_that_cannot_be_resumed_are_refused_at_once(store: Path, kind: str) -> None:
    make, advice = REFUSED[kind]
    with pytest.raises(InvalidRequest, match=advice):
        tierload.Session(store, every=1, data=make())
    assert not store.exists()


def test_a_loader_without_batches_is_no_endless_loop(store: Path) -> None:
    empty = StatefulDataLoader(Numbers(3), BATCH, drop_last=True)
    with pytest.raises(InvalidRequest, match="without batches"):
        train(store, empty, 1)


def test_only_loaders_that_are_parts_give_batches(store: Path) -> None:
    session = tierload.Session(store, every=1, loader=loader())
    with session as run, pytest.raises(InvalidRequest, match=r"Session\(\.\.\., loader=loader\)"):
        run.batches(loader())


def test_a_session_that_begins_anew_in_the_same_process_has_nothing_left_over(store: Path) -> None:
    own = loader()
    session = tierload.Session(store, every=10, loader=own)
    for _ in range(2):
        with session as run:
            for _ in run.steps(5):
                assert next(run.batches(own)).tolist() == [*range(10)]
                break  # nothing is saved
