"""Accesses as hooks see them: order, frequency, rows of tables and routed experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.heat.oracles import norms
from tierload.errors import InvalidRequest
from tierload.heat import HeatMeter
from tierload.heat.locality import Locality

HALF_LIVES = (1.0, 1.0)


class Routed(nn.Module):
    """A token table and experts, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.stacked = nn.Parameter(torch.ones(5, 4))

    def forward(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.table(tokens) * self.stacked[expert])


def test_the_order_of_a_step_gives_the_next_uses() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    locality = Locality(model, list(model.parameters()))
    locality.step(HALF_LIVES, norms(model))
    assert locality.next_uses() == {}
    for _ in range(2):
        model(torch.ones(1, 2))  # two passes of one step
    locality.step(HALF_LIVES, norms(model))
    assert locality.next_uses() == {0: 0, 1: 1, 2: 2}
    assert sorted(locality.values(), reverse=True) == locality.values()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_passes_do_not_change_the_order(reentrant: bool) -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    locality = Locality(model, list(model.parameters()))
    x = torch.ones(1, 2, requires_grad=True)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    x.sum().backward()
    locality.step(HALF_LIVES, norms(model))
    assert locality.next_uses() == {0: 0, 1: 1, 2: 2}


def test_passes_without_gradients_are_none_of_the_training() -> None:
    model = nn.Linear(2, 2)
    locality = Locality(model, list(model.parameters()))
    with torch.no_grad():
        model(torch.ones(1, 2))
    locality.step(HALF_LIVES, norms(model))
    assert locality.values() == [0, 0]


def test_what_is_used_more_often_and_more_recently_is_more_local() -> None:
    model = Routed()
    locality = Locality(model, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    for expert in (0, 0, 2, 2, 1, 1, 1):
        model(torch.tensor([1, 2]), expert)
        locality.step((1.0, 100.0), norms(model))
    values = dict(zip(names, locality.values(), strict=True))
    assert values["experts.1.weight"] > values["experts.2.weight"] > values["experts.0.weight"] > 0
    assert values["table.weight"] > values["experts.1.weight"]


def test_rows_of_an_embedding_are_counted() -> None:
    model = Routed()
    locality = Locality(model, list(model.parameters()))
    at = [name for name, _ in model.named_parameters()].index("table.weight")
    for tokens in ([1, 2], [2, 3]):
        model(torch.tensor([tokens]), 0)
        locality.step(HALF_LIVES, norms(model))
    rows = locality.rows(at)
    assert rows is not None
    assert rows.nonzero().flatten().tolist() == [1, 2, 3]
    assert rows[2] == 1
    assert rows[3] > rows[1]


def test_a_table_that_is_a_head_too_is_used_as_a_whole() -> None:
    table, head = nn.Embedding(6, 2), nn.Linear(2, 6, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    locality = Locality(model, list(model.parameters()))
    model(torch.tensor([3]))
    locality.step(HALF_LIVES, norms(model))
    rows = locality.rows(0)
    assert rows is not None
    assert rows.tolist() == [1] * 6


def test_chosen_experts_in_one_tensor_are_told_to_the_meter() -> None:
    model = Routed()
    meter = HeatMeter(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.tensor([1]), 1).sum().backward()
        meter.touch("stacked", torch.tensor([[1, 4], [4, 4]]))
        meter._optimizer.step()
    pages = meter.pages(page_bytes=16)["stacked"]
    assert [page.locality > 0 for page in pages] == [False, True, False, False, True]
    with pytest.raises(InvalidRequest, match="no parameter 'nothing'"):
        meter.touch("nothing", torch.tensor([0]))


def test_compiled_code_is_seen_by_its_gradients() -> None:
    model = nn.Linear(2, 2)
    locality = Locality(model, list(model.parameters()))
    model.weight.grad = torch.ones(2, 2)
    locality.step(HALF_LIVES, norms(model))
    assert locality.values() == [1, 0]


def test_a_gradient_of_zeros_is_no_use() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    meter = HeatMeter(model, optimizer, half_lives=(1, 1, 1))
    for used in (1, 0, 0, 0):
        optimizer.zero_grad(set_to_none=False)
        model[used](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    scores = meter.scores()
    assert scores["0.weight"].locality > scores["0.bias"].locality > scores["1.weight"].locality


def test_sparse_gradients_have_norms() -> None:
    model = nn.Embedding(8, 2, sparse=True)
    meter = HeatMeter(model, torch.optim.SparseAdam(model.parameters()))
    model(torch.tensor([1, 1, 5])).sum().backward()
    meter._optimizer.step()
    assert meter._gradients.average.mean().tolist() == [pytest.approx((2 * 2**2 + 2) ** 0.5)]


def test_its_state_goes_on() -> None:
    model = Routed()
    one = Locality(model, list(model.parameters()))
    model(torch.tensor([1, 2]), 0)
    one.step(HALF_LIVES, norms(model))
    state = copy.deepcopy(one.state_dict())
    one.remove()
    other = Locality(model, list(model.parameters()))
    other.load_state_dict(state)
    assert other.values() == one.values()
    other.step(HALF_LIVES, norms(model))
    one.step(HALF_LIVES, norms(model))
    assert other.values() == one.values()
