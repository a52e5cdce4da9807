"""What a session does in its loop: when it saves and what, what it refuses, and how it is left."""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tierload
from tests.hooks.session.toys import Toy, saved
from tierload import InvalidRequest, KeyMismatch, Session, StoreIOError
from tierload.engine import writing

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")
NAN = float("nan")


def small() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def act(parts: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = parts["model"](torch.ones(2, 3)).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    parts["optimizer"].step()
    return loss


def metrics(store: Path) -> dict[int | None, dict[str, object]]:
    with tierload.open(store) as opened:
        return {commit.step: dict(commit.metrics) for commit in opened.commits()}


# -- when it saves


def test_every_few_steps_and_the_last_one(store: Path) -> None:
    parts = small()
    with Session(store, every=3, **parts) as run:
        assert run.resumed is None
        assert [step for step in run.steps(7) if act(parts) is not None] == [1, 2, 3, 4, 5, 6, 7]
        assert saved(store) == [3, 6, 7], "durable when the loop has ended"
        assert run.step == 7
        assert [*run.steps(7)] == []
    assert saved(store) == [3, 6, 7]
    with Session(store, every=3, **small()) as run:
        assert run.resumed is not None
        assert (run.resumed.step, run.step) == (7, 7)
        assert [*run.steps(9)] == [8, 9]
    assert saved(store) == [3, 6, 7, 9]


def test_a_commit_of_ones_own(store: Path) -> None:
    parts = small()
    with Session(store, every=100, **parts) as run:
        run.save(tags=["untrained"])
        for step in run.steps(5):
            if step == 2:
                run.save(tags=["two"])  # of the end of this step, not of its beginning
            act(parts)
            if step == 2:
                weight = parts["model"].weight.detach().clone()
        run.save()
    assert saved(store) == [0, 2, 5, 5]
    loaded: Any = tierload.load(store, tag="two")
    assert torch.equal(loaded["model"]["weight"], weight)
    assert tierload.open(store).tags().keys() == {"untrained", "two"}


def test_metrics_travel_with_the_commit(store: Path) -> None:
    with Session(store, every=2, state={}) as run:
        loss = torch.zeros((), requires_grad=True)
        for step in run.steps(4):
            total = loss.detach() + step
            run.log(loss=total, rate=0.5, phase="warm" if step < 2 else "hot")
            if step == 1:
                run.log(only_once=True)
            total += 100  # afterwards
    assert metrics(store) == {
        2: {"loss": 2.0, "rate": 0.5, "phase": "hot", "only_once": True},
        4: {"loss": 4.0, "rate": 0.5, "phase": "hot"},
    }


def test_old_commits_go_and_the_last_good_one_never(store: Path) -> None:
    losses = [5.0, 1.0, 4.0, 3.0, NAN, NAN, NAN, 2.0]
    with Session(store, every=1, keep=2, keep_every=6, keep_best="loss:min", state={}) as run:
        for step in run.steps(7):
            run.log(loss=losses[step - 1])
    assert saved(store) == [2, 4, 6, 7], "the best, the last good, a sixth, and the newest two"
    with Session(store, every=1, keep=2, keep_best="loss:min", state={}) as run:
        for step in run.steps(8):
            run.log(loss=losses[step - 1])
    assert saved(store) == [2, 7, 8]


def test_collections_go_on_beside_the_loop(store: Path) -> None:
    beside: set[str] = set()
    collect = tierload.Store.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tierload.Store,
            "collect",
            lambda *a, **k: beside.add(threading.current_thread().name) or collect(*a, **k),
        )
        with Session(store, every=1, keep=1, state={}) as run:
            for step in run.steps(2000):
                if step > 1 and "tierload-collect" in beside and len(saved(store)) < step - 1:
                    run.stop()
        assert "tierload-collect" in beside
        assert run.step < 2000
    assert saved(store) == [run.step]


def test_a_collection_that_fails_is_raised_in_the_loop(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise StoreIOError(errno.EIO, "no collection")

    monkeypatch.setattr(tierload.Store, "collect", fails)
    with pytest.raises(StoreIOError, match="no collection"), Session(store, every=1, keep=1, state={}) as run:
        for _ in run.steps(3):
            pass


def test_the_programs_own_error_is_the_one_that_is_raised(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def fails(*_: object, **__: object) -> None:
        began.set()
        raise StoreIOError(errno.EIO, "no collection")

    monkeypatch.setattr(tierload.Store, "collect", fails)

    def loop() -> None:
        with Session(store, every=1, keep=1, state={}) as run:
            for step in run.steps(3):
                if step == 3 and began.wait(60):
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        loop()
    assert "no collection" in raised.value.__notes__[0]


# -- how it is left


@pytest.mark.parametrize("how", ["break", "exception"])
def test_half_a_step_is_no_commit(store: Path, how: str) -> None:
    parts = small()
    try:
        with Session(store, every=2, **parts) as run:
            for step in run.steps(10):
                parts["model"].weight.data.fill_(step)
                if step == 6:
                    if how == "exception":
                        raise ZeroDivisionError
                    break
            with pytest.raises(InvalidRequest, match=r"step 6 was left in its middle.*run\.stop\(\)"):
                [*run.steps(10)]
            with pytest.raises(InvalidRequest, match="step 6 was left in its middle"):
                run.save()
    except ZeroDivisionError:
        assert how == "exception"
    assert saved(store) == [2, 4]
    with Session(store, every=2, **small()) as run:
        assert run.step == 4


def test_a_loop_that_stops_can_go_on(store: Path) -> None:
    with Session(store, every=100, state={}) as run:
        for step in run.steps(10):
            if step == 4:
                run.stop()
        assert saved(store) == [4]
        assert [*run.steps(6)] == [5, 6]
    assert saved(store) == [4, 6]


def test_a_save_that_fails_in_the_background_ends_the_loop(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = writing.save_state

    def fails(native: Any, lock: Any, draft: Any, *rest: Any, **options: Any) -> Any:
        if draft.step == 4:
            raise StoreIOError(errno.ENOSPC, "no room for step 4")
        return whole(native, lock, draft, *rest, **options)

    monkeypatch.setattr(writing, "save_state", fails)
    with pytest.raises(StoreIOError, match="no room for step 4"), Session(store, every=2, state={}) as run:
        for _ in run.steps(10):
            pass
    assert saved(store)[0] == 2
    assert 4 not in saved(store)
    assert max(filter(None, saved(store))) < 10, "the end was not reached"


def test_what_was_logged_for_a_save_that_was_skipped_is_for_the_next_one(store: Path) -> None:
    settings = tierload.Settings(on_busy="skip", bandwidth_cap_mbps=0.4, compression="off")
    with Session(store, every=1, settings=settings, data=torch.rand(100_000)) as run:
        for step in run.steps(2):
            run.log(**{f"of{step}": step})
            if step == 1:
                run._store.async_save(torch.rand(100_000))  # type: ignore[union-attr]
                run._store.settings = tierload.Settings(on_busy="skip")  # type: ignore[union-attr]
    assert metrics(store)[2] == {"of1": 1, "of2": 2}


def test_a_save_that_was_asked_for_is_not_skipped(store: Path) -> None:
    """A tag would name another step."""
    settings = tierload.Settings(on_busy="skip", bandwidth_cap_mbps=1, compression="off")
    data = torch.zeros(100_000)
    with Session(store, every=1, settings=settings, data=data) as run:
        for step in run.steps(4):
            data += 1
            if step == 3:
                run.save(tags=["asked"])
    assert tierload.load(store, tag="asked")["data"][0] == 3  # type: ignore[index]


# -- what it takes


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"rng": {}}, "rng= is the session's own"),
        ({"session": {}}, "session= is the session's own"),
        ({"epoch": 3}, r"epoch= is a int, which a resumed run could not set.*dict that is a part \(epoch=\{\.\.\.\}\)"),
        ({"name": "run"}, r"name= is a str.*run\.log\(name="),
        ({"pair": (1, 2)}, "pair= is a tuple"),
        ({"nothing": None}, "nothing= is a NoneType"),
        ({"fixed": make_dataclass("Fixed", ["x"], frozen=True)(1)}, "fixed= is a Fixed"),
        ({"keep": 0}, "keep is 0; use a number from 1 up"),
        ({"keep_every": 5}, "need keep"),
        ({"keep": 1, "keep_best": "loss"}, "which values are better"),
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, "every is 2.5"),
        ({"on_signal": "die"}, "on_signal is 'die'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(
    store: Path, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Session(store, **({"every": 1} | parts))
    assert not store.exists()


def test_metrics_are_numbers_and_texts(store: Path) -> None:
    with Session(store, every=1, state={}) as run:
        for value in (torch.ones(2), [1.0], None, {"a": 1}):
            with pytest.raises(InvalidRequest, match=r"bad is a .*; metrics are numbers and texts"):
                run.log(bad=value)


def test_a_session_is_for_inside_of_with(store: Path) -> None:
    session = Session(store, every=1, state={})
    for call in (lambda: [*session.steps(1)], session.save):
        with pytest.raises(InvalidRequest, match="for inside of `with"):
            call()
    with session, pytest.raises(InvalidRequest, match="has begun already"):
        session.__enter__()
    with session as run:  # again: it goes on
        assert [*run.steps(1)] == [1]


def test_one_text_is_not_many_tags(store: Path) -> None:
    with Session(store, every=1, state={}) as run:
        for save in (run.save, lambda tags: tierload.save({}, store, tags=tags)):
            with pytest.raises(InvalidRequest, match=r"use a list: \['best'\]"):
                save(tags="best")


@pytest.mark.parametrize("n", [2.5, "2"])
def test_steps_are_whole(store: Path, n: Any) -> None:
    with Session(store, every=1, state={}) as run, pytest.raises(InvalidRequest, match="whole number of steps"):
        [*run.steps(n)]


def test_two_sessions_do_not_share_a_store(store: Path) -> None:
    with Session(store, every=1, state={}) as run:
        for _ in run.steps(1):
            with pytest.raises(InvalidRequest, match="another session of this process"), Session(store, every=1):
                pass
        run.save()
    with Session(store, every=1, state={}) as run:
        assert run.step == 1


def test_a_loop_that_is_closed_late_does_not_end_another(store: Path) -> None:
    session = Session(store, every=1, state={})
    with session as run:
        left = run.steps(9)
        next(left)
    with session as run:
        for step in run.steps(2):
            if step == 1:
                with pytest.raises(InvalidRequest, match="the session of this loop has ended"):
                    next(left)
            run.save(tags=[f"of {step}"])
    assert saved(store) == [1, 2]


@dataclass
class Progress:
    best: float = 0.0
    history: list[float] = field(default_factory=list)


def test_parts_are_filled_in_place(store: Path) -> None:
    def parts() -> dict[str, Any]:
        return {"deque": deque([1.0], maxlen=3), "progress": Progress(), "nested": {"progress": Progress()}, "list": []}

    before = parts()
    with Session(store, every=1, **before) as run:
        for _ in run.steps(1):
            before["deque"].extend([2.0, 3.0, 4.0])
            before["list"].append(5.0)
            for each in (before["progress"], before["nested"]["progress"]):
                each.best = 0.5
                each.history.append(0.5)
    after = parts()
    with Session(store, every=1, **after):
        assert after == before


def test_b95_what_is_missing_or_not_wanted_is_named_when_it_resumes(store: Path) -> None:
    with Session(store, every=1, **small()) as run:
        [*run.steps(1)]
    for parts, key in (
        (small() | {"ema": torch.nn.Linear(3, 3)}, "ema/weight"),
        ({"model": torch.nn.Linear(3, 3)}, "optimizer/"),
        (small() | {"model": torch.nn.Linear(4, 4)}, "model/weight"),
    ):
        with pytest.raises(KeyMismatch, match=key) as refused, Session(store, every=1, **parts):
            pass
        assert "To begin another run, use another path" in refused.value.__notes__[0]
    assert saved(store) == [1]
    with Session(store, every=1, **small()) as run:  # nothing holds it
        assert run.step == 1


def test_b87_moments_are_resumed_by_name(store: Path) -> None:
    def named(*names: str) -> dict[str, Any]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}

    def moments(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {n: parts["optimizer"].state[p]["exp_avg"] for n, p in parts["model"].named_parameters()}

    parts = named("a", "b")
    with Session(store, every=1, **parts) as run:
        for _ in run.steps(1):
            for number, parameter in enumerate(parts["model"].parameters()):
                parameter.grad = torch.full((2, 2), float(number + 1))
            parts["optimizer"].step()
    swapped = named("b", "a")
    with Session(store, every=1, **swapped):
        pass
    for name, moment in moments(parts).items():
        assert torch.equal(moments(swapped)[name], moment)


def test_a_guard_of_the_program_stays_and_others_are_guarded(store: Path) -> None:
    first, second = small(), small()
    own = tierload.guard(first["optimizer"], steps_elsewhere=True)
    with Session(store, every=1, models=[first["model"], second["model"]], pair={"a": first["optimizer"]}) as run:
        [*run.steps(1)]
    from tierload.engine import guards

    assert guards._guards[first["optimizer"]] is own
    with Session(store.with_name("b"), every=1, optimizers={"d": [second["optimizer"]]}, model=second["model"]):
        assert guards._guards[second["optimizer"]].reason == ""


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_model_resumes_one_that_is_not_and_the_reverse(store: Path, first: bool) -> None:
    """With gradient scaler, averaged weights, scheduler, and gradients of two batches a step."""
    whole: list[float] = []
    resumed: list[float] = []
    for path, found, runs in (
        (store, whole, [(False, 8)]),
        (store.with_name("b"), resumed, [(first, 4), (not first, 8)]),
    ):
        for number, (compiled, steps) in enumerate(runs):
            toy = Toy(seed=number, compiled=compiled)
            with Session(path, every=2, **toy.parts) as run:
                batches = run.batches(toy.loader)
                for _ in run.steps(steps):
                    found.append(toy.step(next(batches), next(batches)).item())
    assert [loss.hex() for loss in resumed] == [loss.hex() for loss in whole]
