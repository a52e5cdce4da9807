"""On a CUDA device: states come back bit for bit, whatever happens beside their saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tierload
from tests.accelerators.disguise import assert_values, copies
from tierload import Settings, _native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def bits(state: object) -> object:
    """Every tensor as bytes of the processor's: NaN is what it is."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8) if flat.numel() else flat

    return torch.utils._pytree.tree_map_only(torch.Tensor, of, state)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        return values[..., 0] > 127
    return values[..., :size].contiguous().view(dtype).reshape(shape)


def layouts() -> dict[str, object]:
    large = noise(1500, 1001)
    return {
        **{str(dtype): noise(300, 777, dtype=dtype) for dtype in DTYPES},
        **{f"small {dtype}": noise(5, 3, dtype=dtype) for dtype in DTYPES},
        "large": large,
        "view": large[100:300],
        "gaps": large[:, ::3],
        "transposed": large.t(),
        "channels last": noise(4, 8, 33, 35).to(memory_format=torch.channels_last),
        "expanded": noise(64, 1).expand(64, 500),
        "one": noise(1),
        "empty": noise(0, 4),
        "unaligned": noise(3 * MIB, dtype=torch.uint8)[5:],
        "host": [torch.randn(333, 100), torch.tensor(3.0)],
    }


@pytest.mark.parametrize("compression", ["auto", "fast", "off"])
@pytest.mark.parametrize("how", ["save", "clone", "host"])
def test_every_dtype_and_layout(tmp_path: Path, how: str, compression: str) -> None:
    state = layouts()
    wanted = bits(state)
    settings = Settings(compression=compression, device_budget_bytes=1 if how == "host" else 0)
    with tierload.Store(tmp_path / "s", mode="w", settings=settings) as store:
        if how == "save":
            store.save(state)
        else:
            store.async_save(state).result()
        assert store.verify(full=True).ok  # the digests that the device found are the processor's
        assert_values(bits(store.load()), wanted)
        again = store.save(state)
        assert again.written_pages == 0
        into = torch.utils._pytree.tree_map_only(torch.Tensor, torch.empty_like, state)
        large = torch.empty_like(state["large"])
        into |= {"large": large, "view": large[100:300], "gaps": large[:, ::3], "transposed": large.t()}
        report = store.load(into=into)
        assert_values(bits(into), wanted)
        assert "GPU: ring" in report.io
        assert "GPU: ring" in store.head().io


@pytest.mark.parametrize("budget", [0, 1], ids=["clone", "host"])
def test_a_storm_of_updates_tears_nothing(tmp_path: Path, budget: int) -> None:
    """Every tensor has the number of the step that wrote it; steps go on at full speed beside the saves."""
    tensors = [torch.zeros(size, device="cuda") for size in (3 * MIB, MIB, 70_001, 9, 1, 2 * MIB) for _ in range(6)]
    state = {"tensors": tensors, "step": 0}
    with tierload.Store(tmp_path / "s", mode="w", settings=Settings(device_budget_bytes=budget)) as store:
        pending = []
        for step in range(1, 60):
            torch._foreach_add_(tensors, 1)
            state["step"] = step
            if step % 5 == 0:
                pending.append(store.async_save(state, step=step))
        for save in pending:
            save.result()
        for commit in store.commits():
            found = store.load(commit=commit)
            assert found["step"] == commit.step
            assert all(bool((tensor == commit.step).all()) for tensor in found["tensors"])


def test_two_hundred_saves_leak_nothing(tmp_path: Path) -> None:
    state = {"weight": torch.randn(16, MIB, device="cuda"), "small": [torch.randn(5, device="cuda") for _ in range(50)]}
    with tierload.Store(tmp_path / "s", mode="w") as store:
        used: list[tuple[int, int, int]] = []
        for number in range(200):
            state["weight"][number % 16] += 1
            store.async_save(state).result()
            if number % 50 == 49:
                store.collect(keep=2)
                used.append((_native.pinned_use()[0], torch.cuda.memory_reserved(), len(os.listdir("/proc/self/fd"))))
        assert used[-1] == used[0]
        assert used[-1][0] <= 1 << 30


def test_a_clone_goes_back_when_the_store_is_closed(tmp_path: Path) -> None:
    state = {"weight": torch.randn(256, MIB // 4, device="cuda")}
    before = torch.cuda.memory_reserved()
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.async_save(state).result()
        assert torch.cuda.memory_reserved() >= before + 256 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2 * MIB


_KILLED = """
import sys, torch, tierload
state = {"weight": torch.zeros(64, 1 << 20, device="cuda"), "step": 0}
store = tierload.Store(sys.argv[1], mode="w")
for step in range(1, 1000):
    state["weight"] += 1
    state["step"] = step
    store.async_save(state, step=step)
    print(step, flush=True)
"""


def test_a_kill_leaves_the_last_commit(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 4:
                child.send_signal(signal.SIGKILL)
                break
    with tierload.open(tmp_path / "s") as store:
        found = store.load()
        assert found["step"] >= 2
        assert bool((found["weight"] == found["step"]).all())
        assert store.verify(full=True).ok


def test_what_did_not_change_never_leaves_the_device(tmp_path: Path) -> None:
    state = {"base": torch.randn(64, MIB // 4, device="cuda"), "adapter": torch.randn(4, MIB // 4, device="cuda")}
    gpu = _native.accelerator(1)
    with tierload.Store(tmp_path / "s", mode="w") as store:
        store.async_save(state).result()
        state["adapter"] += 1
        before = gpu.bytes_to_host
        report = store.async_save(state).result()
        assert report.written_pages == 4
        assert 4 * MIB <= gpu.bytes_to_host - before <= 5 * MIB
        assert_values(copies(store.load()), torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, state))
