"""tag and gc."""

from __future__ import annotations

from pathlib import Path

from tests.cli.support import contents, ids, invoke, run, run_json


def test_tags(store: Path) -> None:
    of = ids(store)
    assert run("tag", store, "latest") == f"latest: {of[400][:12]} (step 400)\n"
    assert run_json("tag", store)["tags"] == {"best": of[300], "latest": of[400]}
    assert "best" in run("tag", store).splitlines()[1]
    assert run("tag", store, "best", 100).endswith(f"it was {of[300][:12]} (step 300)\n")
    document = run_json("tag", store, "best", "step:200")
    assert (document["before"], document["commit"]) == (of[100], of[200])
    assert "removed" in run("tag", store, "best", "--remove")
    assert run_json("tag", store, "latest", "--remove")["commit"] is None
    assert run("tag", store) == "no tags\n"


def test_tags_that_cannot_be(store: Path) -> None:
    run("tag", store, "x", 12345, code=3)
    run("tag", store, "nope", "--remove", code=3)
    run("tag", store, "--remove", code=2)
    run("tag", store, "best", "100", "--remove", code=2)
    assert list(run_json("tag", store)["tags"]) == ["best"]


def test_gc(store: Path) -> None:
    before = contents(store)
    plan = run_json("gc", store, "--keep", 1, "--dry-run")
    assert contents(store) == before
    assert [commit["step"] for commit in plan["dropped"]] == [100, 200]  # 300 is tagged
    assert plan["freed_bytes"] is None
    assert "would drop 2 commits" in run("gc", store, "--keep", 1, "--dry-run")
    document = run_json("gc", store, "--keep", 1)
    assert [commit["id"] for commit in document["dropped"]] == [commit["id"] for commit in plan["dropped"]]
    assert document["freed_bytes"] > 0
    assert list(ids(store)) == [300, 400]
    assert run_json("verify", store, "--full")["ok"]


def test_gc_keeps_every(store: Path) -> None:
    text = run("gc", store, "--keep", 1, "--keep-every", 200)
    assert "dropped 1 commit," in text
    assert list(ids(store)) == [200, 300, 400]
    assert "dropped 0 commits" in run("gc", store)


def test_gc_keeps_the_best_and_the_last_good(store: Path) -> None:
    run("tag", store, "best", "--remove")
    run("gc", store, "--keep", 1, "--keep-best", "loss:max")
    assert list(ids(store)) == [100, 300, 400]  # 400 has a nan, 200 an infinity


def test_gc_refuses_what_makes_no_sense(store: Path) -> None:
    run("gc", store, "--keep", 1, "--keep-best", "loss", code=2)
    run("gc", store, "--keep-best", "loss:min", code=2)
    run("gc", store, "--keep", 0, code=2)
    assert "--keep-every needs --keep" in invoke("gc", store, "--keep-every", 5).stderr
    run("gc", store, "--keep-every", 5, code=2)
    run("gc", store / "nope", code=3)
    assert not (store / "nope").exists()
