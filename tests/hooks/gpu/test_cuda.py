"""The hooks where parameters are on an accelerator: a resumed run is still the uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader

import tierload
from tests.hooks.interrupts import Interrupted
from tierload.hooks.dcp import Reader, Writer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS, LEFT_AT, WIDTH = 40, 23, 64


class Run:
    """A loop in half precision, with a scaler and dropout, whose random numbers are the device's. ``seed`` is that of
    the process."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        data = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(0))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 128), torch.nn.BatchNorm1d(128), torch.nn.Dropout(0.2), torch.nn.Linear(128, 1)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=7)
        self.loader = StatefulDataLoader(torch.utils.data.TensorDataset(data), batch_size=8, shuffle=True)

    def step(self, batch: torch.Tensor) -> str:
        with torch.autocast("cuda", torch.float16):
            loss = self.model(batch.cuda()).float().square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return f"{loss.item().hex()} {self.scaler.get_scale()}"


def session(path: Path, seed: int, *, leave_at: int = 0) -> dict[int, str]:
    run = Run(seed)
    told: dict[int, str] = {}
    with tierload.Session(
        path, every=5, model=run.model, optimizer=run.optimizer, scaler=run.scaler, loader=run.loader
    ) as going:
        batches = going.batches(run.loader)
        for step in going.steps(STEPS):
            told[step] = run.step(next(batches)[0])
            if step == leave_at:
                raise Interrupted
    return told


def test_a_session_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = session(tmp_path / "whole", seed=0)
    with pytest.raises(Interrupted):
        session(tmp_path / "run", seed=0, leave_at=LEFT_AT)
    rest = session(tmp_path / "run", seed=1)
    assert rest == {step: loss for step, loss in whole.items() if step > 20}


def test_transformers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.hooks.transformers.training import Fails, losses, make
    from tierload.hooks.transformers import resume

    more: dict[str, Any] = {"use_cpu": False, "eval_strategy": "no"}
    whole = make(tmp_path / "whole", store=tmp_path / "other", **more)
    resume(whole)
    assert next(whole.model.parameters()).is_cuda
    with pytest.raises(Interrupted):
        resume(make(tmp_path, store=tmp_path / "run", callbacks=(Fails(10),), **more))
    rest = make(tmp_path, store=tmp_path / "run", **more)
    resume(rest)
    assert losses(rest) == losses(whole)


@pytest.mark.parametrize("beside", [False, True])
def test_dcp_saves_and_loads_what_is_on_the_device(tmp_path: Path, beside: bool) -> None:
    run = Run(0)
    for _ in range(3):
        run.step(torch.randn(8, WIDTH))
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    expected = {name: tensor.clone() for name, tensor in model.items()}
    if beside:
        pending: Any = dcp.async_save(state, storage_writer=Writer(tmp_path / "store", step=3))
        run.step(torch.randn(8, WIDTH))  # what is saved is of the call
        pending.result()
    else:
        dcp.save(state, storage_writer=Writer(tmp_path / "store", step=3))
    other = Run(1)
    other.step(torch.randn(8, WIDTH))
    model, optimizer = get_state_dict(other.model, other.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, storage_reader=Reader(tmp_path / "store"))
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
    assert all(tensor.is_cuda for tensor in model.values())
    assert all(torch.equal(other.model.state_dict()[name], tensor) for name, tensor in expected.items())
    if not beside:
        moments = [entry["exp_avg"] for entry in run.optimizer.state.values()]
        assert all(map(torch.equal, moments, (entry["exp_avg"] for entry in other.optimizer.state.values())))
    with tierload.open(tmp_path / "store") as store:
        assert store.verify(full=True).ok
