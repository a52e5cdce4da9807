"""rollback: shown, verified, done, undone."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.support import contents, flip, ids, invoke, run, run_json
from tierload.engine import Store


def loaded(store: Path) -> int:
    with Store(store) as reader:
        state = reader.load()
    assert isinstance(state, dict)
    assert int(state["small"]) == state["step"]
    return int(state["step"])


def recorded(store: Path) -> dict[str, object]:
    with Store(store) as reader:
        return reader.recorded()


def test_a_dry_run_changes_nothing(store: Path) -> None:
    before = contents(store)
    text = run("rollback", store, "--to", 200, "--dry-run")
    assert contents(store) == before
    of = ids(store)
    assert f"from         {of[400][:12]} (step 400)" in text
    assert f"to           {of[200][:12]} (step 200)" in text
    assert f"left behind  {of[400][:12]} (step 400), {of[300][:12]} (step 300)" in text
    assert "changes      2 of 3 keys" in text
    assert "keys         small, w" in text
    assert ["/lr", "0.0025", "0.01"] in [line.split() for line in text.splitlines()]
    assert "verified: " in text
    document = run_json("rollback", store, "--to", 200, "--dry-run")
    assert contents(store) == before
    assert document["dry_run"]
    assert not document["done"]
    assert document["commit"] is document["undo"] is None
    assert document["target"]["id"] == of[200]
    assert [commit["id"] for commit in document["left_behind"]] == [of[400], of[300]]
    assert document["changed"] == ["small", "w"]
    assert document["values"] == [{"key": "/lr", "before": 0.0025, "after": 0.01}]
    assert document["verified_pages"] > 0


def test_rollback_and_back_again_by_commit_id(store: Path) -> None:
    old = ids(store)[400]
    document = run_json("rollback", store, "--to", "best", "--yes")
    assert document["done"]
    assert document["commit"]["source"] == document["target"]["id"]
    assert loaded(store) == 300
    assert recorded(store) == {"/lr": 0.005}
    run("verify", store)
    text = run("rollback", store, "--to", f"commit:{old[:12]}", "--yes")
    assert "it was read back and equals the target" in text
    assert loaded(store) == 400


def test_the_undo_that_is_printed(store: Path) -> None:
    # A value was recorded after the head, so only the LSN brings everything back.
    undo = run_json("rollback", store, "--to", 100, "--yes")["undo"]
    assert "--lsn" in undo
    run(*shlex.split(undo)[1:], "--yes")
    assert loaded(store) == 400
    assert recorded(store) == {"/lr": 0.0025}
    # Now nothing was: the commit says it all.
    text = run("rollback", store, "--to", 200, "--yes")
    undo = text.splitlines()[-1].removeprefix("to undo: ")
    assert "--to commit:" in undo
    run(*shlex.split(undo)[1:], "--yes")
    assert loaded(store) == 400
    assert recorded(store) == {"/lr": 0.0025}


def test_steps_and_lsn(store: Path) -> None:
    assert run_json("rollback", store, "--steps", 2, "--dry-run")["target"]["step"] == 200
    with Store(store) as reader:
        lsn = next(change.lsn for change in reader.history() if change.kind == "change" and change.step == 300)
    document = run_json("rollback", store, "--lsn", lsn, "--yes")
    assert document["target"]["step"] == 300
    assert loaded(store) == 300
    assert recorded(store) == {"/lr": 1 / 300}  # of that LSN, which is after the commit


def test_where_to_must_be_said_once(store: Path) -> None:
    assert "one of --to, --lsn and --steps" in invoke("rollback", store).stderr
    for words in ([], ["--to", 100, "--steps", 1], ["--steps", 0], ["--lsn", 10**30], ["--lsn", 0]):
        run("rollback", store, *words, code=2)
    run("rollback", store, "--steps", 9, code=3)


def test_the_question(store: Path) -> None:
    for answer in ("n\n", "\n", ""):
        done = invoke("rollback", store, "--to", 200, answer=answer)
        assert done.exit_code == 130
        assert "nothing was changed" in done.stderr
        assert loaded(store) == 400
    run("rollback", store, "--to", 200, answer="y\n")
    assert loaded(store) == 200


def test_nothing_to_change(store: Path) -> None:
    run("rollback", store, "--to", 300, "--yes")
    before = ids(store)
    assert "nothing to change" in run("rollback", store, "--to", 300, "--yes")
    assert not run_json("rollback", store, "--steps", 1, "--dry-run")["done"]
    assert ids(store) == before


@pytest.mark.parametrize("dry", [True, False])
def test_a_damaged_target_is_refused(store: Path, dry: bool) -> None:
    flip(sorted((store / "seg").iterdir())[1], 8192 + 5)
    done = invoke("rollback", store, "--to", 200, "--dry-run" if dry else "--yes")
    assert done.exit_code == 1
    assert "key w" in done.stderr
    assert "nothing was changed" in done.stderr
    assert "verify" in done.stderr
    assert loaded(store) == 400
    run("rollback", store, "--to", 300, "--yes")


def test_a_target_without_a_manifest_is_refused(store: Path) -> None:
    second = sorted((store / "man").iterdir())[2:4]
    for copy in second:
        flip(copy, 100)
    done = invoke("rollback", store, "--to", 200, "--yes")
    assert done.exit_code == 1
    assert "(step 200) is damaged" in done.stderr
    assert loaded(store) == 400


def test_away_from_a_head_without_a_manifest(store: Path) -> None:
    for copy in sorted((store / "man").iterdir())[-2:]:
        flip(copy, 100)
    assert "not known: the head is damaged" in run("rollback", store, "--steps", 1, "--yes")
    assert loaded(store) == 300


def test_away_from_a_head_with_damaged_small_tensors(store: Path) -> None:
    segment = sorted((store / "seg").iterdir())[-1]
    flip(segment, segment.stat().st_size // 4096 * 4096 - 4096 + 1)  # the last page holds what is small
    with Store(store) as reader:
        [damage] = reader.verify().damages
    assert damage.keys == ("small",)
    assert "not known: the head is damaged" in run("rollback", store, "--steps", 1, "--yes")
    assert loaded(store) == 300


def test_away_from_a_head_with_a_damaged_page(store: Path) -> None:
    flip(sorted((store / "seg").iterdir())[-1], 8192 + 5)
    done = invoke("rollback", store, "--to", 300, "--yes")
    assert done.exit_code == 0, done.output
    assert loaded(store) == 300
    run("verify", store)
