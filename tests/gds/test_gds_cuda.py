"""The real kvikio between files and a real GPU, in whatever mode it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierload import gds
from tierload.errors import StoreIOError
from tierload.gds import Extent, GdsFiles
from tierload.gds.probe import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = 1 << 20


@pytest.fixture(autouse=True)
def kvikio() -> None:
    pytest.importorskip("kvikio", reason="needs kvikio: pip install tierload[gds]", exc_type=ImportError)


def test_pages_come_back_bit_for_bit(tmp_path: Path) -> None:
    source = torch.randint(256, (64 * PAGE,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    order = torch.randperm(64).tolist()  # neighbours in the file are none in memory, but by chance
    path = tmp_path / "segment"
    path.touch()
    torch.cuda.synchronize()
    with GdsFiles() as files:
        assert files.path == ("gds" if not gds.refusal() else f"compat ({gds.refusal()})")
        files.write(path, [Extent(at * PAGE, source.data_ptr() + page * PAGE, PAGE) for at, page in enumerate(order)])
        files.read(path, [Extent(at * PAGE, target.data_ptr() + page * PAGE, PAGE) for at, page in enumerate(order)])
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    stored = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(64, PAGE)
    assert torch.equal(stored, source.view(64, PAGE)[order].cpu())


def test_a_whole_tensor_and_a_short_last_page(tmp_path: Path) -> None:
    source = torch.randint(256, (20 * PAGE + 4321,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    path = tmp_path / "segment"
    path.touch()
    torch.cuda.synchronize()
    with GdsFiles() as files:
        files.write(path, [Extent(4096, source.data_ptr(), source.numel())])
        files.read(path, [Extent(4096, target.data_ptr(), target.numel())])
        with pytest.raises(StoreIOError, match="verify"):
            files.read(path, [Extent(16 * PAGE, torch.empty_like(source).data_ptr(), 16 * PAGE)])
    assert torch.equal(source, target)


def test_the_probe_measures(tmp_path: Path) -> None:
    found = probe(tmp_path, timeout_s=60)
    assert found.mode in ("gds", "compat"), found
    assert found.why == gds.refusal()
    assert found.write > 0
    assert found.read > 0
    assert found.kvikio == gds.version()
    assert list(tmp_path.iterdir()) == []
