"""export and import."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierload
from tests.cases.stores import let_go
from tests.cli.support import contents, ids, invoke, process, run, run_json
from tierload.cli.arguments import count_of


def test_export_the_head_and_others(store: Path, tmp_path: Path) -> None:
    before = contents(store)
    text = run("export", store, "--to", tmp_path / "a.safetensors")
    assert ids(store)[400][:12] in text
    assert "3 tensors" in text
    assert "1 other value" in text
    assert load_file(tmp_path / "a.safetensors")["small"] == 400
    for number, options in enumerate((("--step", 100), ("--tag", "best"), ("--commit", ids(store)[200][:10]))):
        run("export", store, "--to", tmp_path / f"{number}.pt", *options)
        expected = (100, 300, 200)[number]
        assert torch.load(tmp_path / f"{number}.pt", weights_only=True)["small"] == expected
    assert contents(store) == before


def test_a_directory_of_dcp_out_and_in(store: Path, tmp_path: Path) -> None:
    text = run("export", store, "--to", tmp_path / "dcp", "--step", 200, "--format", "dcp")
    assert "and 1 more (dcp)" in text
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    assert "2 files (dcp)" in run("import", tmp_path / "dcp", tmp_path / "back")
    let_go(tmp_path / "back")
    found, right = tierload.load(tmp_path / "back"), tierload.load(store, step=200)
    assert isinstance(found, dict)
    assert isinstance(right, dict)
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in ("w", "small"))


def test_export_json(store: Path, tmp_path: Path) -> None:
    document = run_json("export", store, "--to", tmp_path / "a.safetensors", "--keys", "w", "--keys", "sm*")
    assert document.pop("commit")["id"] == ids(store)[400]
    assert document == {
        "store": str(store),
        "format": "safetensors",
        "files": [str(tmp_path / "a.safetensors")],
        "tensors": 2,
        "bytes": 12_008,
        "values": 0,
        "ties": {},
        "changed": [],
        "left_out": [],
        "skipped": [],
        "own": [],
    }


def test_what_is_left_out_has_its_own_exit_code(tmp_path: Path) -> None:
    tied = torch.ones(3)
    state = {"w": tied, "head": tied, "turned": torch.ones(2, 3).t(), "z": torch.zeros(2, dtype=torch.complex128)}
    with tierload.Store(tmp_path / "store", mode="w") as store:
        store.save(state)
    text = run("export", tmp_path / "store", "--to", tmp_path / "a.safetensors", code=7)
    assert "LEFT OUT" in text
    assert "safetensors does not take complex128" in text
    assert "to w" in text
    document = run_json("export", tmp_path / "store", "--to", tmp_path / "b.safetensors", code=7)
    assert document["left_out"] == [{"key": "z", "why": "safetensors does not take complex128"}]
    assert document["ties"] == {"head": "w"}
    assert [change["key"] for change in document["changed"]] == ["turned"]
    run("export", tmp_path / "store", "--to", tmp_path / "a.pt")


def test_export_refuses_to_overwrite(store: Path, tmp_path: Path) -> None:
    run("export", store, "--to", tmp_path / "a.safetensors", "--step", 100)
    refused = invoke("export", store, "--to", tmp_path / "a.safetensors")
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert load_file(tmp_path / "a.safetensors")["small"] == 100
    run("export", store, "--to", tmp_path / "a.safetensors", "--force")
    assert load_file(tmp_path / "a.safetensors")["small"] == 400


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--to", "a.zip"), 2),
        (("--to", "a.pt", "--format", "onnx"), 2),
        (("--to", "a", "--max-shard-size", "big"), 2),
        (("--to", "a", "--max-shard-size", "0"), 2),
        (("--to", "a.pt", "--step", "7"), 3),
        (("--to", "a.pt", "--tag", "no"), 3),
        (("--to", "a.pt", "--keys", "nothing*"), 3),
        (("--to", "a.pt", "--root", "nothing"), 3),
        (("--to", "a.pt", "--step", "100", "--tag", "best"), 2),
        ((), 2),
    ],
)
def test_export_usage(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    run("export", store, *words, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_export_of_shards_and_import_of_a_folder(store: Path, tmp_path: Path) -> None:
    document = run_json("export", store, "--to", tmp_path / "model", "--max-shard-size", "20KB")
    assert len(document["files"]) == 4
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"w", "frozen", "small"}
    (tmp_path / "model/README.md").write_text("x")
    text = run("import", tmp_path / "model", tmp_path / "back", "--step", 5, "--tag", "a", "--tag", "b", "--note", "n")
    assert "3 tensors" in text
    assert f"not read: {tmp_path / 'model/README.md'}" in text
    commit = run_json("show", tmp_path / "back", "a")["commit"]
    assert (commit["step"], commit["tags"], commit["note"]) == (5, ["a", "b"], "n")
    assert tierload.load(tmp_path / "back")["step"] == 400
    let_go(tmp_path)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("10b", 10), ("5GB", 5 * 10**9), ("2 MiB", 2 << 20), ("3k", 3000), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert count_of(text) == count


def test_import_json_and_its_errors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    document = run_json("import", tmp_path / "a.safetensors", tmp_path / "store", "--step", 1)
    assert (document["commit"]["step"], document["tensors"], document["bytes"]) == (1, 1, 8)
    assert document["files"] == [str(tmp_path / "a.safetensors")]
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    damaged = invoke("import", tmp_path / "bad.safetensors", tmp_path / "store")
    assert damaged.exit_code == 1
    assert damaged.stdout == ""
    assert "bad.safetensors" in damaged.stderr
    assert len(damaged.stderr.splitlines()) == 1
    torch.save({"w": torch.ones(2, device="meta")}, tmp_path / "bare.pt")
    run("import", tmp_path / "bare.pt", tmp_path / "store", code=2)
    run("import", tmp_path / "no.pt", tmp_path / "store", code=5)
    run("import", tmp_path / "store", code=2)
    assert len(run_json("log", tmp_path / "store")["commits"]) == 1
    let_go(tmp_path)


def test_import_into_a_store_that_another_process_holds(store: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    with tierload.Store(store, mode="w"):
        done = process("import", tmp_path / "a.safetensors", store)
        assert done.returncode == 4
        assert "held by" in done.stderr or "writes to" in done.stderr
        assert process("export", store, "--to", tmp_path / "b.pt").returncode == 0


def test_a_full_disk(store: Path, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    for suffix in ("pt", "safetensors"):
        command = [sys.executable, "-m", "tierload", "export", str(store), "--to", str(tmp_path / f"a.{suffix}")]
        done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
        assert done.returncode == 5, done.stderr
        assert "File too large" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
