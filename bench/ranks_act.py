"""The demonstration's act of many ranks: four train, one is killed in the middle of a save, three go on."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import tierload
from bench.stage import Stage, Trainer, kill_in_save, megabytes

__all__ = ["play"]

EVERY = 3
KILL_AT = 6
VICTIM = 2


class _Ranks:
    """The processes of one job."""

    def __init__(self, stage: Stage, count: int, store: Path, until: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        arguments = ("--store", store, "--until", until, "--every", EVERY)
        self.trainers = [
            Trainer(stage, *arguments, module="bench.train_ranks", more=job | {"RANK": str(rank)})
            for rank in range(count)
        ]

    def ended(self) -> dict[int, list[str]]:
        """What every rank said of its end; those that ended well are not there."""
        found: dict[int, list[str]] = {}
        for trainer in self.trainers:
            assert trainer.process.stdout is not None
            for line in trainer.process.stdout:
                event = json.loads(line)
                if "ended" in event:
                    found.setdefault(event["rank"], []).append(event["ended"])
            trainer.process.wait()
        return found


def play(stage: Stage) -> None:
    """Shows the act; what does not hold is remembered by ``stage``."""
    store = stage.folder / "ranks"
    stage.act("Four ranks train one model, and one is killed in the middle of a save")
    stage.say(
        "Four processes hold a quarter of every weight and moment each (fully_shard, gloo), and all of them call "
        "tierload.async_save(state, store): each writes its part, rank 0 makes one commit of them."
    )
    losses: dict[int, float] = {}
    target = KILL_AT
    while True:
        ended = _train_four(stage, store, target, losses)
        with tierload.open(store) as reader:
            newest = reader.find()
            whole = reader.verify().ok
        if newest.step != target:
            break
        stage.say(f"(The save of step {target} was committed when the kill came. Once more.)")
        target += EVERY
    told = [rank for rank, said in ended.items() if any(f"rank {VICTIM}" in text for text in said)]
    others = [rank for rank in range(4) if rank != VICTIM]
    if 0 in told:
        said = next(text for text in ended[0] if f"rank {VICTIM}" in text)
        stage.lines(f"rank 0 ends with {said}")
    stage.check(sorted(told) == others, f"ranks {others} were told that rank {VICTIM} is gone, and ended")
    stage.command("show", "--shards", store)
    text = f"the store opens at step {newest.step}, the last that all four had made durable; every byte of it is right"
    stage.check(whole and newest.step == target - EVERY and newest.ranks == 4, text)
    _go_on(stage, store, target, losses)


def _train_four(stage: Stage, store: Path, target: int, losses: dict[int, float]) -> dict[int, list[str]]:
    job = _Ranks(stage, 4, store, target + EVERY)
    for event in job.trainers[0].lines():
        if "step" in event:
            losses[int(event["step"])] = float(event["loss"])
        if "saved" in event:
            stage.lines(
                f"step {event['saved']:>3}  the loop of rank 0 waited {event['waited'] * 1e3:.1f} ms; "
                f"{megabytes(event['raw'])} of all ranks, durable after {event['seconds']:.2f} s"
            )
        if event.get("saving") == target:
            kill_in_save(job.trainers[VICTIM], store, among=f".r{VICTIM:04x}.")
            stage.lines(f"step {target:>3}  SIGKILL for rank {VICTIM} while it was writing its part of this save")
            break
    return job.ended()


def _go_on(stage: Stage, store: Path, target: int, losses: dict[int, float]) -> None:
    stage.act("Three ranks resume from that commit, and the loss goes on")
    end = target + EVERY
    job = _Ranks(stage, 3, store, end)
    again: dict[int, float] = {}
    for event in job.trainers[0].lines():
        if "resumed" in event:
            stage.lines(f"three ranks resumed from step {event['resumed']}, a third of every tensor each")
        if "step" in event:
            again[int(event["step"])] = float(event["loss"])
    clean = not job.ended()
    rows = [f"{'step':>4}   {'four ranks':<14}three ranks"]
    for step in sorted(losses.keys() | again.keys()):
        shown = [f"{each[step]:.6f}" if step in each else "" for each in (losses, again)]
        rows.append(f"{step:>4}   {shown[0]:<14}{shown[1]}")
    stage.lines("\n".join(rows))
    both = sorted(losses.keys() & again.keys())
    apart = max((abs(losses[step] - again[step]) / losses[step] for step in both), default=1.0)
    text = (
        f"the {len(both)} steps that were lost with the kill have the same losses on three ranks, up to the order of "
        f"additions (they differ by {apart:.1e} of themselves at most), and training went on to step {max(again)}"
    )
    stage.check(clean and bool(both) and apart < 1e-4 and max(again) == end, text)
