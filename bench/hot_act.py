"""The demonstration's last act: a training that goes on while its state arrives, beside one that loads it first."""

from __future__ import annotations

import statistics

from bench.stage import Stage, Trainer, megabytes

__all__ = ["play"]

_COLUMNS = {"returned": "call returned", "first_layer": "first layer", "first_output": "first output"}
_COLUMNS |= {"everything": "everything", "stalled": "waited"}
_WIDTH = 90  # of a line of time


def play(stage: Stage) -> None:
    """Shows the act; what does not hold is remembered by ``stage``."""
    stage.act("A hot start: a model computes while its state is still arriving")
    *_, told = Trainer(stage, "--store", stage.folder / "large", module="bench.hot_versus").events()
    rows = told["rows"]
    assert isinstance(rows, dict)
    stage.say(
        f"A larger GPT and its AdamW, {megabytes(float(str(told['raw'])))} in all, of which a forward pass needs a "
        "third, out of the same commit twice, in turn, nothing of it in the page cache: tierload.load(store, "
        "into=state), then a pass; and tierload.hot_start(store, model, optimizer), whose pass begins at once. Every "
        "byte is verified in both."
    )
    middle = {
        name: {column: statistics.median(row[column] for row in found) for column in _COLUMNS}
        for name, found in rows.items()
    }
    stage.lines(f"{'':<11}" + "".join(f"{title:>15}" for title in _COLUMNS.values()))
    for name, times in middle.items():
        stage.lines(f"{name:<11}" + "".join(f"{times[column] * 1e3:>12.0f} ms" for column in _COLUMNS))
    longest = max(times[column] for times in middle.values() for column in _COLUMNS)
    stage.lines("\n".join(f"{name:<11}{_line(times, longest)}" for name, times in middle.items()))
    stage.say(
        f"Medians of {len(rows['load'])}. r: the call returned. 1: the first layer was computed. o: the output was. "
        "=: everything was there."
    )
    outputs = {row["output"] for found in rows.values() for row in found}
    stage.check(len(outputs) == 1, "the outputs are the same, bit for bit")
    load, hot = middle["load"], middle["hot start"]
    first, last = (hot[column] / load[column] for column in ("first_layer", "first_output"))
    stage.say(
        f"The hot start had its first layer after {first:.2f} of the time of the load, its output after {last:.2f}."
    )


def _line(times: dict[str, float], longest: float) -> str:
    """What happened when, drawn to scale; what is later lies over what is earlier."""
    line = [" "] * (_WIDTH + 1)
    end = round(max(times["first_output"], times["everything"]) / longest * _WIDTH)
    line[: end + 1] = "." * (end + 1)
    for column, mark in (("everything", "="), ("returned", "r"), ("first_layer", "1"), ("first_output", "o")):
        line[round(times[column] / longest * _WIDTH)] = mark
    return "".join(line).rstrip()
