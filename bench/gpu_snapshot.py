"""The riskiest part first: a copy in HBM of a training state at a call, while training goes on. torch alone.

Predicted for one H200 and 6 GiB: the call returns after 1 ms at most (0.05 ms as a captured graph), the copy takes 4 ms
on the device, and no value is torn, whatever the training does: what is on the call's stream is in its order. The
first call pays some 11 ms more for its memory. A copy to the host beside forward and backward is not torn either as
long as the optimizer's step waits for it on the device, and is when it does not: that shows that tearing is seen.

    python3 -m bench.gpu_snapshot [--gib 6] [--rounds 6]     # a table; JSON too where $OUT names a folder
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.llama import AdamW, Training, tensors_in

__all__ = ["Arena", "main"]

_AFTER = 2  # steps that go on behind a call before its copy is looked at
_RING_BYTES = 1 << 30  # of pinned memory, for the copy to the host


class Arena:
    """Memory for a copy of ``tensors``, in a pool of its own; ``copy`` and ``replay`` are on the current stream."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.sources = [_plain(one) for one in tensors]
        starts, total = [], 0
        for source in self.sources:
            starts.append(total)
            total += -(-source.nbytes // 512) * 512
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            self.room = torch.empty(total, dtype=torch.uint8, device="cuda")
        self.copies = [
            self.room[at : at + source.nbytes].view(source.dtype)
            for at, source in zip(starts, self.sources, strict=True)
        ]
        self.graph: torch.cuda.CUDAGraph | None = None

    def copy(self) -> None:
        torch._foreach_copy_(self.copies, self.sources)

    def replay(self) -> None:
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.copy()
        self.graph.replay()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that compare bit by bit and are copied by words."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)


class Case:
    """A way of training: ``tensors`` are what a save would take, ``step`` goes on."""

    def __init__(self, nbytes: int, **adamw: Any) -> None:
        self.training = Training.of(nbytes, "cuda", **adamw)
        self.more: list[torch.Tensor] = []
        self.step: Callable[[], None] = self.training.train_step

    def tensors(self) -> list[torch.Tensor]:
        found = [one for one in tensors_in(self.training.plain()).values() if one.is_cuda]
        return found + self.more


def batch_norm(nbytes: int) -> Case:
    case = Case(nbytes)
    norm = torch.nn.BatchNorm1d(case.training.model.shape.width).cuda()

    def observe(_: object, __: object, output: torch.Tensor) -> None:
        norm(output.detach().flatten(0, 1).float())

    case.training.model.norm.register_forward_hook(observe)
    case.more = list(norm.state_dict().values())
    return case


def averaged(nbytes: int) -> Case:
    case = Case(nbytes)
    weights = list(case.training.model.parameters())
    case.more = [one.detach().clone() for one in weights]

    def step() -> None:
        case.training.train_step()
        with torch.no_grad():
            torch._foreach_lerp_(case.more, weights, 0.01)

    case.step = step
    return case


def in_backward(nbytes: int) -> Case:
    """Each weight is stepped as its gradient is there: no step of an optimizer comes after the backward pass."""
    case = Case(nbytes)
    own = {}
    for parameter in case.training.model.parameters():
        own[parameter] = AdamW([parameter], lr=3e-4)
        own[parameter].state[parameter] = case.training.optimizer.state[parameter]  # the same tensors

        def update(changed: torch.Tensor) -> None:
            own[changed].step()
            changed.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    case.step = lambda: case.training.model.loss(case.training.tokens).backward()
    return case


def replayed(nbytes: int) -> Case:
    """Forward, backward and step are one captured graph."""
    case = Case(nbytes, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case.training.train_step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.training.train_step()
    case.step = graph.replay
    return case


CASES = {"plain": Case, "batch norm": batch_norm, "EMA": averaged, "in backward": in_backward, "replayed": replayed}


def torn(copies: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """How many words or bytes differ."""
    differing = [(a != b).sum() for a, b in zip(copies, expected, strict=True)]
    return int(torch.stack(differing).sum().item())


def snapshots(name: str, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Every second round calls with nothing under way, the others with a step in flight."""
    case = CASES[name](nbytes)
    for _ in range(2):
        case.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    arena = Arena(case.tensors())
    torch.cuda.synchronize()
    reserved = (time.perf_counter() - start) * 1e3
    expected = [torch.empty_like(one) for one in arena.sources]
    rows = []
    for way, call in (("foreach", arena.copy), ("graph", arena.replay)):
        call()  # captures, or loads the kernel
        hosts: dict[bool, list[float]] = {False: [], True: []}
        devices: list[float] = []
        differing = 0
        for number in range(rounds):
            flying = bool(number % 2)
            case.step()
            for to, source in zip(expected, arena.sources, strict=True):
                to.copy_(source)
            if not flying:
                torch.cuda.synchronize()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            start = time.perf_counter()
            call()
            hosts[flying].append((time.perf_counter() - start) * 1e3)
            after.record()
            for _ in range(_AFTER):
                case.step()
            torch.cuda.synchronize()
            devices.append(before.elapsed_time(after))
            differing += torn(arena.copies, expected)
            changed = torn(arena.sources, expected)
            assert changed, f"{name}: the steps behind the call changed nothing, so nothing was tested"
        host, host_flying = (statistics.median(hosts[flying]) for flying in (False, True))
        rows.append(
            {
                "case": name,
                "way": way,
                "tensors": len(arena.sources),
                "gib": arena.room.nbytes / 2**30,
                "memory_ms": reserved,
                "host_ms": host,
                "host_in_flight_ms": host_flying,
                "gpu_ms": statistics.median(devices),
                "torn": differing,
            }
        )
    return rows


def to_host(nbytes: int, rounds: int, *, guarded: bool) -> dict[str, Any]:
    """As much as fits of the live tensors, on a side stream beside forward and backward. Unguarded, what would be the
    optimizer's step comes at once and does not wait."""
    case = Case(nbytes)
    ring = torch.empty(min(_RING_BYTES, nbytes), dtype=torch.uint8, pin_memory=True)
    sources, copies, at = [], [], 0
    for source in map(_plain, case.training.model.parameters()):
        if at + source.nbytes <= ring.nbytes:
            sources.append(source)
            copies.append(ring[at : at + source.nbytes].view(source.dtype))
            at += -(-source.nbytes // 512) * 512
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    if guarded:
        case.training.optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(done))
    times: dict[bool, list[float]] = {False: [], True: []}
    hosts: list[float] = []
    differing = 0
    for number in range(2 * rounds + 2):
        beside = bool(number % 2)
        expected = [one.clone() for one in sources]
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before.record()
        start = time.perf_counter()
        if beside:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for to, source in zip(copies, sources, strict=True):
                    to.copy_(source, non_blocking=True)
                done.record()
            hosts.append((time.perf_counter() - start) * 1e3)
        if guarded:
            case.step()
        else:
            torch._foreach_add_(sources, 1)
        after.record()
        torch.cuda.synchronize()
        if number >= 2:  # the first two load kernels
            times[beside].append(before.elapsed_time(after))
        if beside:
            differing += torn([one.cuda() for one in copies], expected)
    return {
        "case": "D2H on a side stream" + ("" if guarded else ", unguarded: has to tear"),
        "way": "copy_",
        "tensors": len(sources),
        "gib": at / 2**30,
        "memory_ms": 0.0,
        "host_ms": statistics.median(hosts),
        "gpu_ms": statistics.median(times[True]) - statistics.median(times[False]),
        "step_ms": statistics.median(times[False]),
        "torn": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=6, help="at least two")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device here")
        return
    nbytes = round(options.gib * 2**30)
    rows: list[dict[str, Any]] = []
    runs: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
        (name, lambda name=name: snapshots(name, nbytes, options.rounds)) for name in CASES
    ]
    runs += [(f"D2H {guarded=}", lambda g=guarded: [to_host(nbytes, options.rounds, guarded=g)]) for guarded in (1, 0)]
    for name, run in runs:
        try:
            rows += run()
        except (RuntimeError, AssertionError) as error:  # of torch: the other cases are still to be seen
            rows.append({"case": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.gib:g} GiB")
    columns = ("tensors", "gib", "memory_ms", "host_ms", "host_in_flight_ms", "gpu_ms", "step_ms", "torn")
    print(f"{'case':45}{'way':9}" + "".join(f"{name:>18}" for name in columns))
    for row in rows:
        shown = [f"{row[name]:.3f}" if isinstance(row.get(name), float) else str(row.get(name, "")) for name in columns]
        print(
            f"{row['case']:45}{row.get('way', ''):9}" + "".join(f"{text:>18}" for text in shown), row.get("failed", "")
        )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gpu-snapshot.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
