"""Sparse, quantized and nested tensors, wrapper subclasses: out of a state and back, as new tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys

import hypothesis.strategies as st
import pytest
import torch
from alike import assert_alike, raw
from fake_engine import bind, load, save, stored
from hypothesis import HealthCheck, given, settings
from odd_tensors import ODD, Outer, Scaled, examples, wrapped

from tierload.errors import CorruptStore, KeyMismatch, TierloadError, UnsupportedValue
from tierload.state import flatten, register_type

pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantiz|nested|Sparse CSR|Sparse invariant)")]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=3), ODD, min_size=1, max_size=4))
def test_any_of_them_comes_back(state):
    saved = save(state)
    assert_alike(load(saved), state)
    assert save(load(saved)).data == saved.data


@pytest.mark.parametrize("name", examples())
def test_each_form(name):
    tensor = examples()[name]
    saved = save({"a": {"b": tensor}, "list": [tensor, torch.ones(2)]})
    assert all(key.startswith(("a/b/~.", "list/#1")) for key in saved.keys), saved.keys
    loaded = load(saved)
    assert_alike(loaded["a"]["b"], tensor)
    assert loaded["list"][0] is loaded["a"]["b"], "one object stays one"
    assert_alike(load(save(tensor)), tensor)


def test_keys_collide_with_no_others():
    sparse = torch.eye(2).to_sparse()
    state = {"w": sparse, "w/~.values": torch.ones(1), "x": {"~.values": torch.ones(2), ".values": torch.ones(3)}}
    saved = save(state)
    assert saved.keys == ["w/~.indices", "w/~.values", "w~1~0.values", "x/.values", "x/~0.values"]
    assert_alike(load(saved), state)
    assert_alike(load(saved, keys=["w"])["w"], sparse)
    assert list(load(saved, keys=["x"])) == ["x"]
    with pytest.raises(KeyMismatch):
        load(saved, keys=["w/~.values"])


def test_parts_keep_their_ties():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2), (3,))
    twin = torch.sparse_coo_tensor(sparse._indices(), torch.randn(2), (3,))
    csr = torch.eye(3).to_sparse_csr()
    other = torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), torch.randn(3), (3, 3))
    base = torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 0, torch.qint8)
    state = {
        "a": sparse,
        "b": twin,
        "values": sparse._values(),
        "csr": csr,
        "other": other,
        "rows": base[1:],
        "base": base,
        "column": base.t(),
    }
    saved = save(state)
    loaded = load(saved)
    assert_alike(loaded, state)
    assert loaded["a"]._indices().data_ptr() == loaded["b"]._indices().data_ptr()
    assert loaded["a"]._values().data_ptr() == loaded["values"].data_ptr()
    assert loaded["csr"].crow_indices().data_ptr() == loaded["other"].crow_indices().data_ptr()
    assert loaded["base"].data_ptr() == loaded["column"].data_ptr() == loaded["rows"].data_ptr() - 6
    assert loaded["column"].stride() == (1, 6)
    loaded["values"][0] = 7
    assert loaded["a"]._values()[0] == 7


def test_lists_of_one_length_can_be_added_again():
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    loaded = load(save({"a": jagged, "b": jagged * 2}))
    assert (loaded["a"] + loaded["b"]).values().sum() == 27, "the two share their offsets, so torch knows they fit"


def test_a_flag_that_is_wrong_is_kept():
    flagged = torch.sparse_coo_tensor(torch.tensor([[1, 0]]), torch.ones(2), (3,))._coalesced_(True)
    assert load(save(flagged)).is_coalesced()
    assert not load(save(torch.eye(3).to_sparse()._coalesced_(False))).is_coalesced()


def test_a_view_of_a_nested_tensor():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.strided)
    narrow = nested.transpose(1, 2)
    loaded = load(save(narrow))
    assert_alike(list(loaded.unbind()), [piece.contiguous() for piece in narrow.unbind()])


def test_contradictions_are_refused_when_they_are_saved():
    bad = torch.sparse_coo_tensor(torch.tensor([[5]]), torch.ones(1), (3,), check_invariants=False)
    with pytest.raises(UnsupportedValue, match=r"state\['w'\].*contradict"):
        save({"w": bad})
    unsorted = torch.sparse_csr_tensor(
        torch.tensor([0, 2]), torch.tensor([1, 0]), torch.ones(2), (1, 2), check_invariants=False
    )
    with pytest.raises(UnsupportedValue, match="contradict"):
        save({"w": unsorted})


# -- wrapper subclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    block: tuple[int, ...]


def scaled(label=None, cls=Scaled) -> Scaled:
    return cls(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.tensor([0.5, 0.25]), label)


def assert_scaled(got, want) -> None:
    assert type(got) is type(want)
    assert (got.shape, got.stride(), got.dtype, got.label) == (want.shape, want.stride(), want.dtype, want.label)
    if isinstance(want.inner, Scaled):
        assert_scaled(got.inner, want.inner)
    else:
        assert_alike(got.inner, want.inner)
    assert_alike(got.scale, want.scale)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(wrapped(), min_size=1, max_size=3))
def test_any_subclass_comes_back_and_fills_another(tensors):
    saved = save(tensors)
    loaded = load(saved, types=[Scaled, Outer])
    for got, want in zip(loaded, tensors, strict=True):
        assert_scaled(got, want)
    again = save(loaded)
    assert (again.document, again.data) == (saved.document, saved.data)
    live = load(saved, types=[Scaled, Outer])
    for tensor in live:
        inner = tensor.inner.inner if isinstance(tensor.inner, Scaled) else tensor.inner
        if inner.numel() and inner.is_contiguous():
            inner.view(-1).view(torch.uint8).zero_()
    bind(saved, live)
    for got, want in zip(live, tensors, strict=True):
        assert_scaled(got, want)


def test_a_subclass_of_nothing():
    class Nothing(Scaled):
        def __tensor_flatten__(self):
            return [], None

        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            return cls(torch.zeros(size), torch.ones(1))

    saved = save({"w": Nothing(torch.zeros(2, 2), torch.ones(1))})
    assert saved.keys == []
    assert load(saved, types=[Nothing])["w"].shape == (2, 2)
    assert bind(saved, {"w": Nothing(torch.zeros(2, 2), torch.ones(1))}).loaded == ("w",)


@pytest.mark.parametrize("label", [None, "x", {"a": [1, (2.5, None)]}, torch.float16, torch.Size([1, 2])], ids=str)
def test_a_subclass_comes_back(label):
    tensor = scaled(label)
    saved = save({"w": tensor, "again": tensor})
    assert saved.keys == ["w/~.inner", "w/~.scale"]
    loaded = load(saved, types=[Scaled])
    assert_scaled(loaded["w"], tensor)
    assert loaded["again"] is loaded["w"]


def test_a_subclass_is_rebuilt_only_where_it_is_allowed():
    tensor = scaled(Layout((1, 2)))
    saved = save({"w": tensor})
    plain = load(saved)["w"]
    assert_alike(plain, {"inner": tensor.inner, "scale": tensor.scale, "__tensor_flatten__": {"block": (1, 2)}})
    assert_scaled(load(saved, types=[Scaled, Layout])["w"], tensor)
    assert load(saved, types=[Scaled])["w"].label == {"block": (1, 2)}, "its context follows the same rule"
    document = saved.document.replace(b"odd_tensors:Scaled", b"antigravity:Scaled")
    assert type(load(dataclasses.replace(saved, document=document))["w"]) is dict
    assert "antigravity" not in sys.modules


def test_a_registered_subclass_needs_no_types(monkeypatch):
    monkeypatch.setattr("tierload.state.registry._REGISTERED", {})
    register_type(Scaled)
    assert_scaled(load(save({"w": scaled()}))["w"], scaled())
    with pytest.raises(TypeError):
        register_type(torch.Tensor)


def test_subclasses_inside_subclasses_and_parameters():
    inner = scaled("in")
    tensor = Outer(inner, torch.ones(1), "out")
    state = {"w": tensor, "p": torch.nn.Parameter(scaled("p"), requires_grad=False), "in": inner}
    saved = save(state)
    assert "w/~.inner/~.inner" in saved.keys
    loaded = load(saved, types=[Scaled, Outer])
    assert_scaled(loaded["w"], tensor)
    assert isinstance(loaded["p"], torch.nn.Parameter)
    assert loaded["in"] is loaded["w"].inner
    assert isinstance(load(saved, types=[Outer])["w"]["inner"], dict), "the inner class is not allowed"


def test_parts_of_a_subclass_are_any_tensors():
    shared = torch.randn(4)
    tensor = scaled()
    tensor.scale = shared[:2]
    loaded = load(save({"w": tensor, "base": shared}), types=[Scaled])
    assert loaded["w"].scale.data_ptr() == loaded["base"].data_ptr(), "tied to a tensor beside it"


def test_subclasses_that_cannot_be_stored():
    class Odd(Scaled):
        def __tensor_flatten__(self):
            return ["inner", "label"], None

    with pytest.raises(UnsupportedValue, match=r"state\['w'\].*label"):
        save({"w": Odd(torch.ones(2), torch.ones(1), 5)})
    with pytest.raises(UnsupportedValue, match=r"state\['w'\].*cannot be stored"):
        save({"w": scaled(object())})
    looped = scaled()
    looped.inner = looped
    with pytest.raises(UnsupportedValue, match="inner"):
        save({"w": looped})


def test_a_class_that_has_changed():
    saved = save({"w": scaled()})

    class Other(Scaled):
        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            return torch.ones(1)

    Other.__module__, Other.__qualname__ = Scaled.__module__, Scaled.__qualname__
    with pytest.raises(CorruptStore, match="__tensor_unflatten__"):
        load(saved, types=[Other])


# -- hostile documents


def forged(saved, change):
    document = json.loads(saved.document)
    change(document["root"]["d"]["w"]["compound"])
    return dataclasses.replace(saved, document=json.dumps(document).encode())


FORGERIES = {
    "unknown form": ("coo", lambda node: node.update(form="sparse_xyz")),
    "form of another": ("coo", lambda node: node.update(form="quantized")),
    "no form": ("coo", lambda node: node.pop("form")),
    "more members": ("coo", lambda node: node.update(more=1)),
    "negative shape": ("coo", lambda node: node.update(shape=[-1, 3])),
    "smaller shape": ("coo", lambda node: node.update(shape=[1, 1])),
    "huge shape": ("coo", lambda node: node.update(shape=[1 << 62, 1 << 62])),
    "shape of text": ("coo", lambda node: node.update(shape="23")),
    "flag": ("coo", lambda node: node.update(coalesced=1)),
    "parts missing": ("coo", lambda node: node["parts"].pop()),
    "part twice": ("coo", lambda node: node["parts"].append(node["parts"][0])),
    "part of text": ("coo", lambda node: node["parts"].__setitem__(1, ["values", "text"])),
    "values for indices": ("coo", lambda node: node["parts"].__setitem__(0, ["indices", node["parts"][1][1]])),
    "kind": ("coo", lambda node: node.update(kind="buffer")),
    "csr smaller": ("csr", lambda node: node.update(shape=[4, 2])),
    "csr of one less row": ("csr", lambda node: node.update(shape=[3, 4])),
    "other layout": ("csr", lambda node: node.update(form="sparse_bsr")),
    "axis": ("channels", lambda node: node.update(axis=7)),
    "axis of other size": ("channels", lambda node: node.update(axis=1)),
    "axis that is not there": ("quantized", lambda node: node.update(axis=0)),
    "no axis": ("channels", lambda node: node.update(axis=None)),
    "dtype": ("quantized", lambda node: node.update(dtype="float32")),
    "other dtype": ("quantized", lambda node: node.update(dtype="qint32")),
    "larger": ("quantized", lambda node: node.update(shape=[300, 500])),
    "packed larger": ("packed", lambda node: node.update(shape=[3, 500])),
    "ragged": ("jagged", lambda node: node.update(ragged=9)),
    "ragged 0": ("jagged", lambda node: node.update(ragged=0)),
    "seqlens": ("jagged", lambda node: node.update(seqlens=[1])),
    "largest too small": ("jagged", lambda node: node.update(seqlens=[0, 1])),
    "least too large": ("jagged", lambda node: node.update(seqlens=[3, 3])),
    "values for sizes": ("nested", lambda node: node["parts"].__setitem__(1, ["sizes", node["parts"][0][1]])),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_documents_are_refused(what):
    name, change = FORGERIES[what]
    saved = forged(save({"w": examples()[name]}), change)
    with pytest.raises(CorruptStore):
        load(saved)


@pytest.mark.parametrize(("name", "key", "number"), [
    ("coo", "w/~.indices", 99), ("coo", "w/~.indices", -1), ("csr", "w/~.col_indices", 77),
    ("csr", "w/~.crow_indices", 5), ("bsc", "w/~.row_indices", 7), ("nested", "w/~.sizes", 1 << 40),
    ("nested", "w/~.sizes", -3),
    ("jagged", "w/~.offsets", 100), ("jagged", "w/~.offsets", -2),
])  # fmt: skip
def test_indices_that_leave_the_values_are_refused(name, key, number):
    """torch's operators would read beyond the memory."""
    saved = save({"w": examples()[name]})
    at = saved.keys.index(key)
    data = torch.frombuffer(bytearray(saved.data[at]), dtype=torch.int64).clone()
    data[-1] = number
    saved.data[at] = raw(data)
    with pytest.raises(CorruptStore, match=r"state\['w'\]"):
        load(saved)


def test_references_to_it_inside_itself():
    saved = save({"w": scaled([1])})
    document = saved.document.replace(b'"context":[1]', b'"context":[{"ref":1}]')
    assert document != saved.document
    with pytest.raises(CorruptStore, match="inside itself"):
        load(dataclasses.replace(saved, document=document), types=[Scaled])


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(examples())),
    st.integers(0, 400),
    st.sampled_from([b"0", b"9", b"null", b"[]", b'"x"', b"-1"]),
)
def test_a_document_that_is_cut_or_changed_is_refused_or_loads(name, at, put):
    saved = save({"w": examples()[name]})
    at = 30 + at % (len(saved.document) - 30)
    document = saved.document[:at] + put + saved.document[at + 1 :]
    with contextlib.suppress(TierloadError, MemoryError):
        load(dataclasses.replace(saved, document=document))


# -- memory that comes and goes


def test_tensors_that_a_hook_makes_are_no_ties():
    """Each state_dict() gives fresh copies; one that was freed must not pass its address on to the next."""

    class Dequantizing(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.register_buffer("packed", torch.full((64,), number, dtype=torch.uint8))
            self.register_state_dict_post_hook(self._fresh)

        @staticmethod
        def _fresh(module, state_dict, prefix, metadata):
            for _ in range(3):
                garbage = module.packed.float() * 100  # freed at once: the next one often gets its address
                del garbage
            state_dict[prefix + "packed"] = module.packed.float()
            state_dict[prefix + "scale"] = torch.tensor(float(module.packed[0]))

    state = {f"m{number}": Dequantizing(number) for number in range(20)}
    flat = flatten(state)
    pointers = flat.pointers.tolist()
    assert len(set(pointers)) == len(pointers) == 40
    assert b'"tie"' not in flat.document
    garbage = [torch.full((64,), 255.0) for _ in range(100)]  # would overwrite what the state gave up
    loaded = load(stored(flat))
    assert len(garbage) == 100
    for number in range(20):
        assert loaded[f"m{number}"]["packed"].tolist() == [number] * 64
        assert loaded[f"m{number}"]["scale"] == number


def test_parts_that_are_made_anew_each_time_stay_alive():
    class Fresh(Scaled):
        def __tensor_flatten__(self):
            return ["integers", "factor"], None

        @property
        def integers(self):
            return self.inner.clone()

        @property
        def factor(self):
            return self.scale * 1

    state = [Fresh(torch.full((64,), n, dtype=torch.uint8), torch.full((64,), float(n))) for n in range(20)]
    flat = flatten(state)
    assert len(set(flat.pointers.tolist())) == 40
    assert b'"tie"' not in flat.document
    garbage = [torch.full((64,), 255, dtype=torch.uint8) for _ in range(100)]
    for number, parts in enumerate(load(stored(flat))):
        assert parts["integers"].tolist() == [number] * 64
        assert parts["factor"].tolist() == [number] * 64
    assert len(garbage) == 100


def test_nothing_is_pickled():
    assert b"pickle" not in save({"w": scaled()}, allow_pickle=True).document
