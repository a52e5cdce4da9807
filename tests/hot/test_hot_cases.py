"""Public cases of loads, as hot starts: saves to the same place, sizes of reads, memory, file systems."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tierload
from tests.cases.memory import peak
from tests.cases.stores import let_go
from tests.hot.starts import assert_same, fresh, held, step, trained
from tests.saves.test_disks import in_namespace
from tests.store.support import in_child
from tests.store.test_bytes_read import MIB, MOST, forget, read_so_far
from tests.tiers.test_locking import PAGE, limited
from tierload import Settings

WIDTH, LAYERS = 1024, 24
BUFFERS = 64 * MIB  # what a load may need beside the state
SMALL_READS = 16  # calls for the journal, manifests and /proc


def wide(device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(1)
    return wide()


@pytest.fixture(scope="module")
def stores(model: nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """On a disk, by the compression with which each was saved."""
    folder = tmp_path_factory.mktemp("stores")
    for settings in (Settings(compression="off"), Settings(compression="fast")):
        with tierload.Store(folder / settings.compression, mode="w", settings=settings) as store:
            store.save({"model": model})
    yield {name: folder / name for name in ("off", "fast")}
    shutil.rmtree(folder)


# -- B71: a save to the place that is being loaded


def test_b71_a_save_to_the_same_place(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives keeps its bytes, edits reach no file, and the new commit is right."""
    model, _ = trained(store)
    with held(monkeypatch) as go:
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        other, his = fresh(3)
        step(other, his)
        tierload.save({"model": other, "optimizer": his}, store, step=3)
        go.set()
        with torch.no_grad():
            warm.words.weight += 1
        boot.join()
    with torch.no_grad():
        warm.words.weight -= 1
        model.words.weight.add_(1).sub_(1)
    assert_same(model, warm)
    step(warm, its)
    tierload.save({"model": warm, "optimizer": its}, store, step=4)
    for number, right in ((3, other), (4, warm)):
        again, hers = fresh(5)
        tierload.hot_start(store, again, hers, step=number).join()
        assert_same(right, again)
    with tierload.open(store) as opened:
        assert opened.verify(full=True).ok


# -- B73: few and large reads


@pytest.mark.parametrize(("way", "compression"), [("buffered", "off"), ("buffered", "fast"), ("direct", "fast")])
def test_b73_reads_are_large(stores: dict[str, Path], model: nn.Module, way: str, compression: str) -> None:
    path = stores[compression]
    stored = sum(segment.stat().st_size for segment in (path / "seg").iterdir())
    warm = wide("meta")
    forget(path)
    settings = Settings(io="buffered" if way == "buffered" else "auto")
    with tierload.Store(path, settings=settings) as opened:
        if way == "direct" and opened.io != "direct":
            pytest.skip(opened.io)
        begun, calls = read_so_far(), read_calls()
        boot = opened.hot_start(warm)
        boot.join()
        calls, read = read_calls() - calls, read_so_far() - begun
        direct = opened._native.direct_bytes
    assert_same(model, warm)
    assert read <= MOST * stored + MIB  # of what lies beside segments
    if way == "direct":
        assert direct >= stored
        assert calls <= SMALL_READS, "the rest goes by io_uring"
    else:
        assert direct == 0
        assert (calls - SMALL_READS) * MIB * 3 // 4 <= stored  # a page each, of 1 MiB before it was compressed


def read_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


# -- B74: memory


@pytest.mark.parametrize("target", ["meta", "in place"])
def test_b74_peak_memory(stores: dict[str, Path], model: nn.Module, target: str) -> None:
    """The state and fixed buffers for a model on meta, and the buffers alone for one that has memory."""
    path, nbytes = stores["fast"], sum(one.nbytes for one in model.parameters())

    def body() -> tuple[int, bool]:
        warm = wide("meta" if target == "meta" else "cpu")
        forget(path)
        with peak() as extra:
            boot = tierload.hot_start(path, warm)
            boot.join()
        return extra[0], boot.ready

    needed, ready = in_child(body, seconds=60).value
    assert ready
    assert needed <= BUFFERS + (nbytes if target == "meta" else 0)


def test_a_low_limit_of_locked_memory_is_told(store: Path) -> None:
    model, _ = trained(store)
    subprocess.run(["chmod", "-R", "a+rX", str(store.parent)], check=True)

    def check() -> None:
        torch.set_num_threads(1)
        warm, its = fresh(2)
        boot = tierload.hot_start(store, warm, its)
        assert " not: the memlock limit of this process, 16 KiB, is reached" in boot.stages[2].told
        boot.join()
        assert_same(model, warm)

    limited((16 << 10) // PAGE, check)


# -- B76: where direct I/O looks to be there and is not


def test_b76_an_overlay_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    lower, upper, merged, work = (tmp_path / name for name in ("lower", "upper", "merged", "work"))
    for folder in (lower, upper, merged, work):
        folder.mkdir()
    model, _ = trained(lower / "store")
    let_go(tmp_path)

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)

    def body() -> list[bool]:
        if ctypes.CDLL(None, use_errno=True).unshare(0x20000) != 0:
            raise PermissionError(ctypes.get_errno(), "unshare")
        mount("--make-rprivate", "/")
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount("-t", "overlay", "overlay", "-o", layers, f"{merged}")
        mount("--bind", f"{lower}", f"{lower}")
        mount("-o", "remount,bind,ro", f"{lower}")
        return [starts(merged / "store", model), starts(lower / "store", model)]

    assert in_namespace(body) == [True, True]
    assert not list(upper.rglob("seg")), "it reads alone"


def starts(path: Path, model: nn.Module) -> bool:
    warm, its = fresh(2)
    tierload.hot_start(path, warm, its).join()
    assert_same(model, warm)
    return True


@pytest.mark.parametrize(
    ("where", "io"),
    [("disk", "auto"), ("disk", "io_uring refused"), ("memory", "auto"), ("memory", "buffered")],
)
def test_b76_the_same_bytes_by_every_way(
    stores: dict[str, Path], model: nn.Module, ram: Path, where: str, io: str
) -> None:
    path = stores["off"]
    if where == "memory":
        path = Path(shutil.copytree(path, ram / "store"))

    def body() -> bool:
        if io == "io_uring refused":
            refuse_io_uring()
        warm = wide("meta")
        forget(path)
        with tierload.Store(path, settings=Settings(io="buffered" if io == "buffered" else "auto")) as opened:
            opened.hot_start(warm).join()
            direct = opened._native.direct_bytes
        assert_same(model, warm)
        return direct > 0

    outcome = in_child(body, seconds=60)
    assert not outcome.error, outcome.trace
    assert not outcome.value or (where, io) == ("disk", "auto")


def refuse_io_uring() -> None:
    """By seccomp, as containers do it: io_uring_setup gives EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, header, 0, 0) == 0
