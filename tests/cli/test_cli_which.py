"""Which commit a text means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import ids, invoke, run, run_json
from tierload.cli.which import find
from tierload.engine import Store
from tierload.errors import CommitNotFound, InvalidRequest


def test_steps_tags_and_ids(store: Path) -> None:
    of = ids(store)
    with Store(store) as reader:
        assert find(reader, None).step == 400
        for step, commit in of.items():
            for text in (f"{step}", f"step:{step}", commit, commit[:12].upper(), f"commit:{commit[:9]}"):
                assert find(reader, text).id == commit, text
        assert find(reader, "best").step == find(reader, "tag:best").step == 300


def test_tags_that_look_like_something_else(store: Path) -> None:
    of = ids(store)
    for name in ("7", of[100][:10], "exp:1", "dead", "tag:x"):
        run("tag", store, f"{name}", 200)
        if name != "tag:x":
            assert run_json("show", store, name)["commit"]["step"] == 200, name
    assert run_json("show", store, "tag:tag:x")["commit"]["step"] == 200
    assert run_json("show", store, f"commit:{of[100][:10]}")["commit"]["step"] == 100


def test_a_step_that_is_also_a_tag(store: Path) -> None:
    run("tag", store, "100", 200)
    done = invoke("rollback", store, "--to", "100", "--yes")
    assert done.exit_code == 2
    assert "step:100 or tag:100" in done.stderr
    assert run_json("show", store, "step:100")["commit"]["step"] == 100
    assert run_json("show", store, "tag:100")["commit"]["step"] == 200
    run("tag", store, "300", 300)
    assert run_json("show", store, "300")["commit"]["step"] == 300  # both mean the same commit


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("500", "no commit with step 500"),
        ("nope", "no tag 'nope'; there are: best"),
        ("tag:nope", "no tag 'nope'"),
        ("commit:zz", "no commit 'zz'"),
        ("", "no commit ''"),
        ("ffffffffffffffff", "no commit"),
        ("12345678", "no commit"),
    ],
)
def test_what_is_not_there(store: Path, text: str, says: str) -> None:
    with Store(store) as reader, pytest.raises(CommitNotFound, match=says):
        find(reader, text)
    assert invoke("show", store, text).exit_code == 3


def test_a_number_that_is_none(store: Path) -> None:
    with Store(store) as reader, pytest.raises(InvalidRequest, match="names no step"):
        find(reader, "step:x")


def test_a_step_that_was_left_behind(store: Path) -> None:
    left = ids(store)[400]
    run("rollback", store, "--to", 300, "--yes")
    done = invoke("show", store, "400")
    assert done.exit_code == 3
    assert left[:12] in done.stderr
    assert run_json("show", store, left)["commit"]["superseded"]
