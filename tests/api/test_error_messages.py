"""Every error says what was found, where, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, let_go, state_of
from tests.rescue.support import flip
from tierload import TierloadError


@pytest.fixture
def saved(store: Path) -> Path:
    """Steps 1, 2, 3; back to 1; 4; tags a and b."""
    for step in (1, 2, 3):
        tierload.save(state_of(step), store, step=step, settings=SMALL)
    tierload.rollback(store, 1)
    tierload.save(state_of(4), store, step=4, tags=["a", "b"])
    let_go(store)
    return store


Use = Callable[[Path], Any]

MESSAGES: dict[str, tuple[Use, type[Exception], list[str]]] = {
    "no store": (lambda p: tierload.load(p / "x"), FileNotFoundError, ["{store}/x", "no tierload store", "save"]),
    "no step": (lambda p: tierload.load(p, step=7), LookupError, ["step 7", "step 4"]),
    "a step left behind": (lambda p: tierload.load(p, step=3), LookupError, ["step 3", "left behind", "commit "]),
    "no tag": (lambda p: tierload.load(p, tag="x"), LookupError, ["'x'", "a, b"]),
    "no commit": (lambda p: tierload.load(p, commit="ffff"), LookupError, ["'ffff'", "step 4"]),
    "two at once": (lambda p: tierload.load(p, step=1, tag="a"), ValueError, ["one of step, commit and tag"]),
    "nowhere to go": (lambda p: tierload.rollback(p), ValueError, ["to=", "lsn=", "steps="]),
    "two ways to go": (lambda p: tierload.rollback(p, 1, steps=1), ValueError, ["one of"]),
    "too far": (lambda p: tierload.rollback(p, steps=9), LookupError, ["9", "2 commits", "step 1"]),
    "no steps": (lambda p: tierload.rollback(p, steps=0), ValueError, ["0", "from 1"]),
    "before all": (lambda p: tierload.rollback(p, lsn=1), (LookupError, ValueError), ["LSN 1", "no commit"]),
    "after all": (lambda p: tierload.rollback(p, lsn=10**9), (LookupError, ValueError), [str(10**9)]),
    "a tag of nothing": (lambda p: tierload.open(p, mode="w").tag("t", 99), LookupError, ["step 99"]),
    "no tag to remove": (lambda p: tierload.open(p, mode="w").tag("t", remove=True), LookupError, ["'t'"]),
    "a tag without name": (lambda p: tierload.open(p, mode="w").tag(""), ValueError, ["tag", "name"]),
    "keep none": (lambda p: tierload.open(p, mode="w").collect(keep=0), ValueError, ["keep is 0", "1 or more"]),
    "every without keep": (lambda p: tierload.open(p, mode="w").collect(keep_every=2), ValueError, ["keep"]),
    "a bad mode": (lambda p: tierload.open(p, mode="rw"), ValueError, ["'rw'", '"r"', '"w"']),  # type: ignore[arg-type]
    "no such key": (lambda p: tierload.load(p, keys="wieghts"), KeyError, ["wieghts"]),
    "an odd value": (
        lambda p: tierload.save({"model": {"fn": print}}, p),
        TypeError,
        ["state['model']['fn']", "builtin_function_or_method", "allow_pickle"],
    ),
    "meta": (
        lambda p: tierload.save({"m": torch.nn.Linear(2, 2, device="meta")}, p),
        TypeError,
        ["m/weight", "meta", "materialise"],
    ),
    "a tensor as metric": (
        lambda p: tierload.save({}, p, metrics={"loss": torch.tensor(1.0)}),
        ValueError,
        ["loss", ".item()"],
    ),
    "another shape": (
        lambda p: tierload.load(p, into={"w": torch.zeros(7)}, keys="w"),
        KeyError,
        ["w", "6000", "7"],
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_is_said(saved: Path, what: str) -> None:
    use, kind, parts = MESSAGES[what]
    with pytest.raises(kind) as found:
        use(saved)
    assert isinstance(found.value, TierloadError)
    text = str(found.value)
    for part in parts:
        assert part.format(store=saved) in text, f"{part!r} is not in: {text}"
    assert "Traceback" not in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "zip"},
        {"page_bytes": 5000},
        {"page_bytes": 1024},
        {"pack_below_bytes": -1},
        {"max_segment_size_mb": 0},
        {"threads": -1},
        {"full_every": -1},
        {"grace_seconds": -1},
        {"grace_seconds": float("nan")},
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        tierload.Settings(**settings)


def test_a_damaged_page(saved: Path) -> None:
    segment = max((saved / "seg").iterdir())
    flip(segment, 40)
    with pytest.raises(tierload.CorruptPage) as found:
        tierload.load(saved)
    error = found.value
    assert isinstance(error, OSError)
    head = tierload.open(saved).commits()[0]
    for part in (head.id[:12], "step 4", "layers/#0", "page", f"seg/{segment.name}", "byte 0", "verify --full"):
        assert part in str(error), part
    assert (error.commit, error.path, error.offset) == (head.id, f"seg/{segment.name}", 0)


def test_a_folder_that_may_not_be_written(ram: Path) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/tierload-test")  # root may write everywhere else
    else:
        target = ram / "locked" / "store"
        target.parent.mkdir(mode=0o500)
    with pytest.raises(tierload.StoreIOError) as found:
        tierload.save(state_of(1), target)
    assert str(target) in str(found.value)
    assert found.value.errno
    assert found.value.filename


def test_a_file_where_a_store_should_be(ram: Path) -> None:
    (ram / "file").write_text("x")
    with pytest.raises(tierload.StoreIOError, match="file"):
        tierload.save(state_of(1), ram / "file")
    assert (ram / "file").read_text() == "x"


def test_a_holder_is_named_with_a_way_out(saved: Path) -> None:
    with (
        tierload.Store(saved, mode="w"),
        pytest.raises(tierload.StoreBusy, match=r"process \d+.*since") as found,
    ):
        tierload.Store(saved, mode="w")
    text = str(found.value)
    assert str(os.getpid()) in text
    assert any(word in text for word in ("take_over", "wait", "close", "stop")), f"what to do is not in: {text}"
