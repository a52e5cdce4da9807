"""verify: damage is found, named, and told from what is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import flip, ids, invoke, run, run_json
from tierload.engine import Store
from tierload.types import VerifyReport


def segment(store: Path, number: int) -> Path:
    """The segment that the n-th commit wrote."""
    return sorted((store / "seg").iterdir())[number]


def manifest(store: Path, number: int, copy: str = "") -> Path:
    """A copy of the manifest of the n-th commit."""
    first = sorted(file for file in (store / "man").iterdir() if not file.name.endswith(".m"))[number]
    return first.with_name(first.name + copy)


def test_a_whole_store(store: Path) -> None:
    text = run("verify", store)
    assert "metadata of 4 commits (both copies)" in text
    assert f"of {ids(store)[400][:12]} (step 400)" in text
    assert text.endswith("no damage\n")
    assert "pages of all commits" in run("verify", store, "--full")
    assert "(step 200)" in run("verify", store, "--commit", 200)
    head, full = run_json("verify", store), run_json("verify", store, "--full")
    assert head["ok"]
    assert head["read"] == head["whole"] == [ids(store)[400]]
    assert full["whole"] == [ids(store)[step] for step in (400, 300, 200, 100)]
    assert full["newest_whole"] == ids(store)[400]
    assert full["pages"] > head["pages"] > 0
    assert full["damages"] == []


def test_a_damaged_page_is_named(store: Path) -> None:
    file = segment(store, -1)
    flip(file, 8192 + 5)
    done = invoke("verify", store)
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("DAMAGED"))
    for part in (ids(store)[400][:12], "(step 400)", "key w", "page ", f"seg/{file.name}", "byte 8192"):
        assert part in line
    assert "tierload verify" in done.stdout  # only --full can say which commits are whole
    [damage] = run_json("verify", store, code=1)["damages"]
    assert damage == damage | {
        "commits": [ids(store)[400]],
        "steps": [400],
        "keys": ["w"],
        "path": f"seg/{file.name}",
        "offset": 8192,
    }
    assert damage["page"] >= 0


def test_full_says_which_commits_are_whole(store: Path) -> None:
    flip(segment(store, -1), 5)
    of = ids(store)
    text = run("verify", store, "--full", code=1)
    assert f"damaged: {of[400][:12]} (step 400)" in text
    assert "whole: " + ", ".join(f"{of[step][:12]} (step {step})" for step in (300, 200, 100)) in text
    [advice] = [line for line in text.splitlines() if "newest whole commit is" in line]
    run("rollback", store, *advice.rpartition("tierload rollback ")[2].split()[1:], "--yes")
    run("verify", store)
    document = run_json("verify", store, "--full", code=1)
    assert document["newest_whole"] == ids(store)[300]


def test_a_page_that_all_commits_share(store: Path) -> None:
    flip(segment(store, 0), 3)  # pages of `frozen` come first, and every commit has them
    document = run_json("verify", store, "--full", code=1)
    assert document["whole"] == []
    assert document["newest_whole"] is None
    assert len(document["damages"][0]["commits"]) == 4
    assert "whole: no commit" in run("verify", store, "--full", code=1)


def test_one_copy_of_a_manifest(store: Path) -> None:
    flip(manifest(store, 1, ".m"), 100)
    text = run("verify", store, code=1)
    assert f"commit {ids(store)[200][:12]} (step 200): man/" in text
    full = run_json("verify", store, "--full", code=1)
    assert full["whole"] == [ids(store)[step] for step in (400, 300, 200, 100)]  # it can be loaded all the same


def test_both_copies_of_a_manifest(store: Path) -> None:
    for copy in ("", ".m"):
        flip(manifest(store, -1, copy), 100)
    full = run_json("verify", store, "--full", code=1)
    assert full["whole"] == [ids(store)[step] for step in (300, 200, 100)]
    assert "newest whole commit is" in run("verify", store, "--full", code=1)
    assert invoke("show", store).exit_code == 1


def test_a_lost_segment(store: Path) -> None:
    segment(store, -1).unlink()
    assert "is missing" in run("verify", store, code=1)
    assert run_json("verify", store, "--full", code=1)["newest_whole"] == ids(store)[300]


def test_a_damaged_journal_leaves_nothing_to_roll_back(store: Path) -> None:
    for journal in (store / "wal").iterdir():
        flip(journal, 4096 * 4 + 10)
    text = run("verify", store, "--full", code=1)
    assert "opens for reading only" in text
    assert "tierload rollback" not in text


def test_commits_that_a_live_run_drops_meanwhile(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Store.verify

    def late(self: Store, **options: Any) -> VerifyReport:
        with Store(store, mode="w") as writer:
            writer.collect(keep=1)
        return verify(self, **options)

    monkeypatch.setattr(Store, "verify", late)
    document = run_json("verify", store, "--full")
    assert document["ok"]
    assert document["read"] == document["whole"] == [ids(store)[400], ids(store)[300]]


def test_full_and_commit_exclude_each_other(store: Path) -> None:
    run("verify", store, "--full", "--commit", 100, code=2)
    run("verify", store, "--commit", 123, code=3)
