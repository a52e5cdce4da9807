"""Radii of a model's parameters against its dense Hessians, exact and by differences, cold and warm."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.heat.oracles import Attentive, Fused, dense_radius, spearman
from tierload.errors import InvalidRequest
from tierload.heat.curvature import WARM_PRODUCTS, Curvature
from tierload.heat.isolation import undisturbed
from tierload.heat.lanczos import TOLERANCE
from tierload.heat.products import DoubleBackward, FiniteDifferences

WORDS = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[False, True], ids=["two tables", "tied"])
def model(request: pytest.FixtureRequest) -> Attentive:
    torch.manual_seed(0)
    return Attentive(tied=request.param)


def measured(model: nn.Module, closure: Callable[[], torch.Tensor], curvature: Curvature | None = None) -> dict:
    names = [name for name, _ in model.named_parameters()]
    curvature = curvature or Curvature(model, list(model.parameters()))
    found = curvature.measure(curvature.measurable(), closure, [1.0] * len(names))
    return {names[at]: radius for at, radius in found.items()}


def test_with_attention_radii_are_those_of_the_dense_hessians(model: Attentive) -> None:
    found = measured(model, lambda: model.loss(WORDS))
    model.eval()
    exact = {name: dense_radius(model, name, lambda one: one.loss(WORDS)) for name in found}
    for name, radius in found.items():
        assert radius.value == pytest.approx(exact[name], rel=TOLERANCE), name
    assert spearman([found[name].value for name in exact], [*exact.values()]) >= 0.97


def test_once_measured_a_radius_takes_three_products_at_most(model: Attentive) -> None:
    curvature = Curvature(model, list(model.parameters()))
    measured(model, lambda: model.loss(WORDS), curvature)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        model.loss(WORDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    warm = measured(model, lambda: model.loss(WORDS), curvature)
    cold = measured(model, lambda: model.loss(WORDS))
    assert max(radius.products for radius in warm.values()) <= WARM_PRODUCTS
    errors = [abs(radius.value / cold[name].value - 1) for name, radius in warm.items()]
    assert statistics.median(errors) <= TOLERANCE


def test_a_refresh_finds_a_direction_that_the_last_one_knew_nothing_of() -> None:
    scale = torch.tensor([4.0, *[0.1] * 30])
    model = nn.Linear(31, 1, bias=False)

    def closure() -> torch.Tensor:
        return (scale * model.weight.square()).sum() / 2

    curvature = Curvature(model, [model.weight])
    assert measured(model, closure, curvature)["weight"].value == pytest.approx(4, rel=TOLERANCE)
    scale = scale.flip(0) * 2
    for _ in range(2):
        found = measured(model, closure, curvature)["weight"]
    assert found.value == pytest.approx(8, rel=TOLERANCE)


def test_differences_are_near_the_exact_products(model: Attentive) -> None:
    parameters = list(model.parameters())
    with undisturbed(model), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = DoubleBackward(lambda: model.loss(WORDS), model, parameters)
        near = FiniteDifferences(lambda: model.loss(WORDS), model, parameters)
        for at, parameter in enumerate(parameters):
            vector = nn.functional.normalize(torch.randn(parameter.numel()), dim=0)
            (product,), (difference,) = exact.products({at: vector}), near.products({at: vector})
            assert torch.linalg.vector_norm(difference - product) <= 1e-2 * product.norm() + 1e-5


def test_exact_products_are_symmetric(model: Attentive) -> None:
    parameters = list(model.parameters())
    with undisturbed(model), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        products = DoubleBackward(lambda: model.loss(WORDS), model, parameters)
        for at, parameter in enumerate(parameters):
            one, other = torch.randn(2, parameter.numel())
            left, right = one @ products.products({at: other})[0], other @ products.products({at: one})[0]
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_differentiated_twice_is_measured_by_differences() -> None:
    torch.manual_seed(0)
    fused, x = Fused(), torch.randn(16, 4)
    plain = Fused(fused=False)
    plain.load_state_dict(fused.state_dict())
    curvature = Curvature(fused, list(fused.parameters()))
    found = measured(fused, lambda: fused(x).square().mean(), curvature)
    assert curvature.method == "finite differences"
    for name, radius in found.items():
        exact = dense_radius(plain, name, lambda model: model(x).square().mean())
        assert radius.value == pytest.approx(exact, rel=TOLERANCE), name


def test_differences_leave_the_parameters_where_they_are() -> None:
    model, x = Fused(), torch.randn(16, 4)
    before = [(parameter, parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    copies = copy.deepcopy(model.state_dict())
    measured(model, lambda: model(x).square().mean())
    assert before == [(parameter, parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    assert all(torch.equal(copies[name], value) for name, value in model.state_dict().items())


def test_recurrent_layers_are_measured_by_differences_too() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    parameters = list(model.parameters())
    exact = measured(model, lambda: model(x)[0].square().mean())
    with undisturbed(model):
        products = FiniteDifferences(lambda: model(x)[0].square().mean(), model, parameters)
        along = nn.functional.normalize(torch.ones(parameters[0].numel()), dim=0)
        assert float(products.products({0: along})[0].norm()) > 0
    assert all(radius.value > 0 for radius in exact.values())
    assert all(flat is own for flat, own in zip(model._flat_weights, parameters, strict=True))


def test_in_half_precision_differences_are_refused() -> None:
    model, x = Fused().to(torch.bfloat16), torch.randn(16, 4, dtype=torch.bfloat16)
    products = FiniteDifferences(lambda: model(x).square().mean(), model, list(model.parameters()))
    with pytest.raises(InvalidRequest, match="say nothing in"):
        products.products({0: torch.ones(20)})


def test_in_half_precision_exact_products_serve() -> None:
    torch.manual_seed(0)
    model, x = Fused(fused=False), torch.randn(16, 4)
    half = copy.deepcopy(model).to(torch.bfloat16)
    full = measured(model, lambda: model(x).square().mean())
    found = measured(half, lambda: half(x.to(torch.bfloat16)).square().mean())
    assert all(radius.value == pytest.approx(full[name].value, rel=0.2) for name, radius in found.items())


def test_frozen_and_unused_parameters_and_a_linear_loss() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    found = measured(model, lambda: model["used"](torch.ones(1, 3)).sum())
    assert set(found) == {"used.weight", "used.bias", "unused.weight", "unused.bias"}
    assert all(radius.value == 0 for radius in found.values())


def test_between_measurements_radii_follow_the_share_of_the_proxy() -> None:
    model = nn.Linear(2, 2)
    curvature = Curvature(model, [model.weight, model.bias])
    assert curvature.radii([3.0, 1.0]) == [0.75, 0.25]
    curvature.measure([0], lambda: model(torch.eye(2)).square().sum(), [1.0, 1.0])
    assert curvature.radii([1.0, 1.0])[0] == pytest.approx(2, rel=TOLERANCE)
    assert curvature.radii([8.0, 8.0]) == curvature.radii([1.0, 1.0])  # what all have in common plays no part
    weight, bias = curvature.radii([3.0, 1.0])
    assert weight == pytest.approx(3, rel=TOLERANCE)
    assert bias == pytest.approx(1, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda loss: loss.item(), "returned float"),
        (lambda loss: loss.detach(), "depends on the parameters"),
        (lambda loss: loss.expand(3), "shape"),
        (lambda loss: loss.backward() or loss, "called backward"),
    ],
)
def test_closures_that_return_no_loss_are_told(spoil: Callable, said: str) -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = kept = torch.ones(2, 2)
    with pytest.raises(InvalidRequest, match=said):
        measured(model, lambda: spoil(model(torch.eye(2)).square().sum()))
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 2))
    assert model.bias.grad is None


def test_a_loss_that_is_no_number_changes_nothing_that_was_known() -> None:
    model = nn.Linear(2, 2)
    curvature = Curvature(model, [model.weight])
    curvature.measure([0], lambda: model(torch.eye(2)).square().sum(), [1.0])
    known = curvature.radii([1.0])
    curvature.measure([0], lambda: model(torch.eye(2) * torch.nan).square().sum(), [1.0])
    assert curvature.radii([1.0]) == known
