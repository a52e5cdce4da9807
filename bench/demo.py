"""`make demo`: a run saves, is killed, resumes exactly, goes wrong, is rolled back, meets a rotten byte,
is trained by four ranks, of which one is killed, and is used while it arrives."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import tierload
from bench import hot_act, ranks_act
from bench.stage import Stage, Trainer, copy_with_flip, flip, kill_in_save, megabytes

EVERY = 4
KILL_AT = 16  # the save of this step is killed; should the kill come too late, the next one's is
SPIKE_STEPS = 4
BAD_RATE = 0.1


class Demo:
    """The acts, in order. ``losses`` has for each step the loss, and its bits, of every time it was trained."""

    def __init__(self, folder: Path) -> None:
        self.stage = Stage(folder)
        self.store = folder / "gpt"
        self.losses: dict[int, list[tuple[float, str]]] = {}
        self.reference: dict[int, tuple[float, str]] = {}  # of a run that is never interrupted
        self.end = 0  # the step up to which the two are compared
        self.digest = ""
        self.saves: list[tuple[float, float]] = []  # seconds that the loop waited, and until each was durable

    def play(self) -> list[str]:
        """Returns the claims that did not hold."""
        self.train_and_kill()
        self.resume()
        self.spike()
        self.roll_back()
        self.rot()
        ranks_act.play(self.stage)
        self.measure()
        hot_act.play(self.stage)
        return self.stage.failures

    def _train(self, *arguments: object, kill_at: int = 0) -> tuple[dict[str, object], dict[str, int]]:
        """One training process from the newest commit on, shown save by save. Returns the last thing that it told,
        and the new files when it was killed."""
        trainer = Trainer(self.stage, "--store", self.store, *arguments)
        last: dict[str, object] = {}
        new_files: dict[str, int] = {}
        loss, first = 0.0, True
        for last in trainer.events():
            if "resumed" in last:
                self.stage.lines(f"resumed from step {last['resumed']}")
            if "step" in last:
                loss = last["loss"]
                self.losses.setdefault(last["step"], []).append((loss, last["bits"]))
            if "saved" in last:
                if not first:
                    self.saves.append((last["waited"], last["seconds"]))
                first = False
                self.stage.lines(
                    f"step {last['saved']:>3}  loss {last['loss']:7.3f}   the loop waited {last['waited'] * 1e3:.1f} ms"
                    f"; {megabytes(last['written'])} of {megabytes(last['raw'])} written, durable after "
                    f"{last['seconds']:.2f} s"
                )
            if kill_at and last.get("saving") == kill_at:
                new_files = kill_in_save(trainer, self.store)
                self.stage.lines(f"step {kill_at:>3}  loss {loss:7.3f}   SIGKILL while this save was being written")
        return last, new_files

    def train_and_kill(self) -> None:
        stage = self.stage
        stage.act(f"A training run saves every {EVERY} steps, and is killed in the middle of a save")
        stage.say(
            'In its loop: tierload.async_save(state, "gpt", step=step, metrics={"loss": loss, "lr": lr}). Each save is '
            "copied and written beside the next steps; tierload.guard(optimizer) lets the copy go on until the "
            "optimizer is about to change the weights."
        )
        target = KILL_AT
        while True:
            _, new_files = self._train("--until", target + EVERY, "--every", EVERY, kill_at=target)
            with tierload.open(self.store) as reader:
                newest = reader.find()
            if newest.step < target:
                break
            stage.say(f"(The save of step {target} was already committed when the kill came. Once more.)")
            target += EVERY
        self.end = target + 2 * EVERY
        parts = [f"{name} with {megabytes(size)}" for name, size in new_files.items() if name.startswith("seg/")]
        others = ", ".join(name for name in new_files if not name.startswith("seg/")) or "no manifest"
        stage.say(
            f"On disk at that moment, beside the earlier commits: {', '.join(parts)} (the save before had "
            f"{megabytes(newest.written_bytes)}), {others}, and no commit record. A save exists when its commit record "
            "is durable, and not before."
        )
        stage.check(bool(parts), "the kill came in the middle: some of the data was there, and no commit")
        stage.command("log", self.store)
        whole = stage.command("verify", self.store).returncode == 0
        stage.check(whole, f"the store opens at step {newest.step}, and every byte of it is what was written")

    def resume(self) -> None:
        stage = self.stage
        stage.act("A fresh process resumes, and its losses are those of a run that was never interrupted")
        stage.say(
            'It starts with other random numbers and an untrained model: tierload.load("gpt", into=state) brings back '
            "weights, moments, schedule, random number generators and the position in the text."
        )
        left = self._without_commit()
        last, _ = self._train("--until", self.end, "--every", EVERY)
        self.digest = str(last["digest"])
        gone = bool(left) and not left & self._without_commit()
        stage.check(gone, "what the killed save had left behind was removed when the next writer opened the store")
        stage.say("Now the same run without interruption and without a store, for comparison.")
        digest = ""
        for event in Trainer(stage, "--until", self.end + EVERY, "--digest-at", self.end).events():
            if "step" in event:  # it goes on after ``end``: those are compared after the rollback
                self.reference[event["step"]] = (event["loss"], event["bits"])
            digest = event.get("digest_at", digest)
        self._show_losses()
        lost = sum(len(found) > 1 for found in self.losses.values())
        equal = self._equal_losses()
        text = f"{equal} of {self.end} losses are equal bit for bit; the {lost} steps lost with the kill, both times"
        stage.check(equal == self.end == len(self.losses), text)
        waited, took = (sum(column) for column in zip(*self.saves, strict=True))
        text = (
            f"{len(self.saves)} saves (the first of each process left out: it touches its memory for the first time) "
            f"took {took:.2f} s until they were durable, of which the loop waited {waited * 1e3:.1f} ms in all"
        )
        stage.check(waited < took, text)
        text = f"all weights and moments at step {self.end} are equal too: their SHA-256 is {digest[:16]}…"
        stage.check(digest == self.digest, text)

    def _without_commit(self) -> set[str]:
        """Segment files that no commit made."""
        with tierload.open(self.store) as reader:
            known = {f"{commit.txid:012x}" for commit in reader.commits()}
        return {path.name for path in (self.store / "seg").iterdir() if path.name[9:21] not in known}

    def _show_losses(self) -> None:
        rows = [f"{'step':>4}   {'uninterrupted':<24}killed and resumed"]
        for step, found in sorted(self.losses.items()):
            if step % EVERY == 0 or len(found) > 1:
                texts = [f"{loss:.6f} = 0x{bits}" for loss, bits in (self.reference[step], *found)]
                rows.append(f"{step:>4}   {'    '.join(texts)}")
        self.stage.lines("\n".join(rows))

    def _equal_losses(self) -> int:
        """Of how many steps every loss has the bits of the uninterrupted run's."""
        return sum({bits for _, bits in found} == {self.reference[step][1]} for step, found in self.losses.items())

    def spike(self) -> None:
        stage = self.stage
        stage.act(f"Somebody sets a bad learning rate ({BAD_RATE:g}), the loss explodes, and that is saved")
        self._train("--until", self.end + SPIKE_STEPS, "--every", 2, "--learning-rate", BAD_RATE)
        stage.say("`tierload log` shows when, and what the learning rate was:")
        stage.command("log", self.store)
        with tierload.open(self.store) as reader:
            bad, good = reader.find(), reader.find(step=self.end)
        spiked = bad.metrics["loss"] > 1.5 * good.metrics["loss"]
        stage.check(spiked, f"the newest commit has a loss of {bad.metrics['loss']}, that of step {self.end} had less")

    def roll_back(self) -> None:
        stage = self.stage
        stage.act(f"`tierload rollback` goes back to step {self.end}, and training goes on from there")
        done = stage.command("rollback", self.store, "--to", self.end, "--yes")
        stage.check(
            done.returncode == 0, "no data was copied or lost: a rollback is itself a commit, and can be undone"
        )
        self.losses = {}
        self._train("--until", self.end + EVERY, "--every", EVERY)
        right = self._equal_losses() == len(self.losses) == EVERY
        stage.check(right, f"the {EVERY} losses after it are those of the run that never had the spike, bit for bit")
        stage.command("log", self.store, "--all", "-n", 6)

    def rot(self) -> None:
        stage = self.stage
        stage.act("One bit flips on the disk")
        segment = max((self.store / "seg").iterdir())
        offset = segment.stat().st_size // 2
        copy = stage.folder / "rotten"
        copy_with_flip(self.store, copy, segment.name, offset)
        stage.say(f"In a copy of the store, one bit of byte {offset:,} of seg/{segment.name} is flipped.")
        done = stage.command("verify", copy)
        with tierload.open(copy) as reader:
            head, damages = reader.find(), reader.verify().damages
        said = " ".join(done.stdout.split())
        names = [head.id[:12], damages[0].keys[0], f"page {damages[0].page}", segment.name] if len(damages) == 1 else []
        found = done.returncode == 1 and bool(names) and all(name in said for name in names)
        stage.check(found, "verify names the commit, the tensor, the page and the file, and exits with 1")
        self._load_rotten(copy, damages[0].keys[0] if damages else "")
        shutil.rmtree(copy)
        self._rot_of_torch_save()
        whole = stage.command("verify", "--full", self.store).returncode == 0
        stage.check(whole, "the store that was copied is whole")

    def _load_rotten(self, copy: Path, key: str) -> None:
        try:
            tierload.load(copy)
            refused = False
        except tierload.CorruptPage as error:
            refused = error.key == key
        self.stage.check(refused, "a load of that commit is refused, and names the same tensor")
        tierload.load(copy, step=self.end)
        self.stage.check(True, f"the commit of step {self.end} in the same store still loads, verified")

    def _rot_of_torch_save(self) -> None:
        path = self.stage.folder / "plain.pt"
        weights = tierload.load(self.store, keys="model/*")["model"]
        torch.save(weights, path)
        flip(path, path.stat().st_size // 2)
        try:
            loaded = torch.load(path)
        except RuntimeError as error:
            self.stage.say(f"For comparison, torch.load of a file of torch.save with such a bit says: {error}")
        else:
            wrong = [name for name in weights if not torch.equal(weights[name], loaded[name])]
            text = "For comparison: a file of torch.save with such a bit loads without a word, with a wrong"
            self.stage.say(f"{text} {', '.join(wrong)}.")
        path.unlink()

    def measure(self) -> None:
        stage = self.stage
        stage.act("What it costs: the same states saved by torch.save and by tierload, in turn, on the same disk")
        folder = stage.folder / "torch"
        *_, result = Trainer(stage, "--store", self.store, "--folder", folder, module="bench.versus").events()
        raw, rows = result["raw"], result["rows"]
        count = len(rows["torch"])
        names = {
            "torch": "torch.save, fsync, rename",
            "tierload": "tierload.save",
            "again": "tierload.save of the same state again",
        }
        columns = "{:<39}{:>13}{:>9}{:>27}{:>14}"
        stage.lines(columns.format("", "bytes a save", "of raw", "seconds a save", f"all {count} saves"))
        for key, name in names.items():
            seconds, sizes = zip(*rows[key], strict=True)
            spread = f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
            size = statistics.median(sizes)
            stage.lines(columns.format(name, megabytes(size), f"{size / raw:.3f}", spread, megabytes(sum(sizes))))
        stage.say(
            f"Medians of {count}, with the lowest and the highest. Bytes are what the file system gave; the state has "
            f"{megabytes(raw)} of tensors. Every tierload.save also kept all saves before it, and digests of each page."
        )
        smaller = statistics.median(size for _, size in rows["tierload"]) < raw
        stage.check(smaller, "a save takes less of the disk than the state has bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="work in a folder inside this one (default: TMPDIR)")
    options = parser.parse_args()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tierload-demo-", dir=options.dir)).resolve()
    try:
        demo = Demo(folder)
        print("tierload keeps the checkpoints of a training run: crash-safe, verified, and with a way back.")
        demo.stage.say(
            "Here a GPT of 10 million parameters learns to write Python from the standard library's own sources, with "
            "AdamW, on this machine's processor. Nothing is simulated: processes are started, killed, started again."
        )
        failures = demo.play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = f"{len(failures)} claims FAILED" if failures else "Everything held"
    print(f"\n{outcome}; {time.monotonic() - start:.0f} seconds.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
