"""A training goes on: after a whole load of model and optimizer, and by a hot start, in turn; when what was there, by
the clock."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tierload
from bench.gpt import GPT, Shape
from bench.measuring import drop_cached
from bench.train import THREADS

__all__ = ["Timeline", "loaded", "started", "trained"]

_TOKENS = 1  # of a pass, so that what is seen is the loading


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds since the call: it returned, the first block and the whole pass had been computed, everything was there;
    how long uses waited for tensors; and the sum of the pass's output."""

    returned: float
    first_layer: float
    first_output: float
    everything: float
    stalled: float
    output: float


def loaded(store: Path, shape: Shape) -> Timeline:
    """A whole load, then a pass."""
    (model, optimizer), start = _on_meta(shape), time.perf_counter()
    tierload.load(store, into={"model": model, "optimizer": optimizer})
    returned = time.perf_counter()
    first, last, output = _pass(model)
    return Timeline(returned - start, first - start, last - start, returned - start, returned - start, output)


def started(store: Path, shape: Shape) -> Timeline:
    """A pass while what it uses arrives."""
    (model, optimizer), start = _on_meta(shape), time.perf_counter()
    boot = tierload.hot_start(store, model, optimizer)
    returned = time.perf_counter()
    first, last, output = _pass(model)
    boot.join()
    end = time.perf_counter()
    found = Timeline(returned - start, first - start, last - start, end - start, boot.progress.stalled_seconds, output)
    boot.close()
    return found


def _on_meta(shape: Shape) -> tuple[GPT, torch.optim.AdamW]:
    with torch.device("meta"):
        model = GPT(shape).eval()
    return model, torch.optim.AdamW(model.parameters())


def trained(shape: Shape) -> dict[str, object]:
    """A model and its optimizer after a step."""
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@torch.no_grad()
def _pass(model: GPT) -> tuple[float, float, float]:
    first = 0.0

    def note(*_: object) -> None:
        nonlocal first
        first = time.perf_counter()

    handle = model.blocks[0].register_forward_hook(note)
    output = model(torch.arange(min(_TOKENS, model.shape.context))[None])
    handle.remove()
    return first, time.perf_counter(), output.double().sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    shape = Shape(layers=options.layers, width=options.width)
    raw = tierload.save(trained(shape), options.store, step=0).raw_bytes
    rows: dict[str, list[dict[str, float]]] = {"load": [], "hot start": []}
    for number in range(options.rounds + 1):
        for name, way in (("load", loaded), ("hot start", started)):
            drop_cached(options.store)
            found = asdict(way(options.store, shape))
            if number:  # the first of each imports and touches what is needed once
                rows[name].append(found)
    print(json.dumps({"raw": raw, "rows": rows}))


if __name__ == "__main__":
    main()
