"""heat: which layers were hot, in what order, and how that has changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierload
from tests.cli.support import invoke, run, run_json
from tierload.engine import Store
from tierload.heat import HeatMeter


@pytest.fixture(scope="module")
def heated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store of three commits with heat at steps 2, 4 and 6, and one at step 8 without; the last meter's word."""
    path = tmp_path_factory.mktemp("heat") / "store"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    meter = HeatMeter(model, optimizer)
    with Store(path, mode="w") as store:
        for step in range(1, 7):
            optimizer.zero_grad()
            model(torch.randn(8, 4))[:, 0].square().sum().backward()
            optimizer.step()
            if step % 2 == 0:
                store.save({"net": model, "bare": torch.ones(3)}, step=step, heat=meter)
        scores = meter.scores()
        store.save({"net": model}, step=8)
    return path, scores


def test_layers_stand_in_the_order_of_their_use_with_the_means_of_their_parameters(heated: Any) -> None:
    path, scores = heated
    lines = run("heat", path, 6).splitlines()
    assert lines[0].split() == ["layer", "gradient", "radius", "locality", "heat", "use", "size"]
    assert [line.split()[0] for line in lines[1:4]] == ["net/0", "net/2", "net/3"]
    assert lines[1].split()[-3:] == ["0", "160", "B"]
    document = run_json("heat", path, 6)
    assert document["commit"]["step"] == 6
    assert document["history"] is None
    first = document["rows"][0]
    assert first == first | {"name": "net/0", "first_use": 0, "bytes": 160}
    assert first["heat"] == pytest.approx((scores["0.weight"].heat + scores["0.bias"].heat) / 2)
    for row in document["rows"]:
        assert row["gradient"] > 0
        assert 0 < row["locality"] <= 1


def test_parameters_the_hottest_first(heated: Any) -> None:
    path, scores = heated
    rows = run_json("heat", path, 6, "--by", "parameter", "--sort", "heat")["rows"]
    assert {row["name"]: row["heat"] for row in rows} == pytest.approx(
        {f"net/{name}": score.heat for name, score in scores.items()}
    )
    assert [row["heat"] for row in rows] == sorted((row["heat"] for row in rows), reverse=True)


def test_history_is_that_of_the_heads_line(heated: Any) -> None:
    path, _ = heated
    lines = run("heat", path, 4, "--history").splitlines()
    assert lines[0].split() == ["heat", "at", "step", "2", "4", "6"]
    assert lines[1].split()[0] == "net/0"
    history = run_json("heat", path, 6, "--history")["history"]
    assert [one["step"] for one in history] == [2, 4, 6]
    newest = {row["name"]: row["heat"] for row in run_json("heat", path, 6)["rows"]}
    assert history[-1]["heat"] == pytest.approx(newest)


def test_a_commit_without_heat_says_so(heated: Any) -> None:
    path, _ = heated
    assert "(step 8) has no heat: it was saved without a meter" in run("heat", path)
    assert run_json("heat", path)["rows"] is None


def test_what_cannot_be_drawn_is_refused(heated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = heated
    done = invoke("heat", path, 6, "--plot", tmp_path / "heat.txt")
    assert done.exit_code == 2
    assert "use one that ends with .png or .svg" in done.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("heat", path, 6, "--plot", tmp_path / "heat.svg")
    assert done.exit_code == 2
    assert "pip install 'tierload[plots]'" in done.output
    assert not [*tmp_path.iterdir()]


def test_a_picture_names_layers_and_steps(heated: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, _ = heated
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path))
        import matplotlib

        patch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
        run("heat", path, 6, "--plot", tmp_path / "heat.svg")
        run("heat", path, 6, "--plot", tmp_path / "heat.png")
    text = (tmp_path / "heat.svg").read_text()
    assert "net/2" in text
    assert "(step 6)" in text
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_tierload_commands_work_on_a_commit_with_heat(heated: Any, tmp_path: Path) -> None:
    path, _ = heated
    run("verify", path, "--full")
    run("diff", path, 2, 4)
    run("show", path, 4)
    run("export", path, "--step", 6, "--to", tmp_path / "weights.safetensors")
    again: Any = tierload.load(path, step=6)
    assert torch.equal(again["bare"], torch.ones(3))
