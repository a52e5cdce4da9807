"""Sparse, quantized and nested tensors, wrapper subclasses: into tensors that exist."""

from __future__ import annotations

import copy

import pytest
import torch
from alike import assert_alike, assert_compound, raw
from fake_engine import bind, load, save
from hypothesis import HealthCheck, given, settings
from odd_tensors import ODD, Outer, Scaled, examples
from test_state_compounds import assert_scaled, scaled

from tierload.errors import KeyMismatch, UnsupportedValue

pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantiz|nested|Sparse CSR|Sparse invariant)")]


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A live tensor of the same kind with other content."""
    if tensor.is_nested and tensor.layout is torch.strided:
        pieces = [torch.zeros_like(piece) for piece in tensor.detach().unbind()]
        return torch.nested.nested_tensor(pieces, dtype=tensor.dtype, layout=torch.strided)
    if tensor.is_nested:
        bare = tensor.detach()
        return torch.nested.nested_tensor_from_jagged(
            torch.zeros_like(bare._values), bare.offsets(), bare.lengths(), jagged_dim=bare._ragged_idx
        )
    if tensor.layout is torch.sparse_coo:
        bare = tensor.detach()
        shape = (bare.sparse_dim(), 0), (0, *bare._values().shape[1:])
        indices, values = torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape[1], dtype=tensor.dtype)
        return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True)
    return load(save(tensor.detach()))


@pytest.mark.parametrize("name", examples())
def test_each_form_is_loaded_in_place(name):
    tensor = examples()[name]
    live = other(tensor)
    target = {"w": live, "n": 1}
    report = bind(save({"w": tensor, "n": 2}), target)
    assert report.loaded == ("n", "w")
    assert target["w"] is live, "the same object"
    if isinstance(tensor, torch.nn.Parameter):
        tensor = tensor.detach()
    assert_alike(live, tensor)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ODD)
def test_any_of_them(tensor):
    live = other(tensor)
    bind(save([tensor]), [live])
    if not isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
        assert_compound(live, tensor)
    else:
        assert not live.requires_grad, "a target keeps what it says of gradients"
        assert_compound(live, load(save(tensor.detach())))


def test_more_elements_than_the_target_has():
    sparse = torch.nn.Parameter(torch.zeros(3, 3).to_sparse_csr())
    twin = torch.zeros(3, 3).to_sparse_csr()
    stored = torch.rand(3, 3).to_sparse_csr()
    target = {"a": sparse, "b": twin}
    bind(save({"a": torch.nn.Parameter(stored), "b": stored}), target)
    assert target["a"] is sparse
    assert sparse.requires_grad
    assert_alike(twin, stored)
    assert_alike(sparse.detach(), stored)


def test_two_live_tensors_for_one_that_is_stored():
    for name in ("coo", "quantized", "nested", "jagged"):
        tensor = examples()[name]
        target = [other(tensor), other(tensor)]
        bind(save([tensor, tensor]), target)
        assert_alike(target[0], tensor)
        assert_alike(target[1], tensor)
        live = other(tensor)
        bind(save([tensor, tensor]), [live, live])
        assert_alike(live, tensor)


def test_quantized_memory_is_filled_where_it_is():
    live = torch.quantize_per_tensor(torch.zeros(3, 4), 0.5, 0, torch.quint8)
    view = live.t()
    stored = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8)
    bind(save({"w": stored}), {"w": live})
    assert_alike(live, stored)
    assert view.int_repr().tolist() == stored.int_repr().t().tolist()


class Holder(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), fill).to_sparse())
        self.weight = torch.nn.Parameter(torch.full((3, 3), fill).to_sparse_csr())
        self.register_buffer("packed", torch.quantize_per_tensor(torch.full((4,), fill), 0.1, 0, torch.qint8))
        self.register_buffer(
            "lists", torch.nested.nested_tensor([torch.full((2, 2), fill), torch.ones(1, 2)], layout=torch.jagged)
        )
        self.register_buffer("scaled", scaled("x"))


@pytest.mark.parametrize("hooks", [False, True])
def test_a_module_of_them(hooks):
    model, target = Holder(2.0), Holder(0.0)
    model.scaled.inner.add_(1)
    lists = target.lists
    if hooks:
        target.register_load_state_dict_post_hook(lambda module, keys: None)
        del model.scaled, target.scaled, model.lists, target.lists, lists
        target.weight = torch.nn.Parameter(
            torch.full((3, 3), 7.0).to_sparse_csr()
        )  # torch itself takes no other number
    saved = save({"model": model})
    weight = target.weight
    report = bind(saved, {"model": target})
    assert set(report.loaded) == {f"model/{name}" for name in model.state_dict()}
    assert target.weight is weight
    for name, value in model.state_dict(keep_vars=True).items():
        got = target.state_dict(keep_vars=True)[name]
        (assert_scaled if isinstance(value, Scaled) else assert_alike)(got, value)
    if not hooks:
        assert target.lists is lists


def mismatches(stored, live, **options):
    with pytest.raises(KeyMismatch) as caught:
        bind(save({"w": stored, "x": torch.ones(1)}), {"w": live, "x": torch.zeros(1)}, **options)
    return caught.value


def test_mismatches_are_listed_by_key():
    found = examples()
    plain = torch.ones(4, 4)
    for name in found:
        assert mismatches(found[name], plain).dtypes == ("w",), name
        assert mismatches(plain, other(found[name])).dtypes == ("w",), name
    error = mismatches(found["csr"], found["csc"])
    assert error.dtypes == ("w",)
    assert "w: is a tensor of layout torch.sparse_csc in the target and a tensor of layout torch.sparse_csr" in str(
        error
    )
    assert mismatches(found["coo"], torch.zeros(5, 3).to_sparse()).shapes == ("w",)
    assert mismatches(found["coo"], torch.zeros(2, 3, dtype=torch.float64).to_sparse()).dtypes == ("w/~.values",)
    assert mismatches(found["hybrid"], torch.zeros(2, 2).to_sparse()).shapes == ("w/~.indices", "w/~.values")
    assert mismatches(found["bsr"], torch.eye(4).to_sparse_bsr((1, 1))).shapes == ("w/~.crow_indices", "w/~.values")
    assert mismatches(found["quantized"], found["channels"]).dtypes == ("w",)
    wide = torch.quantize_per_tensor(torch.zeros(9), 0.1, 0, torch.quint8)
    assert mismatches(found["quantized"], wide).shapes == ("w",)
    jagged = torch.nested.nested_tensor([torch.zeros(2, 9)], layout=torch.jagged)
    assert mismatches(found["jagged"], jagged).shapes == ("w/~.offsets", "w/~.values")
    assert mismatches(found["jagged"], other(found["nested"])).dtypes == ("w",)
    assert mismatches(torch.ones(2), torch.eye(2).to_sparse(), cast=True).dtypes == ("w",)


def test_what_matches_is_loaded_when_not_strict():
    live, x = torch.eye(4).to_sparse_csc(), torch.zeros(1)
    report = bind(save({"w": torch.ones(4, 4).to_sparse_csr(), "x": torch.ones(1)}), {"w": live, "x": x}, strict=False)
    assert (report.loaded, report.dtypes) == (("x",), ("w",))
    assert_alike(live, torch.eye(4).to_sparse_csc())
    assert x == 1


def test_a_subclass_is_filled_in_place_without_types():
    live, stored = scaled("x"), scaled("x")
    stored.inner.mul_(3), stored.scale.add_(1)
    inner, scale = live.inner, live.scale
    target = {"w": live, "nested": Outer(scaled(), torch.zeros(1)), "p": torch.nn.Parameter(scaled(), False)}
    state = {"w": stored, "nested": Outer(stored, torch.ones(1)), "p": torch.nn.Parameter(stored, False)}
    for one, many in ((state["nested"].inner, target["nested"].inner), (state["p"], target["p"])):
        one.label = many.label = "x"
    report = bind(save(state), target)
    assert report.loaded == ("nested", "p", "w")
    assert target["w"] is live
    assert live.inner is inner
    assert live.scale is scale
    for name in state:
        assert_scaled(target[name], state[name])


def test_a_context_that_two_share():
    """Then the document of the second refers to that of the first."""
    context = {"ref": 5, "list": [1, {"d": 2}], "self": {}}
    context["again"] = context["list"]
    state = {"n": [3], "a": scaled(context), "b": scaled(context), "c": scaled({"ref": 6})}
    assert save(state).document.count(b'{"ref":') >= 4
    own = copy.deepcopy(context)
    target = {"n": [0], "a": scaled(own), "b": scaled(copy.deepcopy(context)), "c": scaled({"ref": 6})}
    for name in "abc":
        target[name].inner.zero_()
    bind(save(state), target)
    assert all(target[name].inner.any() for name in "abc")
    target["b"].label["list"].append(0)
    with pytest.raises(KeyMismatch) as caught:
        bind(save(state), target)
    assert caught.value.dtypes == ("b",)


def test_a_subclass_that_differs_is_left_whole():
    assert mismatches(scaled("a"), scaled("b")).dtypes == ("w",)
    assert "context" in str(mismatches(scaled("a"), scaled("b")))
    assert mismatches(scaled(), scaled(cls=Outer)).dtypes == ("w",)
    wide = Scaled(torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(2))
    assert mismatches(scaled(), wide).shapes == ("w",)
    live = Scaled(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(5))
    error = mismatches(scaled(), live)
    assert error.shapes == ("w/~.scale",)
    report = bind(save({"w": scaled()}), {"w": live}, strict=False)
    assert report.loaded == ()
    assert not live.inner.any(), "no half of it"
    live = Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2))
    assert mismatches(scaled(), live).dtypes == ("w/~.inner",)


def test_in_an_optimizer():
    def make(value: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        state["packed"] = Scaled(torch.full((2, 2), value, dtype=torch.uint8), torch.ones(1))
        state["mask"] = torch.full((2, 2), float(value)).to_sparse()
        return model, optimizer

    model, optimizer = make(5)
    saved = save({"model": model, "optimizer": optimizer})
    assert "optimizer/state/model~1weight/~2" not in saved.keys
    target, live = make(0)
    packed = live.state[target.weight]["packed"]
    bind(saved, {"model": target, "optimizer": live})
    assert live.state[target.weight]["packed"] is packed
    assert packed.inner.tolist() == [[5, 5], [5, 5]]
    assert_alike(live.state[target.weight]["mask"], optimizer.state[model.weight]["mask"])
    fresh = torch.nn.Linear(2, 2)
    empty = torch.optim.Adam(fresh.parameters())
    with pytest.raises(KeyMismatch, match="types="):
        bind(saved, {"model": fresh, "optimizer": empty})
    bind(saved, {"model": fresh, "optimizer": empty}, types=[Scaled])
    assert type(empty.state[fresh.weight]["packed"]) is Scaled


def test_a_target_on_meta_is_named():
    live = torch.empty((2, 3), layout=torch.sparse_coo, device="meta")
    error = mismatches(examples()["coo"], live)
    assert error.missing == ("w",)


def test_a_target_that_no_store_fills():
    for stored in (torch.ones(3), examples()["coo"]):
        with pytest.raises((UnsupportedValue, KeyMismatch), match="w"):
            bind(save({"w": stored}), {"w": torch.ones(3).to_mkldnn()})


def test_empty_containers_take_them():
    target: dict[str, object] = {}
    state = {name: tensor for name, tensor in examples().items() if not isinstance(tensor, torch.nn.Parameter)}
    bind(save(state), target)
    assert_alike(target, state)
    assert raw(copy.deepcopy(target["coo"])._values()) == raw(state["coo"]._values())


def test_a_generator_goes_on():
    source = torch.Generator().manual_seed(7)
    torch.rand(5, generator=source)
    saved = save({"g": source, "again": source})
    want = torch.rand(9, generator=source)
    loaded = load(saved)
    assert type(loaded["g"]) is torch.Generator
    assert loaded["again"] is loaded["g"]
    assert torch.equal(torch.rand(9, generator=loaded["g"]), want)
    live = torch.Generator().manual_seed(1)
    target = {"g": live, "again": live}
    bind(saved, target)
    assert target["g"] is live
    assert torch.equal(torch.rand(9, generator=live), want)
