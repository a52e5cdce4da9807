"""Buffers between a device and the host: pinned memory that the device uses where it is, or a copy. What the rule of
docs/decisions/0030 rests on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bench.accelerator import device_for
from bench.measuring import Figure, Result, Task, ratios, take_turns

_HOW = (
    "A buffer of pinned memory and one of the device, of the same size, ten times over. `results`: a kernel "
    "writes it once, and the host reads it (digests of leaves); `table`: the host writes it, and a kernel reads "
    "it once or 64 times (tables of kernels). `mapped`: the kernel uses the pinned memory where it is; `copied`: "
    "it uses the device's, and an asynchronous copy carries it over. Wall time to the end of it, launches "
    "included."
)


@pytest.mark.parametrize("nbytes", [64 << 10, 3 << 20, 64 << 20], ids=lambda nbytes: f"{nbytes >> 10}KiB")
def test_crossing(benchmark, scale, folder, keep, nbytes):
    if device_for(scale) == "cpu":
        pytest.skip("needs a CUDA device")
    cupy = pytest.importorskip("cupy", reason="needs cupy, for kernels over pinned memory")
    count = nbytes // 4
    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    host = np.frombuffer(memory, np.float32, count)
    mapped = cupy.ndarray(
        (count,), cupy.float32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory), 0)
    )
    device, source = cupy.empty(count, cupy.float32), cupy.random.rand(count, dtype=cupy.float32)
    out = cupy.empty(count, cupy.float32)
    stream = cupy.cuda.get_current_stream()

    def ten(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                work()
                stream.synchronize()
                host.max()

        return run

    def written(into: object, copies: bool) -> None:
        cupy.multiply(source, 2, out=into)
        if copies:
            device.get(out=host, stream=stream, blocking=False)

    def read(table: object, times: int, copies: bool) -> None:
        if copies:
            device.set(host, stream)
        for _ in range(times):
            cupy.multiply(table, 2, out=out)

    tasks = {
        "results, mapped": Task(ten(lambda: written(mapped, False))),
        "results, copied": Task(ten(lambda: written(device, True))),
        "table read once, mapped": Task(ten(lambda: read(mapped, 1, False))),
        "table read once, copied": Task(ten(lambda: read(device, 1, True))),
        "table read 64 times, mapped": Task(ten(lambda: read(mapped, 64, False))),
        "table read 64 times, copied": Task(ten(lambda: read(device, 64, True))),
    }
    result = Result(f"gpu-crossing-{nbytes >> 10}", f"Pinned or copied: {nbytes >> 10} KiB", _HOW, folder)
    result.samples = samples = take_turns(tasks, rounds=5)
    benchmark.pedantic(lambda: None, rounds=1)
    for name in ("results", "table read once", "table read 64 times"):
        result.add(Figure.milliseconds(f"{name}, mapped", samples, f"{name}, mapped"))
        result.add(Figure.milliseconds(f"{name}, copied", samples, f"{name}, copied"))
        result.add(
            Figure.of(f"{name}, mapped ÷ copied", ratios(samples[f"{name}, mapped"], samples[f"{name}, copied"]), "")
        )
    keep(result)
