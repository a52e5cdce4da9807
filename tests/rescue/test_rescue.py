"""The rescue reader against stores that tests/rescue/builder.py writes by hand."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from tests.rescue.builder import CONST, LZ4, RAW, SHELLS, ZSTD, Builder, Chunk, array, crc, encode, planes, tensor
from tests.rescue.support import BIAS, RNG, STEPS, WEIGHT, file_of, numpy_of, simple, value
from tierload import rescue
from tierload.rescue.__main__ import main
from tierload.rescue.catalog import open_catalog
from tierload.rescue.digests import crc32c
from tierload.rescue.manifest import SIZES
from tierload.rescue.pages import decode_planes


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- checksums


def test_the_crc_is_the_one_of_rfc_3720_and_continues() -> None:
    assert crc32c(b"123456789") == crc(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc32c(b"") == 0


# -- pages


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    "kinds", [[RAW] * 4, [LZ4] * 4, [ZSTD] * 4, [RAW, LZ4, ZSTD, LZ4], [ZSTD, LZ4], [LZ4] * 8], ids=str
)
def test_planes(kinds: list[int], rotate: bool) -> None:
    raw = RNG.standard_normal(100_000).astype(np.float64).tobytes()
    assert decode_planes(planes(raw, len(kinds), kinds, rotate), len(raw), len(kinds)) == raw


def test_a_plane_of_several_frames_and_constant_planes() -> None:
    raw = np.arange(300_000, dtype=np.uint16).tobytes()
    assert decode_planes(planes(raw, 2, [LZ4, ZSTD]), len(raw), 2) == raw
    raw = np.full(1000, 0x40490000, np.uint32).tobytes()
    for rotate in (False, True):
        assert decode_planes(planes(raw, 4, [CONST] * 4, rotate), len(raw), 4) == raw
    assert decode_planes(planes(b"x" * 77, 1, [CONST]), 77, 1) == b"x" * 77


# -- a whole state


def test_tensors_come_back_as_they_were(store: Path) -> None:
    builder = Builder(store)
    chunks = {
        "raw": array(WEIGHT),
        "planes": array(WEIGHT * 2, kinds=[RAW, ZSTD, LZ4, ZSTD], rotate=True),
        "steps": array(STEPS, kinds=[LZ4, LZ4, CONST, CONST, CONST, CONST, CONST, CONST]),
        "small/1": array(BIAS, pack="p"),
        "small/2": array(BIAS[:7], pack="p"),
        "empty": array(np.empty((0, 5), np.float16)),
        "scalar": array(np.array(2.5)),
    }
    root = {
        "d": {
            "raw": tensor("raw", [300, 200], tie=0),
            "planes": tensor("planes", [300, 200]),
            "steps": tensor("steps", [20000]),
            "small": {"d": {"1": tensor("small/1", [50]), "2": tensor("small/2", [7])}},
            "empty": tensor("empty", [0, 5]),
            "scalar": tensor("scalar", []),
        }
    }
    views = {
        "tied": tensor("raw", [300, 200], tie=0),
        "turned": tensor("raw", [200, 300], stride=[1, 200], offset=0),
        "column": tensor("raw", [300], stride=[200], offset=199),
        "wide": tensor("raw", [4, 3], stride=[0, 1], offset=5),
        "bits": tensor("raw", [300, 200], dtype="int32"),
        "bytes": tensor("raw", [3], dtype="uint8", stride=[4], offset=3),
        "minus": tensor("raw", [300, 200], neg=True),
        "less": tensor("small/1", [50], neg=True),
    }
    root["d"]["v"] = {"d": views}
    builder.commit(chunks, root)
    found = rescue.read(store)
    expected: dict[str, np.ndarray[Any, Any]] = {
        "raw": WEIGHT,
        "planes": WEIGHT * 2,
        "steps": STEPS,
        "small/1": BIAS,
        "small/2": BIAS[:7],
        "empty": np.empty((0, 5), np.float16),
        "scalar": np.array(2.5),
        "v/tied": WEIGHT,
        "v/turned": WEIGHT.T,
        "v/column": WEIGHT[:, 199],
        "v/wide": np.broadcast_to(WEIGHT.ravel()[5:8], (4, 3)),
        "v/bits": WEIGHT.view(np.int32),
        "v/bytes": WEIGHT.view(np.uint8).ravel()[3:15:4],
        "v/minus": -WEIGHT,
        "v/less": -BIAS,
    }
    assert set(found) == set(expected)
    for key, array_of in expected.items():
        assert numpy_of(found[key]).dtype == array_of.dtype, key
        np.testing.assert_array_equal(numpy_of(found[key]), array_of, err_msg=key)


def test_complex_views(store: Path) -> None:
    numbers = (RNG.standard_normal(64) + 1j * RNG.standard_normal(64)).astype(np.complex64)
    root = [
        tensor("#0", [64]),
        tensor("#0", [64], conj=True),
        tensor("#0", [64], conj=True, neg=True),
        tensor("#0", [64], dtype="float32", stride=[2], offset=1, neg=True),
    ]
    Builder(store).commit({"#0": array(numbers)}, root)
    found = [numpy_of(tensor) for _, tensor in sorted(rescue.read(store).items())]
    for got, wanted in zip(found, [numbers, numbers.conj(), -numbers.conj(), -numbers.imag], strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_keys(store: Path) -> None:
    leaf = Chunk("uint8", (1,), b"\1")
    names = {
        "a~1b": "a/b",
        "a~0b": "a~b",
        "~2x": "#x",
        "x#": "x#",
        "~3": "",
        "1": "1",
        "\udc80": "\udc80",
        "__metadata__": "__metadata__",
    }
    chunks = dict.fromkeys(names, leaf)
    root: dict[str, Any] = {name: tensor(key, [1]) for key, name in names.items()}

    def put(name: str, value: Any, *keys: str) -> None:
        root[name] = value
        chunks.update(dict.fromkeys(keys, leaf))

    pairs = [
        [1, tensor("map/#1", [1])],
        ["1", tensor("map/1", [1])],
        [None, tensor("map/#None", [1])],
        [{"tuple": [1, "a/b"]}, tensor("map/#(1, 'a~1b')", [1])],
        [{"tuple": [{"int": "-0x10000000000000000"}]}, tensor("map/#(-0x10000000000000000,)", [1])],
        [2.5, tensor("map/#2.5", [1])],
        [True, tensor("map/#True", [1])],
        [{"bytes": "YQ=="}, tensor("map/#b'a'", [1])],
        [{"int": "0x8000000000000000"}, tensor("map/#0x8000000000000000", [1])],
        [{"float": "nan:fff8000000000001"}, tensor("map/#nan", [1])],
        [{"complex": [1, {"float": "-inf"}]}, tensor("map/#(1-infj)", [1])],
        [{"text": "7aC97biA"}, tensor("map/\ud83d\ude00", [1])],
        [{"tuple": ["ä", {"text": "7aC97biA"}]}, tensor("map/#('\\xe4', '\\ud83d\\ude00')", [1])],
        [{"date": "2024-01-01"}, tensor('map/#{"date":"2024-01-01"}', [1])],
        [{"tuple": [1, {"frozenset": []}]}, tensor('map/#{"tuple":[1,{"frozenset":[]}]}', [1])],
    ]
    put("map", {"map": pairs}, *(pair[1]["t"]["chunk"] for pair in pairs))
    put("list", [None, [tensor("list/#1/#0", [1])]], "list/#1/#0")
    put("tuple", {"tuple": [tensor("tuple/#0", [1])]}, "tuple/#0")
    put("deque", {"deque": {"items": [tensor("deque/#0", [1])], "maxlen": 3}}, "deque/#0")
    put("ddict", {"ddict": {"items": [["k", tensor("ddict/k", [1])]], "factory": "list"}}, "ddict/k")
    put("named", {"named": {"type": "m:N", "fields": [["f", tensor("named/f", [1])]]}}, "named/f")
    put("object", {"object": {"type": "m:N", "state": {"d": {"f": tensor("object/f", [1])}}}}, "object/f")
    put("rng", {"rng": {"kind": "torch", "state": tensor("rng", [1])}}, "rng")
    put("blob", {"blob": {"chunk": "blob", "as": "bytes"}}, "blob")
    put("nd", {"ndarray": {"chunk": "nd", "dtype": "|S1", "shape": [1], "order": "C"}}, "nd")
    folder = {"entries": [["a.txt", {"file": {"chunk": "folder/a.txt", "mode": 420}}], ["l", {"link": "a.txt"}]]}
    put("folder", {"folder": folder}, "folder/a.txt")
    put("nothing", {"file": {"chunk": None, "mode": 420}})
    put(
        "plain",
        {"d": {"a": {"ref": 1}, "b": {"float": "nan"}, "c": {"slice": [1, None, 2]}, "e": {"date": "2024-01-01"}}},
    )
    pair = "sd/\ud83d\ude00"  # two lone surrogates, which JSON would read back as one character
    put("sd", {"statedict": {"items": [[{"text": "7aC97biA"}, tensor(pair, [1])]], "metadata": {"d": {}}}}, pair)
    optimizer = {
        "names": ["net/w", None],
        "groups": [{"d": {"lr": tensor("opt/param_groups/#0/lr", [1]), "params": [0, 1]}}],
        "state": [
            [0, {"d": {"m": tensor("opt/state/net~1w/m", [1])}}],
            [1, {"d": {"m": tensor("opt/state/#1/m", [1])}}],
            ["k", {"d": {"m": tensor("opt/state/k/m", [1])}}],
        ],
        "rest": {"d": {"extra": tensor("opt/extra", [1])}},
    }
    keys = ["opt/param_groups/#0/lr", "opt/state/net~1w/m", "opt/state/#1/m", "opt/state/k/m", "opt/extra"]
    put("opt", {"object": {"type": "torch.optim:Adam", "optimizer": optimizer}}, *keys)
    Builder(store).commit(chunks, {"d": root})
    assert set(rescue.read(store)) == set(chunks)
    assert main([str(store), "--to", str(store / "out.safetensors")]) == 0
    renamed = {"\udc80": "~udc80", "__metadata__": "~__metadata__"}
    renamed |= {f"{holder}/\ud83d\ude00": f"{holder}/~ud83d~ude00" for holder in ("sd", "map")}
    assert set(file_of(store / "out.safetensors")) == {renamed.get(key, key) for key in chunks}


def test_a_deep_state(store: Path) -> None:
    key = "/".join(["a"] * 500)
    document = (
        '{"version": 1, "root": ' + '{"odict": [["a", ' * 500 + '{"t": {"chunk": 0, "shape": [50]}}' + "]]}" * 500 + "}"
    )
    Builder(store).commit({key: array(BIAS)}, None, document=document)
    before = sys.getrecursionlimit()
    assert set(rescue.read(store)) == {key}
    assert sys.getrecursionlimit() == before


def test_a_tensor_as_the_whole_state_and_a_shared_chunk_has_its_first_key(store: Path) -> None:
    builder = Builder(store)
    builder.commit({"": array(BIAS)}, tensor("", [50]))
    np.testing.assert_array_equal(numpy_of(rescue.read(store)[""]), BIAS)
    builder.commit({"x": array(BIAS)}, {"d": {"x": tensor("x", [50]), "a": tensor("x", [50])}})
    with pytest.raises(rescue.Damage, match="'x' in the manifest"):
        rescue.read(store)


def test_what_no_document_names_is_read_by_its_own_key(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    builder.commit({"a": array(BIAS), "b": array(STEPS)}, {"d": {"a": tensor("a", [50])}})
    assert set(rescue.read(store)) == {"a", "b"}
    builder.commit({"a": array(BIAS)}, None, document='{"version": 9}')
    report = rescue.Report()
    assert set(rescue.read(store, report=report)) == {"a"}
    assert "version 9" in report.problems[0]
    builder.commit({"a": array(BIAS)}, {"d": {"a": {"new": tensor("a", [50])}}})
    report = rescue.Report()
    assert set(rescue.read(store, report=report)) == {"a"}
    assert "unknown tag 'new'" in report.problems[0]


# -- commits


def test_commits_are_listed_and_chosen(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    first = simple(builder, 10, step=100, meta={"metrics": {"d": {"loss": 1.5}}, "note": "ä"})
    second = simple(builder, 20, step=200)
    back = builder.rollback(first)
    third = simple(builder, 30, step=200, parent=back)
    builder.tag("best", first)
    builder.tag("gone", second)
    builder.tag("gone", 0)
    builder.tag("now", second)
    builder.tag("now", third)
    found = rescue.commits(store)
    assert [(c.txid, c.parent, c.source, c.step, c.tags) for c in found] == [
        (first, 0, 0, 100, ["best"]),
        (second, first, 0, 200, []),
        (back, first, first, None, []),
        (third, back, 0, 200, ["now"]),
    ]
    assert json.loads(found[0].meta) == {"metrics": {"d": {"loss": 1.5}}, "note": "ä"}
    assert found[0].lsn == 2
    assert value(store) == value(store, tag="now") == value(store, step=200) == value(store, commit=third) == 30
    assert value(store, commit=back) == value(store, tag="best") == value(store, step=100) == 10
    assert value(store, commit=found[1].id[:8]) == value(store, commit=str(second)) == 20
    assert value(store, step=100) == 10
    left = simple(builder, 40, step=400)
    simple(builder, 50, step=200)  # newer, but not on the line of the head
    builder.rollback(third)
    assert value(store, step=200) == value(store) == 30
    assert value(store, step=400) == value(store, commit=left) == 40  # left behind, and still there
    which: dict[str, Any]
    for which in ({"tag": "gone"}, {"step": 300}, {"commit": "beef" * 8}, {"commit": 1000}):
        with pytest.raises(rescue.Refused, match="no such commit"):
            rescue.read(store, **which)
    assert main([str(store), "--list"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:4] == ["1", found[0].id, "100", str(found[0].raw_bytes)]
    assert (lines[1][5], lines[2][5], lines[3][2]) == ("'best'", "-", "-")


def test_rolled_and_reopened_journals_and_collected_commits(store: Path) -> None:
    builder = Builder(store)
    first, second = simple(builder, 1), simple(builder, 2)
    builder.record(3, builder.change("key", b'{"value": 1, "step": 5}'))
    builder.tag("keep", second)
    builder.roll()
    simple(builder, 3, changes={"key": b'{"value": 2, "step": 6}', "\udc80": b"null"})
    builder.collect(first)
    builder.roll(epoch=2)
    builder.super(3, (2, 0))
    simple(builder, 4, changes={"\udc80": None})
    assert [(c.txid, c.tags) for c in rescue.commits(store)] == [(2, ["keep"]), (3, []), (4, [])]
    assert [value(store, commit=n) for n in (2, 3, 4)] == [2, 3, 4]
    assert open_catalog(store, rescue.Report()).values == {"key": b'{"value": 2, "step": 6}'}


def test_pages_of_the_parent_are_shared(store: Path) -> None:
    builder = Builder(store)
    builder.commit({"w": array(WEIGHT)}, tensor("w", [300, 200]), document='{"version": 1, "root": null}')
    changed = WEIGHT.copy()
    changed[0] += 1
    builder.roll(epoch=5)
    builder.commit({"w": array(changed)}, {"d": {"w": tensor("w", [300, 200])}})
    assert [path.stat().st_size for path in sorted((store / "seg").iterdir())] == [59 * 4096, 64 << 10]
    np.testing.assert_array_equal(numpy_of(rescue.read(store, commit=1)["w"]), WEIGHT)
    np.testing.assert_array_equal(numpy_of(rescue.read(store)["w"]), changed)


# -- the command


def test_the_file_that_is_written(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(store)
    sizes = SIZES
    chunks = {name: Chunk(name, (2, 3), RNG.bytes(6 * size)) for name, size in sizes.items()}
    chunks["scalar4"] = Chunk("float4_e2m1fn_x2", (), b"\x12")
    chunks["blob"] = Chunk("uint8", (5,), b"bytes")
    root: dict[str, Any] = {key: tensor(key, chunk.sizes) for key, chunk in chunks.items()}
    root |= {"blob": {"blob": {"chunk": "blob", "as": "bytes"}}, "text": "\ud800ä", "n": {"int": "0x" + "f" * 40}}
    builder.commit(chunks, {"d": root}, step=3, meta={"note": "n"}, changes={"k": b'{"value": 1, "step": 3}'})
    builder.tag("t", 1)
    out = store.with_name("out.safetensors")
    old = os.umask(0o027)
    try:
        assert main([str(store), "--tag", "t", "--to", str(out)]) == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert [path.name for path in store.parent.iterdir() if path.is_file()] == ["out.safetensors"]
    found = file_of(out)
    raw = {"complex32", "complex64", "complex128", "scalar4", *SHELLS}
    for key, chunk in chunks.items():
        assert bytes(found[key]["data"]) == chunk.data
        if key in raw:
            assert (found[key]["dtype"], found[key]["shape"]) == ("U8", [len(chunk.data)])
    codes = {key: found[key]["dtype"] for key in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "bool", "blob")}
    assert codes == {
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e8m0fnu": "F8_E8M0",
        "bool": "BOOL",
        "blob": "U8",
    }
    assert found["float32"]["shape"] == [2, 3]
    with safetensors.safe_open(out, "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tierload.raw"])["complex64"] == {"dtype": "complex64", "shape": [2, 3]}
    assert set(json.loads(metadata["tierload.raw"])) == raw
    state = json.loads(metadata["tierload.state"])["root"]["d"]
    assert (state["text"], int(state["n"]["int"], 16)) == ("\ud800ä", int("f" * 40, 16))
    assert json.loads(metadata["tierload.meta"]) == {"note": "n"}
    assert json.loads(metadata["tierload.values"]) == {"k": '{"value": 1, "step": 3}'}
    facts = json.loads(metadata["tierload.commit"])
    assert (facts["txid"], facts["step"], facts["tags"]) == (1, 3, ["t"])
    errors = capsys.readouterr().err
    assert "'complex64': complex64[2, 3] is held as raw uint8" in errors
    torch = pytest.importorskip("safetensors.torch")
    assert torch.load_file(out)["bfloat16"].shape == (2, 3)


def test_usage_and_failures(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(store)], [str(store), "--list", "--to", "x"], [str(store), "--step", "x", "--to", "y"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert main([str(store), "--list"]) == 2
    builder = Builder(store)
    assert main([str(store), "--list"]) == 0
    assert main([str(store), "--to", str(store / "x")]) == 2
    simple(builder, 1)
    assert main([str(store), "--to", str(store / "missing" / "x")]) == 2
    assert main([str(store), "--step", "1", "--to", str(store / "x")]) == 2
    (store / "x").mkdir()
    assert main([str(store), "--to", str(store / "x")]) == 2
    assert not list(store.glob(".x*"))
    os.mkfifo(store / "seg" / "pipe")
    os.replace(store / "seg" / "pipe", store / "seg/00000001-000000000001.r0000.0000")
    assert main([str(store), "--to", str(store / "y")]) == 1


def test_it_runs_by_name_and_as_a_copied_folder_without_tierload_and_torch(store: Path, tmp_path: Path) -> None:
    simple(Builder(store), 5)
    folder = Path(rescue.__file__).parent
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy / "rescue", ignore=shutil.ignore_patterns("__pycache__"))
    ask = "import runpy, sys\ntry: runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\nfinally: "
    for name, root in (("rescue", copy), ("tierload.rescue", folder.parents[1])):
        out = tmp_path / f"{name}.safetensors"
        env = os.environ | {"PYTHONPATH": str(root)}
        more: dict[str, Any] = {"cwd": root, "env": env, "capture_output": True, "text": True, "check": False}
        result = subprocess.run([sys.executable, "-s", "-m", name, str(store), "--to", str(out)], **more)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert set(file_of(out)) == {"a", "b"}
        command = [sys.executable, "-s", "-c", ask + "print(*sys.modules)", name, str(store), "--list"]
        result = subprocess.run(command, **more)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[1].startswith("1\t")
        loaded = {module.partition(".")[0] for module in result.stdout.splitlines()[-1].split()}
        assert {"torch", "tierload", "rescue"} & loaded == {name.partition(".")[0]}


def test_its_imports_are_relative_or_foreign() -> None:
    for path in Path(rescue.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & {"torch", "tierload"}, path
            assert not isinstance(node, ast.ImportFrom) or node.level < 2, path


def test_the_builder_sorts_keys_as_the_format_does() -> None:
    assert sorted(["b", "a", "\U00010000", "\udc80", "\uffff"], key=encode) == [
        "a",
        "b",
        "\udc80",
        "\uffff",
        "\U00010000",
    ]
