"""Commands on a store that several ranks have written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.support import flip, ids, run, run_json
from tests.ranks.jobs import whole
from tests.ranks.looked import FIRST, MORE_RANKS, OTHER_CUT, OWN_CHANGED, SHARED_CHANGED, looked_at, shard


@pytest.fixture
def ranks_store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(looked_at(), tmp_path / "ranks"))


def test_log_says_how_many_ranks(ranks_store: Path, store: Path) -> None:
    lines = [line.split() for line in run("log", ranks_store).splitlines()]
    assert lines[0][3] == "ranks"
    assert [line[4] for line in lines[1:]] == ["3", "2", "2", "2", "2"]
    assert [commit["ranks"] for commit in run_json("log", ranks_store)["commits"]] == [3, 2, 2, 2, 2]
    assert "ranks" not in run("log", store)
    assert run_json("log", store)["commits"][0]["ranks"] == 1


def test_show_lists_own_values_once(ranks_store: Path) -> None:
    text = run("show", ranks_store)
    assert "3 wrote it together" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["mine", "float32", "[4]", "48", "B", "each", "of", "3"] in rows
    assert ["w", "float32", "[24,", "60]", "5.6", "KiB"] in rows
    keys = run_json("show", ranks_store, FIRST)["keys"]
    assert [(key["key"], key["rank"]) for key in keys if key["key"] in ("mine", "w")] == [
        ("mine", 0),
        ("mine", 1),
        ("w", None),
    ]


def test_show_shards(ranks_store: Path) -> None:
    of = ids(ranks_store)
    text = run("show", ranks_store, OWN_CHANGED, "--shards")
    lines = text.splitlines()
    assert lines[1].endswith(f"{of[FIRST][:12]} (step 1)")
    assert lines[2].endswith(f"{of[OWN_CHANGED][:12]} (step 2)")
    assert "the heaviest is rank 0, 1.00 times the mean" in text
    assert "with 1 cut inside tensors" in text
    document = run_json("show", ranks_store, OWN_CHANGED, "--shards")
    assert [one["commit"] for one in document["shards"]] == [of[FIRST], of[OWN_CHANGED]]
    assert sum(one["raw_bytes"] for one in document["shards"]) == document["commit"]["raw_bytes"]
    assert document["plan"]["cuts"] == 1
    assert 1 <= document["heaviest_to_mean"] < 1.01


def test_show_shards_of_a_commit_by_one_rank(store: Path) -> None:
    document = run_json("show", store, "--shards")
    assert [one["rank"] for one in document["shards"]] == [0]
    assert document["plan"] is None
    assert "1 rank, " in run("show", store, "--shards")


def test_diff(ranks_store: Path) -> None:
    document = run_json("diff", ranks_store, FIRST, OTHER_CUT)
    assert (document["changed"], document["unchanged"]) == ([], 6)
    assert run_json("diff", ranks_store, SHARED_CHANGED, MORE_RANKS)["changed"] == ["mine"]


def test_verify_names_the_rank(ranks_store: Path) -> None:
    assert run_json("verify", ranks_store, "--full")["ok"]
    [segment] = [file for file in (ranks_store / "seg").iterdir() if "-000000000005.r0002." in file.name]
    flip(segment, 1)
    assert ": rank 2: key " in run("verify", ranks_store, code=1)
    [damage] = run_json("verify", ranks_store, "--full", code=1)["damages"]
    assert (damage["rank"], damage["path"]) == (2, f"seg/{segment.name}")


def test_verify_says_when_shards_are_of_two_commits(ranks_store: Path) -> None:
    for suffix in ("", ".m"):
        shutil.copyfile(f"{shard(ranks_store, 2, 1)}{suffix}", f"{shard(ranks_store, 4, 1)}{suffix}")
    document = run_json("verify", ranks_store, "--full", code=1)
    assert {damage["rank"] for damage in document["damages"]} == {1}
    assert all("rank 1 is of transaction 2" in damage["message"] for damage in document["damages"])
    assert ids(ranks_store)[SHARED_CHANGED] not in document["whole"]
    assert document["newest_whole"] == ids(ranks_store)[MORE_RANKS]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_export_has_whole_tensors_and_the_own_ones_of_rank_0(ranks_store: Path, tmp_path: Path, suffix: str) -> None:
    to = tmp_path / f"out.{suffix}"
    text = run("export", ranks_store, "--to", to)
    assert "each rank has its own: that of rank 0 was taken" in text
    found = load_file(to) if suffix == "safetensors" else torch.load(to, weights_only=True)
    assert torch.equal(found["w"], whole((24, 60)))
    assert torch.equal(found["mine"], torch.zeros(4))
    document = run_json("export", ranks_store, "--to", to, "--force", "--keys", "loader/position", "--keys", "w")
    assert document["own"] == ["loader"]


def test_what_was_exported_can_be_imported(ranks_store: Path, tmp_path: Path) -> None:
    run("export", ranks_store, "--to", tmp_path / "out.pt")
    document = run_json("import", tmp_path / "out.pt", ranks_store, "--step", 6)
    assert (document["commit"]["ranks"], document["own"]) == (1, [])
    assert run_json("diff", ranks_store, MORE_RANKS, 6)["changed"] == ["mine"]


def test_rollback_and_gc(ranks_store: Path) -> None:
    run("rollback", ranks_store, "--to", SHARED_CHANGED, "--yes")
    assert run_json("diff", ranks_store, SHARED_CHANGED, FIRST)["changed"] == ["bulk"]
    run("gc", ranks_store, "--keep", 1)
    assert run_json("verify", ranks_store, "--full")["ok"]
    assert {one["rank"] for one in run_json("show", ranks_store, "--shards")["shards"]} == {0, 1}
