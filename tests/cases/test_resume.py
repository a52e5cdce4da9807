"""B84: training that is resumed in a fresh process goes on with the same batches and the same losses, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import tierload
from tests.cases.children import script
from tests.cases.script_resume import SAVE_AT
from tests.cases.stores import let_go

Lines = dict[str, dict[int, str]]


def lines_of(output: str) -> Lines:
    """Batch and loss by label and step."""
    found: Lines = {}
    for line in output.splitlines():
        label, step, rest = line.split("|", 2)
        found.setdefault(label, {})[int(step)] = rest
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    store = tmp_path_factory.mktemp("resume") / "store"
    return lines_of(script("script_resume", "whole", store)) | lines_of(script("script_resume", "rest", store))


@pytest.mark.parametrize(("step", "tag"), SAVE_AT.items())
def test_b84_resumed_in_a_fresh_process(runs: Lines, step: int, tag: str) -> None:
    rest = {number: line for number, line in runs["whole"].items() if number > step}
    assert len(runs["whole"]) == 30
    assert len(set(runs["whole"].values())) == 30
    assert runs[tag] == rest


def test_b84_saving_changes_nothing(runs: Lines) -> None:
    """The run that was saved and one that was not."""
    assert runs["whole"] == runs["unsaved"]


def draws(generator: np.random.Generator) -> list[object]:
    cuda = [torch.rand(2, device="cuda").tolist()] if torch.cuda.is_available() else []
    return [random.random(), np.random.random(3).tolist(), torch.rand(3).tolist(), generator.normal(), *cuda]


def test_b84_every_generator_is_restored(store: Path) -> None:
    """Python's, numpy's old and new, torch's; a gaussian that was drawn in a pair and half used; a generator object."""
    generator, torchs = np.random.default_rng(5), torch.Generator().manual_seed(6)
    random.gauss(0, 1)
    np.random.normal()
    state = {"rng": tierload.RNG(), "noise": generator, "sampler": torchs}
    tierload.save(state, store)
    first = [*draws(generator), random.gauss(0, 1), np.random.normal(), torch.rand(2, generator=torchs).tolist()]
    draws(generator)
    let_go(store)
    tierload.load(store, into=state)
    again = [*draws(generator), random.gauss(0, 1), np.random.normal(), torch.rand(2, generator=torchs).tolist()]
    assert first == again


def test_b84_the_generators_are_restored_last(store: Path) -> None:
    """A hook that draws random numbers while it is loaded does not shift what comes after."""

    class Drawing(torch.nn.Linear):
        def _load_from_state_dict(self, *args: object) -> None:
            torch.rand(7)
            random.random()
            super()._load_from_state_dict(*args)

    state = {"rng": tierload.RNG(), "z": Drawing(2, 2)}
    tierload.save(state, store)
    expected = [torch.rand(2).tolist(), random.random()]
    tierload.load(store, into=state)
    assert [torch.rand(2).tolist(), random.random()] == expected
