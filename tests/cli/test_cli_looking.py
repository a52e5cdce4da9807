"""log, show and diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import contents, flip, ids, invoke, run, run_json
from tierload import Settings
from tierload.cli import output
from tierload.cli.text import clean, size, to_json
from tierload.engine import Store


def test_log_is_newest_first(store: Path) -> None:
    lines = run("log", store).splitlines()
    assert lines[0].split() == ["commit", "step", "time", "metrics", "size", "written", "tags", "state"]
    assert [line.split()[1] for line in lines[1:]] == ["400", "300", "200", "100"]
    assert lines[1].endswith("head")
    assert "best" in lines[2]
    assert "note [b]=ok" in lines[2]  # nothing takes brackets for markup


def test_log_shows_superseded_commits_when_asked(store: Path) -> None:
    run("rollback", store, "--to", 200, "--yes")
    assert [commit["step"] for commit in run_json("log", store)["commits"]] == [200, 200, 100]
    assert "2 commits left behind" in run("log", store)
    lines = run("log", store, "--all").splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["200", "400", "300", "200", "100"]
    assert "head, rollback to" in lines[1]
    assert lines[2].endswith("superseded")
    everything = run_json("log", store, "--all")["commits"]
    assert [commit["superseded"] for commit in everything] == [False, True, True, False, False]
    assert everything[0]["source"] == everything[3]["id"]


def test_log_json(store: Path) -> None:
    document = run_json("log", store, "-n", 3)
    assert document["store"] == str(store)
    assert [commit["metrics"]["loss"] for commit in document["commits"]] == ["nan", 1.25, "inf"]
    newest = document["commits"][0]
    assert newest["head"]
    assert newest["id"] == document["head"] == ids(store)[400]
    assert newest["parent"] == document["commits"][1]["id"]
    assert newest["raw_bytes"] > newest["written_bytes"] > 0
    assert document["commits"][1]["tags"] == ["best"]
    assert document["commits"][1]["note"] == "the third"


def test_log_records(store: Path) -> None:
    run("tag", store, "good", 200)
    run("gc", store, "--keep", 1)
    records = run_json("log", store, "--records")["records"]
    assert [record["lsn"] for record in records] == list(range(len(records), 0, -1))
    kinds = {record["kind"]: record for record in records}  # the oldest of each
    assert set(kinds) == {"snapshot", "commit", "change", "tag", "collect"}
    assert kinds["change"] == kinds["change"] | {"key": "/lr", "before": None, "after": 0.01, "step": 100}
    assert kinds["tag"] == kinds["tag"] | {"key": "best", "before": None, "after": ids(store)[300]}
    assert len(kinds["collect"]["before"]) == 1
    text = run("log", store, "--records", "-n", 4)
    assert len(text.splitlines()) == 5
    assert "good: nothing -> " in run("log", store, "--records")


def test_a_store_without_commits(tmp_path: Path) -> None:
    Store(tmp_path / "new", mode="w").close()
    assert "no commit yet" in run("log", tmp_path / "new")
    assert run_json("log", tmp_path / "new")["commits"] == []
    assert "nothing has been saved" in invoke("show", tmp_path / "new").stderr
    assert run_json("verify", tmp_path / "new")["ok"]
    assert run_json("verify", tmp_path / "new", "--full")["newest_whole"] is None
    run("rollback", tmp_path / "new", "--steps", 1, code=3)


def test_show(store: Path) -> None:
    text = run("show", store, "best")
    assert ids(store)[300] in text
    assert "the third" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["w", "float32", "[3000]", "11.7", "KiB"] in rows
    assert ["/lr", "0.005"] in rows  # what was recorded when the commit was made, not after it
    assert "the head" in run("show", store)


def test_show_json(store: Path) -> None:
    document = run_json("show", store, 200)
    assert document["commit"]["id"] == ids(store)[200]
    assert 0 < document["commit"]["stored_bytes"] < document["commit"]["raw_bytes"]
    assert document["recorded"] == {"/lr": 0.01}
    assert document["keys"][0] == {"key": "frozen", "dtype": "int64", "shape": [4000], "bytes": 32000, "rank": None}
    assert [key["key"] for key in document["keys"]] == ["frozen", "small", "w"]


def test_diff(store: Path) -> None:
    text = run("diff", store, 100, "best")
    assert "changed  w" in text
    assert "2 changed, 0 added, 0 removed" in text
    document = run_json("diff", store, 100, "best")
    assert document["changed"] == ["small", "w"]
    assert document["unchanged"] == 1
    assert document["values"] == [{"key": "/lr", "before": None, "after": 0.005}]
    assert (document["a"]["step"], document["b"]["step"]) == (100, 300)


def test_looking_changes_nothing(store: Path) -> None:
    before = contents(store)
    for words in (["log"], ["log", "--records"], ["show"], ["verify", "--full"], ["tag"], ["gc", "--dry-run"]):
        run(words[0], store, *words[1:])
    run("diff", store, 100, 200)
    assert contents(store) == before


def test_a_damaged_journal_is_said(store: Path) -> None:
    for journal in (store / "wal").iterdir():
        flip(journal, 8192 + 10)
    done = invoke("log", store)
    assert done.exit_code == 1
    assert "damaged" in done.stderr
    assert "verify" in done.stderr


def test_nothing_in_a_store_reaches_the_terminal_raw(tmp_path: Path) -> None:
    with Store(tmp_path / "hostile", mode="w", settings=Settings(threads=1)) as store:
        store.save({}, step=1, tags=["\x1b[31mred"], note="two\nlines\udc80", metrics={"\x1b[2J": "\x07"})
        store.record("\x1b]0;title\x07", "\x9b")
    for words in (["log"], ["show"], ["tag"], ["log", "--records"]):
        text = run(words[0], tmp_path / "hostile", *words[1:])
        assert all(line.isprintable() for line in text.split("\n"))


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with output.progress("verifying", 2048) as add:
        add(1024)
        assert capsys.readouterr().err == ""  # not so soon
        monkeypatch.setattr("tierload.observe.progress._LINE_S", 0.0)
        add(512)
    assert capsys.readouterr().err == "verifying: 1.5 KiB of about 2.0 KiB\n"


def test_values_in_json() -> None:
    assert to_json({1: (1, 2.5), "n": float("-inf"), "s": frozenset("a")}) == {"1": [1, 2.5], "n": "-inf", "s": ["a"]}
    assert to_json(1 + 2j) == "(1+2j)"


def test_sizes_and_text() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1 << 20, (1 << 20) - 1, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.0 MiB",
        "5,120.0 TiB",
    ]
    assert clean("é\n\x1b") == "é\\n\\x1b"
