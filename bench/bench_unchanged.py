"""The same state saved again."""

from __future__ import annotations

import pytest
import torch
import xxhash

import tierload
from bench.flushes import CommitFlushes
from bench.hardware import cores
from bench.measuring import Figure, Result, Task, interleave, median
from tierload.layout import plan_pages
from tierload.state import flatten

HASHING = 8e9  # bytes a second and core that the issue grants


@pytest.mark.parametrize("which", ["large", "trained"])
def test_unchanged(benchmark, scale, folder, keep, request, which):
    source = request.getfixturevalue(which)
    state = source if which == "large" else source.state
    name = "1 GiB in 64 tensors" if which == "large" else "the demonstration's state"
    result = Result(
        f"unchanged-{which}",
        f"Unchanged state saved again: {name}",
        "The state is saved once; then the same state is saved again and again. It may cost hashing at 8 GB/s per "
        "core, and the flushes of a commit: `flushes` does those alone, with files of the same sizes, on the same "
        "disk, in the same rounds. `hashing` is XXH3-128 over the same memory by the xxhash module, on one thread.",
        folder,
    )
    store = tierload.open(folder / "store", mode="w")
    first = store.save(state)
    manifest = max(path.stat().st_size for path in (folder / "store" / "man").iterdir())
    flushes = CommitFlushes(folder, manifest)
    tensors = [memoryview(t.numpy()).cast("B") for t in _tensors(state)]
    written = []

    def hash_all() -> None:
        for tensor in tensors:
            xxhash.xxh3_128_digest(tensor)

    samples = interleave(
        benchmark,
        {
            "save": Task(lambda: written.append(store.save(state).written_pages)),
            "flushes": Task(flushes.commit),
            "hashing": Task(hash_all),
            "planning": Task(lambda: plan_pages(flatten(state), 1 << 20, 1 << 15)),
        },
        rounds=scale.of(11, 1),
    )
    assert set(written) == {0}
    granted = first.raw_bytes / (HASHING * cores()) + median(samples["flushes"])
    result.samples = samples
    result.add(Figure("pages rewritten", max(written), "", limit=0))
    note = f"{first.raw_bytes / 1e6:,.1f} MB, {first.pages} pages"
    result.add(Figure.milliseconds("save", samples, "save", limit=granted * 1e3, note=note))
    result.add(Figure.milliseconds("flushes of a commit alone", samples, "flushes"))
    hashed = sum(tensor.nbytes for tensor in tensors) / 1e6
    result.add(Figure.milliseconds(f"hashing of {hashed:,.1f} MB alone, on one thread", samples, "hashing"))
    result.add(Figure.milliseconds("flattening and planning alone (Python)", samples, "planning"))
    keep(result)
    store.close()


def _tensors(state: object) -> list[torch.Tensor]:
    """Tensors of at least a page: the bulk of what has to be hashed."""
    if isinstance(state, torch.Tensor):
        return [state.detach()] if state.nbytes >= 4096 and state.is_contiguous() else []
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, (torch.nn.Module, torch.optim.Optimizer)):
        return _tensors(state.state_dict())
    return []
