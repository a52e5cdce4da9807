from __future__ import annotations

import os
import stat

import pytest
from fake_engine import bind, load, round_trip, save

from tierload.errors import CorruptStore, KeyMismatch, UnsupportedValue
from tierload.state import NO_CHUNKS, File, Folder, plan_load


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "tokenizer"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "vocab.txt").write_bytes(b"a\nb\n" * 3000)
    (root / "run.sh").write_bytes(b"#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "nothing").touch()
    (root / "sub" / "merges é").write_bytes(b"m")
    (root / "link").symlink_to("sub/merges é")
    (root / "sub" / "up").symlink_to("../vocab.txt")
    (root / "dangling").symlink_to("later")
    return root


def tree(root):
    found = {}
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            key = os.path.relpath(path, root)
            if os.path.islink(path):
                found[key] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                found[key] = ("folder",)
            else:
                with open(path, "rb") as stream:
                    found[key] = ("file", stream.read(), stat.S_IMODE(os.stat(path).st_mode))
    return found


def test_a_folder_round_trips(folder, tmp_path):
    saved = save({"tok": Folder(folder)})
    assert "tok/vocab.txt" in saved.keys
    assert "tok/sub/merges é" in saved.keys
    loaded = load(saved)["tok"]
    assert sorted(loaded.names()) == sorted(
        ["dangling", "link", "nothing", "run.sh", "sub/merges é", "sub/up", "vocab.txt"]
    )
    assert loaded.write_to(tmp_path / "out") == tmp_path / "out"
    assert tree(tmp_path / "out") == tree(folder)
    assert save({"tok": loaded}).document == saved.document
    with pytest.raises(FileExistsError):
        loaded.write_to(tmp_path / "out")


def test_a_file_round_trips(folder, tmp_path):
    state = {"f": File(folder / "run.sh"), "empty": File(folder / "nothing"), "linked": File(folder / "link")}
    loaded = round_trip(state)
    assert loaded["f"].read_bytes() == b"#!/bin/sh\n"
    assert loaded["linked"].read_bytes() == b"m"
    path = loaded["f"].write_to(tmp_path / "new" / "place")
    assert path == tmp_path / "new" / "place" / "run.sh"
    assert os.access(path, os.X_OK)
    assert loaded["empty"].write_to(tmp_path).read_bytes() == b""
    with pytest.raises(FileExistsError):
        loaded["empty"].write_to(tmp_path)
    assert "run.sh" in repr(loaded["f"])


def test_links_that_lead_out_become_files(folder, tmp_path):
    (tmp_path / "blob").write_bytes(b"content")
    (folder / "outside").symlink_to("../blob")
    (folder / "absolute").symlink_to(tmp_path / "blob")
    saved = save({"tok": Folder(folder)})
    assert sum("leads out" in note for note in saved.notes) == 2
    load(saved)["tok"].write_to(tmp_path / "out")
    assert (tmp_path / "out" / "outside").read_bytes() == b"content"
    assert not (tmp_path / "out" / "absolute").is_symlink()
    (folder / "etc").symlink_to("/etc")
    with pytest.raises(UnsupportedValue, match="etc"):
        save({"tok": Folder(folder)})


def test_special_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedValue, match="pipe"):
        save({"tok": Folder(tmp_path)})
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]"):
        save({"x": File(tmp_path / "pipe")})
    with pytest.raises(FileNotFoundError):
        save({"x": File(tmp_path / "absent")})


def test_an_existing_link_is_never_followed(folder, tmp_path):
    loaded = round_trip({"tok": Folder(folder)})["tok"]
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "sub").symlink_to(outside)
    with pytest.raises(OSError, match="sub"):
        loaded.write_to(out)
    assert not any(outside.iterdir())
    (out / "vocab.txt").unlink(missing_ok=True)


def hostile(entries: str) -> bytes:
    return f'{{"version":1,"root":{{"folder":{{"entries":[{entries}]}}}}}}'.encode()


EMPTY = '{"file":{"chunk":null,"mode":420}}'


@pytest.mark.parametrize(
    "entries",
    [
        f'["..",{EMPTY}]',
        f'[".",{EMPTY}]',
        f'["",{EMPTY}]',
        f'["a/b",{EMPTY}]',
        f'["/etc/passwd",{EMPTY}]',
        f'["a\\u0000b",{EMPTY}]',
        f'["{"x" * 256}",{EMPTY}]',
        f'["\\ud800\\ud800",{EMPTY}]',
        f"[5,{EMPTY}]",
        f'["a",{EMPTY}],["a",{EMPTY}]',
        '["a",5]',
        '["a",{"link":5}]',
        '["a",{"link":"/etc"}]',
        '["a",{"link":".."}]',
        '["a",{"link":""}]',
        '["a",{"link":"b/../.."}]',
        '["a",{"link":"a"}]',
        '["d",{"folder":{"entries":[["e",{"folder":{"entries":[["up",{"link":"../.."}]]}}]]}}],["m",{"link":"d/e/up/../x"}]',
        '["d",{"folder":{"entries":[["l",{"link":"../../x"}]]}}]',
        '["a",{"file":{"chunk":0,"mode":420}}]',
        '["a",{"file":{"chunk":null,"mode":"x"}}]',
        '["a",{"file":{"chunk":null}}]',
    ],
)
def test_hostile_folders_are_corrupt(entries):
    with pytest.raises(CorruptStore):
        plan_load(hostile(entries), NO_CHUNKS).finish()


def test_set_user_id_is_never_restored(tmp_path):
    document = hostile('["a",{"file":{"chunk":null,"mode":3565}}]')  # 0o6755
    plan_load(document, NO_CHUNKS).finish().write_to(tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o755


def test_deep_folders(tmp_path):
    inner = tmp_path / "root"
    for _ in range(105):
        inner = inner / "d"
    inner.mkdir(parents=True)
    with pytest.raises(UnsupportedValue, match="100 folders deep"):
        save({"x": Folder(tmp_path / "root")})
    entries = f'["a",{EMPTY}]'
    for _ in range(400):
        entries = f'["d",{{"folder":{{"entries":[{entries}]}}}}]'
    with pytest.raises(CorruptStore, match="deep"):
        plan_load(hostile(entries), NO_CHUNKS)


def test_loading_into_files(folder, tmp_path):
    saved = save({"tok": Folder(folder), "f": File(folder / "run.sh")})
    target = tmp_path / "settings.sh"
    target.write_bytes(b"old")
    report = bind(saved, {"tok": Folder(tmp_path / "new"), "f": File(target)})
    assert report.loaded == ("f", "tok")
    assert tree(tmp_path / "new") == tree(folder)
    assert target.read_bytes() == b"#!/bin/sh\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "settings.sh", "tokenizer"]
    with pytest.raises(KeyMismatch, match="not an empty folder"):
        bind(saved, {"tok": Folder(tmp_path / "new"), "f": File(target)})
    with pytest.raises(KeyMismatch, match="no place for a file"):
        bind(saved, {"tok": Folder(tmp_path / "new2"), "f": File(tmp_path / "absent" / "x")})
    assert not (tmp_path / "new2").exists()
