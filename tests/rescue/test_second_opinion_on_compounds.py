"""Tensors that are made of others, in real stores: the engine, the rescue reader, the commands and the exports."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tierload
from tests.rescue.keeper import Keeper
from tests.state.alike import assert_alike
from tests.state.odd_tensors import ODD, Outer, Scaled, examples
from tierload import Settings, rescue
from tierload.cli import app
from tierload.rescue.__main__ import main

pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantiz|nested|Sparse CSR|Sparse invariant)")]


def everything() -> dict[str, Any]:
    inner = Scaled(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.ones(2), {"a": [1, 2]})
    return {
        **examples(),
        "subclass": inner,
        "twice": Outer(Scaled(torch.ones(3), torch.ones(1)), torch.ones(1), (1, "x")),
        "generator": torch.Generator().manual_seed(3),
        "odd/key": {1: [torch.eye(2).to_sparse()]},
        "shell": torch.arange(8, dtype=torch.uint8).view(torch.int4)[::2],
        "plain": torch.arange(5000.0),
    }


def test_every_form(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store")
    state = everything()
    keeper.save(state)
    assert keeper.save(state).written_bytes == 0
    keeper.check()
    assert keeper.store.verify(full=True).ok
    infos = keeper.store.keys()
    keys = [info.key for info in infos]
    assert {"coo/~.indices", "twice/~.inner/~.inner", "odd~1key/#1/#0/~.values", "quantized/~.scale"} <= set(keys)
    loaded = tierload.load(keeper.path, types=[Scaled, Outer])
    for name, value in examples().items():
        assert_alike(loaded[name], state[name])
        assert loaded[name].dtype is value.dtype
    state["coo"]._values()[0] = 9
    state["quantized"] = torch.quantize_per_tensor(torch.ones(3, 5), 0.1, 4, torch.quint8)
    keeper.save(state)
    difference = keeper.store.diff(*[commit.id for commit in reversed(keeper.store.commits()[:2])])
    assert difference.added == difference.removed == ()
    assert difference.changed == ("coo/~.values", "quantized/~.int_repr", "quantized/~.zero_point")
    keeper.check()
    out = tmp_path / "out.safetensors"
    assert main([str(keeper.path), "--to", str(out)]) == 0
    with safetensors.safe_open(out, "pt") as file:
        assert set(keys) <= set(file.keys())
        assert torch.equal(file.get_tensor("coo/~.values"), state["coo"]._values())
    keeper.store.close()
    for command in (["show"], ["verify", "--full"], ["log"]):
        result = CliRunner().invoke(app, [command[0], str(keeper.path), *command[1:]])
        assert result.exit_code == 0, result.output


@given(several=st.lists(st.dictionaries(st.text(max_size=2), ODD, max_size=3), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_of_them(several: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(Path(folder) / "store", Settings(threads=1, pack_below_bytes=100, page_bytes=4096))
        for state in several:
            keeper.save(state)
            assert_alike(keeper.store.load(), state)
        keeper.check()
        assert keeper.store.verify(full=True).ok
        keeper.store.close()


def test_damage_to_one_part_is_named_by_its_key(tmp_path: Path) -> None:
    state = {"w": torch.sparse_coo_tensor(torch.arange(3000)[None], torch.randn(3000), (4000,)), "x": torch.ones(9)}
    tierload.save(state, tmp_path / "store", settings=Settings(compression="off", pack_below_bytes=0))
    (segment,) = (tmp_path / "store" / "seg").iterdir()
    data = bytearray(segment.read_bytes())
    at = data.index(state["w"]._values().numpy().tobytes())
    data[at + 100] ^= 1
    segment.write_bytes(data)
    with tierload.open(tmp_path / "store") as store:
        report = store.verify(full=True)
        assert not report.ok
        assert "w/~.values" in str(report)
        with pytest.raises(tierload.CorruptPage, match=r"w/~\.values"):
            store.load(commit=store.commits()[0])
    found = rescue.Report()
    assert "w/~.indices" in rescue.read(tmp_path / "store", commit=1, report=found)
    assert any("w/~.values" in problem for problem in found.problems)


def test_exports_hold_what_they_can_and_list_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = everything()
    tierload.save(state, tmp_path / "store")
    report = tierload.export_state(tmp_path / "store", tmp_path / "a.safetensors")
    left_out = dict(report.left_out)
    assert set(examples()) < set(left_out)
    assert left_out["csr"] == "safetensors does not take a tensor of layout torch.sparse_csr"
    assert "int4" in left_out["shell"]
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("subclass/inner"), state["subclass"].inner)
    report = tierload.export_state(tmp_path / "store", tmp_path / "a.pt")
    assert {key for key, _ in report.left_out} == {"shell", "generator", "no components"}
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    held = examples().keys() - {"no components"}
    for name in held:
        assert_alike(loaded[name], state[name])
    imported = tierload.import_state(tmp_path / "a.pt", tmp_path / "back")
    assert imported.tensors > len(held)
    back = tierload.load(tmp_path / "back")
    for name in held:
        assert_alike(back[name], state[name])
    monkeypatch.setattr("tierload.state.registry._REGISTERED", {})
    tierload.register_type(Scaled)
    report = tierload.export_state(tmp_path / "store", tmp_path / "b.pt", keys="subclass")
    assert "Scaled" in dict(report.left_out)["subclass"]
