"""Long histories, and how little is read and written of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import tierload
from tests.cases.stores import SMALL, assert_is, let_go, state_of
from tests.rescue.support import flip
from tests.store.support import in_child
from tierload import CorruptPage, Settings

MIB = 1 << 20


def tiny(number: int) -> dict[str, object]:
    return {"step": number, "w": torch.full((10,), float(number)), "frozen": torch.arange(100)}


def test_a_thousand_tiny_saves(store: Path) -> None:
    start = time.process_time()
    for number in range(1000):
        tierload.save(tiny(number), store, step=number, metrics={"loss": 1 / (number + 1)}, settings=SMALL)
    assert time.process_time() - start < 60
    let_go(store)
    with tierload.open(store) as opened:
        assert [commit.step for commit in opened.commits()] == list(range(999, -1, -1))
        assert [commit.metrics["loss"] for commit in opened.commits()[::-1]] == [1 / (n + 1) for n in range(1000)]
        for number in (0, 1, 499, 500, 998, 999):
            state = opened.load(step=number)
            assert state["step"] == number
            assert state["w"].tolist() == [number] * 10
        assert sum(change.kind == "commit" for change in opened.history()) == 1000
        assert opened.verify().ok
    start = time.process_time()
    tierload.open(store).close()
    assert time.process_time() - start < 0.5
    tierload.rollback(store, steps=999)
    assert tierload.load(store)["step"] == 0
    assert sum(commit.superseded for commit in tierload.open(store).commits()) == 999
    tierload.rollback(store, tierload.open(store).commits()[1])
    tierload.open(store, mode="w").collect(keep=10)
    assert tierload.load(store)["step"] == 999
    left = {commit.step for commit in tierload.open(store).commits() if not commit.superseded}
    assert left == set(range(990, 1000))
    assert tierload.open(store).verify(full=True).ok


@pytest.mark.parametrize("every", [1, 3])
def test_all_pages_are_written_afresh_now_and_then(store: Path, every: int) -> None:
    """full_every: one rotten page is then not in every commit."""
    settings = Settings(page_bytes=4096, pack_below_bytes=1024, full_every=every)
    reports = [tierload.save(state_of(1), store, step=number, settings=settings) for number in range(1, 7)]
    fresh = [report.written_pages == report.pages for report in reports]
    assert fresh == [number == 1 or number % every == 0 for number in range(1, 7)]
    assert all(report.written_pages == 0 for report, full in zip(reports, fresh, strict=True) if not full)
    let_go(store)
    flip(store / "seg" / "00000001-000000000001.r0000.0000", 10)
    with pytest.raises(CorruptPage):
        tierload.load(store, step=1)
    assert_is(tierload.load(store, step=every if every > 1 else 2), 1)
    assert_is(tierload.load(store), 1)


def test_without_full_every_nothing_is_written_again(store: Path) -> None:
    for number in range(1, 30):
        report = tierload.save(state_of(1), store, step=number, settings=SMALL)
        assert (report.written_bytes == 0) == (number > 1)


def bytes_read(path: Path, **which: object) -> int:
    """What a fresh process asks the kernel to read for a load."""

    def body() -> int:
        def count() -> int:
            return int(Path("/proc/self/io").read_text().split()[1])

        before = count()
        tierload.load(path, **which)  # type: ignore[arg-type]
        return count() - before

    outcome = in_child(body, seconds=60)
    assert not outcome.error, outcome.trace
    return outcome.value


@pytest.mark.parametrize("compression", ["off", "fast"])
def test_a_few_keys_cost_their_pages(store: Path, compression: str) -> None:
    """Of 48 MiB, in 48 tensors and 1000 small ones."""
    source = torch.Generator().manual_seed(1)
    state = {f"layer{n}": torch.randn(MIB // 4, generator=source) for n in range(48)}
    small = {f"scale{n}": torch.tensor([float(n)] * 16) for n in range(1000)}
    tierload.save(state | small, store, settings=Settings(compression=compression))
    let_go(store)
    everything = bytes_read(store)
    assert everything > 36 * MIB
    overhead = MIB // 2  # both journals, SUPER, manifests
    assert bytes_read(store, keys="layer7") < MIB + overhead
    assert bytes_read(store, keys=["layer7", "layer40"]) < 2 * MIB + overhead
    assert bytes_read(store, keys="scale500") < overhead
    assert bytes_read(store, keys="scale*") < overhead
    assert bytes_read(store, keys="layer4*") < 9 * MIB + overhead
    assert torch.equal(tierload.load(store, keys="layer7")["layer7"], state["layer7"])


def test_a_large_tensor_of_which_little_changed(store: Path) -> None:
    weights = torch.randn(4 * MIB)
    tierload.save({"w": weights}, store)
    weights[2 * MIB + 5] = 1.0
    report = tierload.save({"w": weights}, store)
    assert (report.pages, report.written_pages) == (16, 1)
    assert report.written_bytes <= MIB + 4096
    let_go(store)
    assert torch.equal(tierload.load(store)["w"], weights)


def test_nothing_piles_up(store: Path) -> None:
    """Files, threads and memory after 60 saves and loads of 4 MiB. (B14)"""

    def body() -> list[tuple[int, int, int]]:
        seen = []
        weights = torch.randn(MIB)
        for number in range(60):
            weights[number] += 1
            tierload.save({"w": weights, "n": number}, store, step=number)
            tierload.load(store)
            with tierload.open(store) as reader:
                reader.verify()
            status = Path("/proc/self/status").read_text()
            resident = int(status.split("RssAnon:")[1].split()[0]) << 10
            threads = int(status.split("Threads:")[1].split()[0])
            seen.append((len(list(Path("/proc/self/fd").iterdir())), threads, resident))
        return seen

    outcome = in_child(body, seconds=100)
    assert not outcome.error, outcome.trace
    early, late = outcome.value[9], outcome.value[-1]
    assert late[0] == early[0], "open files"
    assert late[1] == early[1], "threads"
    assert late[2] < early[2] + 64 * MIB, "memory: a state a save would be 200 MiB; allocators come and go by tens"
