"""Loading: whichever way a value goes, what is loaded or filled is the same, and so is what is refused."""

from __future__ import annotations

import copy
import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from fake_engine import Saved, bind, load, run, save
from hypothesis import given, settings
from torch import nn
from two_ways import Maker, outcome, portrait, python_way, tensors_of

from tierload.errors import KeyMismatch
from tierload.state import plan_bind

ones, zeros = torch.ones, torch.zeros


def emptied(seed: int) -> dict:
    """The state of a seed with all tensors overwritten."""
    state = Maker(seed, plain=True).state()
    for tensor in tensors_of(state):
        storage = tensor.untyped_storage()
        zeros(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(1)
    return state


def filled(saved: Saved, make, **options) -> tuple[list, object]:
    """A target after the load, and the report or the error."""
    into = make()
    watched = [(tensor, tensor._version) for tensor in tensors_of(into) if not tensor.is_inference()]
    result = outcome(lambda: bind(saved, into, **options))
    changed = [tensor._version > before for tensor, before in watched]
    return [*portrait(into), changed], result


def both(saved: Saved, make, **options) -> tuple[list, object]:
    """A target after the load, and what was reported: the same natively and by Python alone."""
    into, result = filled(saved, make, **options)
    with python_way():
        other, python = filled(saved, make, **options)
    if b'"ref"' in saved.document and not isinstance(result, str) and not isinstance(python, str):
        # A container in two places is named by either: by the key of the store, or by the place that was met first.
        assert len(result.loaded) == len(python.loaded)
        python = dataclasses.replace(python, loaded=result.loaded)
    assert other == into
    assert python == result
    return into, result


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_any_target_is_filled_the_same_either_way(seed, strict):
    saved = outcome(lambda: save(Maker(seed, plain=True).state()))
    if isinstance(saved, Saved):
        both(saved, lambda: emptied(seed), strict=strict)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_any_difference_is_met_the_same_either_way(seed, change):
    saved = outcome(lambda: save(Maker(seed, plain=True).state()))
    if not isinstance(saved, Saved):
        return

    def changed() -> dict:
        """One thing in the target is another than in the store."""
        target = emptied(seed)
        maker = Maker(change)
        random = maker.random
        weights = random.choice([one for one in (target, target["weights"]) if one])
        key = random.choice(list(weights))
        tensor = maker.tensor()
        if random.choice([True, False]):
            weights.pop(key, None)
        if random.choice([True, False]):
            weights[random.choice([key, "new", 1, True])] = random.choice(
                [tensor, [tensor], None, 5, {"inner": tensor}, random.choice(tensors_of(target) or [tensor])]
            )
        return target

    for strict in (True, False):
        both(saved, changed, strict=strict)


FLAT = {"a": ones(2, 3), "b": torch.arange(4.0), "c": torch.full((2, 3), 7.0)}


def test_one_tensor_under_two_keys():
    saved = save(FLAT)

    def twice():
        one = zeros(2, 3)
        return {"a": one, "b": zeros(4), "c": one}

    _, result = both(saved, twice)
    assert result.startswith("KeyMismatch")
    assert "shares memory" in result
    _, report = both(saved, twice, strict=False)
    assert report.unexpected == ("c",)
    assert report.loaded == ("a", "b")


@pytest.mark.parametrize(
    "views",
    [
        lambda base: {"a": base[:6].view(2, 3), "b": base[4:8], "c": zeros(2, 3)},
        lambda base: {"a": base[:6].view(2, 3), "b": base[6:10], "c": base[10:16].view(2, 3)},
        lambda base: {"a": base[2:8].view(2, 3), "b": base[:16:4], "c": base[8:14].view(2, 3)},
        lambda base: {"a": base[2:8].view(2, 3), "b": base[:16:4], "c": base[1:16:2][:6].view(2, 3)},
        lambda base: {"a": base[:6].view(2, 3), "b": zeros(4), "c": base[:6].view(3, 2).t()},
        lambda base: {"a": base[:12:2].view(2, 3), "b": zeros(4), "c": base[1:13:2].view(2, 3)},
    ],
)
def test_targets_that_overlap(views):
    saved = save(FLAT)
    for strict in (True, False):
        both(saved, lambda: views(zeros(20)), strict=strict)


ODD = {
    "other dtype": lambda: zeros(2, 3, dtype=torch.float64),
    "other shape": lambda: zeros(3, 2),
    "more dimensions": lambda: zeros(1, 2, 3),
    "turned": lambda: zeros(3, 2).t(),
    "gaps": lambda: zeros(2, 6)[:, ::2],
    "repeated": lambda: zeros(1, 3).expand(2, 3),
    "on meta": lambda: torch.empty(2, 3, device="meta"),
    "parameter": lambda: nn.Parameter(zeros(2, 3)),
    "leaf": lambda: zeros(2, 3, requires_grad=True),
    "no leaf": lambda: zeros(2, 3, requires_grad=True) * 2,
    "negative": lambda: torch._neg_view(zeros(2, 3)),
    "imaginary": lambda: zeros(2, 3, dtype=torch.complex64).conj().imag,
    "odd address": lambda: zeros(25, dtype=torch.uint8)[1:].view(torch.uint8),
    "bool": lambda: zeros(2, 3, dtype=torch.bool),
    "lazy copy": lambda: torch._lazy_clone(zeros(2, 3)),
    "none": lambda: None,
    "list": lambda: [[0.0, 0.0, 0.0]] * 2,
    "sparse": lambda: zeros(2, 3).to_sparse(),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"cast": True}, {"keys": ["*"]}], ids=str)
def test_any_kind_of_target(odd, options):
    saved = save(FLAT)
    both(saved, lambda: {"a": odd(), "b": zeros(4), "c": zeros(2, 3)}, **options)
    both(saved, lambda: {"w": {"a": odd()}}, **options)


def test_inference_tensors_are_filled():
    saved = save(FLAT)
    with torch.inference_mode():
        into = {name: torch.zeros_like(tensor) for name, tensor in FLAT.items()}
    bind(saved, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in FLAT.items())


def test_what_was_lazily_copied_from_a_target_keeps_its_values():
    saved = save(FLAT)
    base = zeros(2, 3)
    into = {"a": torch._lazy_clone(base), "b": zeros(4), "c": zeros(2, 3)}
    bind(saved, into)
    assert torch.equal(into["a"], FLAT["a"])
    assert torch.equal(base, zeros(2, 3)), "another tensor's memory is not written to"


def test_conjugate_and_negative_targets_and_stores():
    vector = torch.arange(4) * (1 + 2j)
    stores = [vector, vector.conj(), vector.conj().resolve_conj(), vector.imag, vector.conj().imag, vector.real]
    for stored in stores:
        saved = save({"x": stored})
        for target in stores:
            if target.dtype is not stored.dtype:
                continue
            both(saved, lambda t=target: {"x": copy.deepcopy(t.detach()).mul_(0)})
            into = {"x": zeros(4, dtype=torch.complex64).conj() if stored.is_complex() else zeros(4)}
            bind(saved, into)
            assert torch.equal(into["x"], stored)


@pytest.mark.parametrize("first", [0, 1])
def test_ties_of_store_and_target(first):
    tied, count = ones(3), 3 - first
    saved = save({"a": tied, "b": tied[first:], "c": ones(3) * 2})

    def apart():
        return {"a": zeros(3), "b": zeros(count), "c": zeros(3)}

    def alike():
        one = zeros(3)
        return {**apart(), "a": one, "b": one[first:]}

    def otherwise():
        one = zeros(3)
        return {**apart(), "a": one, "c": one}

    for make in (apart, alike, otherwise):
        for strict in (True, False):
            both(saved, make, strict=strict)


def test_one_container_twice_in_store_and_target():
    def twice(number: float) -> dict:
        shared = {"x": ones(2) * number, "y": [ones(3) * number]}
        return {"a": shared, "b": {1: shared}}

    def apart(number: float) -> dict:
        return {"a": twice(number)["a"], "b": {1: twice(number)["a"]}}

    for stored in (twice(5), apart(5)):
        for make in (twice, apart):
            if stored["a"] is not stored["b"][1] and make is twice:
                continue  # the target has one place for two values
            both(save(stored), lambda m=make: m(0))
            into = make(0)
            bind(save(stored), into)
            assert torch.equal(into["b"][1]["x"], ones(2) * 5)
            assert torch.equal(into["a"]["y"][0], ones(3) * 5)


class Strange(dict):
    """A dict whose items are what somebody says."""

    said: object = None

    def items(self):
        return self.said


@pytest.mark.parametrize(
    "items",
    [[["a", zeros(2, 3)]], ["ab"], [1], [()], [("a",)], [("a", zeros(2, 3), 3)], 5, None, [(["a"], zeros(2, 3))]],
    ids=str,
)
def test_a_dict_with_items_of_its_own(items):
    into = Strange(a=zeros(2, 3), b=zeros(4), c=zeros(2, 3))
    into.said = items
    bind(save(FLAT), into)  # what counts are its keys and values
    assert all(torch.equal(into[name], tensor) for name, tensor in FLAT.items())


def test_keys_that_are_equal_and_of_other_types():
    saved = save({1: ones(2), 0: ones(3), "x": ones(1)})
    for into in (
        lambda: {True: zeros(2), False: zeros(3), "x": zeros(1)},
        lambda: {1.0: zeros(2), 0: zeros(3), "x": zeros(1)},
        lambda: {"1": zeros(2), "#1": zeros(2), 0: zeros(3), "x": zeros(1)},
    ):
        for strict in (True, False):
            both(saved, into, strict=strict)


def test_nothing_of_a_refused_load_has_been_bound():
    into = {"a": zeros(2, 3), "b": zeros(5), "c": zeros(2, 3)}
    saved = save(FLAT)
    with pytest.raises(KeyMismatch):
        plan_bind(saved.document, saved.chunks, into)
    plan = plan_bind(saved.document, saved.chunks, into, strict=False)
    assert plan.in_place == {0, 2}
    run(plan, saved)
    assert torch.equal(into["c"], FLAT["c"])
    assert torch.equal(load(saved)["b"], FLAT["b"])
