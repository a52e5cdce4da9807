"""A model is the same in its wrappers and without them: saved, loaded, and so are the states of its optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from alike import assert_alike
from fake_engine import bind, load, save
from models import Renaming, Rotary, TinyLM
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from wrapping import WAYS, Net, compiled, fsdp1

from tierload.errors import KeyMismatch
from tierload.state.wrappers import bare_module

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")  # FSDP1 finds itself alone


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A group of this process, for those wrappers that want one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(wrap, seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    steps(model, optimizer, 2)
    return {"model": model, "optimizer": optimizer}


def steps(model, optimizer, count: int) -> list[float]:
    losses = []
    for number in range(count):
        loss = model(torch.arange(number, number + 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def bare():
    """A bare model as it is saved, and the losses of the steps after that."""
    state = trained(WAYS["bare"])
    saved = save(state)
    return saved, steps(state["model"], state["optimizer"], 3)


@pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
def test_a_wrapped_model_is_saved_as_the_bare_one_and_takes_what_that_saved(bare, wrap):
    saved, losses = bare
    mine = save(trained(wrap))
    assert mine.document == saved.document, "names, versions, order, ties and type"
    assert mine.data == saved.data
    assert len(mine.notes) == (0 if wrap is WAYS["bare"] else 1)
    state = trained(wrap, seed=9)
    report = bind(saved, state)
    assert report.loaded == tuple(sorted({*report.loaded, "model/head.weight", "model/module.running_mean"}))
    assert (report.missing, report.unexpected) == ((), ())
    assert report.notes == mine.notes
    assert steps(state["model"], state["optimizer"], 3) == losses


@pytest.mark.parametrize("wrap", [wrap for name, wrap in WAYS.items() if name != "fsdp1 layers"])
def test_a_state_dict_taken_in_wrappers_is_loaded_into_the_bare_model(wrap):
    state = trained(wrap)
    stored = {"model": state["model"].state_dict(), "optimizer": state["optimizer"]}
    fresh = trained(WAYS["bare"], seed=9)
    report = bind(save(stored), fresh)
    assert_alike(fresh["model"].state_dict(), load(save(state))["model"])
    assert steps(fresh["model"], fresh["optimizer"], 3) == steps(state["model"], state["optimizer"], 3)
    # Checkpointing drops its own element.
    told = [note for note in report.notes if note.startswith("state['model']")]
    assert len(told) == int(state["model"].state_dict().keys() != fresh["model"].state_dict().keys())


def test_a_users_submodule_with_the_name_of_a_wrapper_stays():
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})})
    saved = save({"m": nn.DataParallel(model)})
    assert saved.keys == ["m/module._orig_mod.bias", "m/module._orig_mod.weight"]
    with pytest.raises(KeyMismatch, match=r"weight: is in the store and not in the target") as found:
        bind(saved, {"m": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    assert "_orig_mod." in str(found.value), "what was tried"
    with pytest.raises(KeyMismatch):
        bind(save({"m": nn.Linear(2, 2)}), {"m": model})


class WithHead(nn.DataParallel):
    """A subclass that has something of its own: its names would meet those of the module inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.ones(3))


class Logged(nn.DataParallel):
    """A subclass that only does something else."""


def test_a_wrapper_with_tensors_of_its_own_is_none():
    model = WithHead(nn.Linear(2, 2))
    saved = save({"m": model})
    assert saved.keys == ["m/module.bias", "m/module.weight", "m/weight"]
    assert saved.notes == ()
    other = WithHead(nn.Linear(2, 2))
    bind(saved, {"m": other})
    assert_alike(other.state_dict(), model.state_dict())
    saved = save({"m": Logged(nn.Linear(2, 2))})
    assert saved.keys == ["m/bias", "m/weight"]
    assert saved.notes == ("state['m']: names without `module.` of DataParallel",)


def test_names_that_are_one_without_wrappers():
    """Which of them is meant, nobody can say: none is taken, and the message says what was tried."""
    stored = {"m": {"module.weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2)}}
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(KeyMismatch, match="only dropped one to one") as found:
        bind(save(stored), {"m": model})
    assert found.value.missing == ("m/weight",)
    assert found.value.unexpected == ("m/_orig_mod.weight", "m/module.weight")
    report = bind(save(stored), {"m": model}, strict=False)
    assert (report.loaded, report.missing) == ((), ("m/weight",))
    assert torch.equal(model.weight, before)
    # Not the one that is left, either, when another is there as it is.
    stored = {"m": {"weight": torch.full((2, 2), 5.0), "module.weight": torch.zeros(2, 2)}}
    with pytest.raises(KeyMismatch) as found:
        bind(save(stored), {"m": model})
    assert (found.value.missing, found.value.unexpected) == ((), ("m/module.weight",))
    bind(save(stored), {"m": model}, strict=False)
    assert (model.weight == 5).all()


@pytest.mark.parametrize("within", [lambda one: one, lambda one: nn.ModuleDict({"net": one})])
def test_an_element_with_others_beside_it_is_no_wrapper(within):
    """What a submodule has would go into the module around it."""
    stored = within(nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)}))
    live = nn.Linear(2, 2)
    live.head = nn.Linear(2, 2)
    before = copy.deepcopy(live.state_dict())
    for saved in (save({"m": stored}), save({"m": stored.state_dict()})):
        with pytest.raises(KeyMismatch, match=r"module\.weight"):
            bind(saved, {"m": within(live)})
    assert_alike(live.state_dict(), before)


def test_averaged_weights_are_taken_into_the_bare_model():
    averaged, live = AveragedModel(nn.Linear(2, 2)), nn.Linear(2, 2)
    report = bind(save({"m": averaged}), {"m": live}, strict=False)
    assert report.unexpected == ("m/n_averaged",)
    assert_alike(live.state_dict(), averaged.module.state_dict())


def test_names_that_only_look_alike_do_not_swap():
    """The user's own `module` beside its equal: stored in a wrapper, one name of each is the other's without."""
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "module": nn.ModuleDict({"fc": nn.Linear(2, 2)})})
    other = copy.deepcopy(model)
    bind(save({"m": nn.DataParallel(model)}), {"m": other})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(KeyMismatch):
        bind(save({"m": nn.DataParallel(model).state_dict()}), {"m": other})
    assert_alike(other.state_dict(), before)


def test_strictness_through_wrappers():
    stored = {f"module.{name}": tensor for name, tensor in nn.Linear(3, 3).state_dict().items()}
    stored["module.extra"] = torch.ones(1)
    model = nn.ModuleDict({"weight": nn.Linear(3, 3)})["weight"]
    with pytest.raises(KeyMismatch) as found:
        bind(save({"m": stored}), {"m": model})
    assert (found.value.missing, found.value.unexpected) == ((), ("m/module.extra",))
    report = bind(save({"m": stored}), {"m": compiled(model)}, strict=False)
    assert report.loaded == ("m/module.bias", "m/module.weight")
    assert report.unexpected == ("m/module.extra",)
    assert len(report.notes) == 1
    assert torch.equal(model.weight, stored["module.weight"])
    stored["module.weight"] = torch.ones(1, 3)
    with pytest.raises(KeyMismatch, match=r"m/module.weight: has shape \(3, 3\) in the target and \(1, 3\)"):
        bind(save({"m": stored}), {"m": model})


def test_patterns_are_over_the_keys_of_the_store():
    stored = {f"module.{name}": torch.ones_like(tensor) for name, tensor in nn.Linear(2, 2).state_dict().items()}
    model = nn.DataParallel(nn.Linear(2, 2))
    report = bind(save({"m": stored, "epoch": 3}), {"m": model, "epoch": 0}, keys=["m/module.bias"])
    assert report.loaded == ("m/module.bias",)
    assert (model.module.bias == 1).all()
    assert not (model.module.weight == 1).any()
    with pytest.raises(KeyMismatch, match="m/bias"):
        bind(save({"m": stored}), {"m": model}, keys=["m/bias"])
    target = {"m": model, "epoch": 0}
    assert bind(save({"m": stored, "epoch": 3}), target, keys=["epoch"]).notes == (), "nothing of the module"


def test_the_store_says_the_same_of_the_bare_model_and_its_wrapper_beside_it():
    model = nn.Linear(2, 2)
    saved = save({"a": model, "b": nn.DataParallel(model)})
    assert {info.key for info in saved.infos} == {"a/bias", "a/weight"}, "stored once"
    fresh = nn.Linear(2, 2)
    bind(saved, {"a": fresh, "b": nn.DataParallel(fresh)})
    assert_alike(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper, fsdp1])
def test_modules_with_hooks_are_asked_by_their_own_names(wrap):
    """The hook knows an older name, inside wrappers too; what is renamed is heard with and without them."""
    for stored in ({"inner.old": torch.ones(3)}, {"inner.weight": torch.ones(3)}):
        model = nn.ModuleDict({"inner": nn.ModuleDict({"x": Renaming(), "y": nn.Linear(1, 1)})["x"]})
        model["inner"] = wrap(model["inner"])
        bind(save({"m": stored}), {"m": model})
        inner = bare_module(model["inner"])
        assert torch.equal(inner.weight, torch.ones(3))
        assert inner.calls == 1


def test_extra_state_and_versions_through_wrappers():
    class Counting(nn.BatchNorm1d):
        def get_extra_state(self):
            return self.count

        def set_extra_state(self, count):
            self.count = count

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.version = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    def model(count: int) -> nn.Module:
        norm = Counting(3)
        norm.count = count
        return DistributedDataParallel(nn.ModuleDict({"norm": compiled(norm)}))

    saved = save({"m": model(5)})
    assert load(saved)["m"]["norm._extra_state"] == 5
    for stored in (saved, save({"m": model(5).state_dict()})):
        live = model(0)
        bind(stored, {"m": live})
        norm = bare_module(bare_module(live)["norm"])
        assert (norm.count, norm.version) == (5, 2)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, nn.DataParallel, lambda one: compiled(checkpoint_wrapper(one))])
def test_extra_state_of_the_module_in_a_wrapper(wrap):
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, count):
            self.count = count

    saved, inside = Counting(2, 2), Counting(2, 2)
    saved.count = 5
    bind(save({"m": saved}), {"m": wrap(inside)})
    assert inside.count == 5


def test_b45_ties_stay_on_meta_in_wrappers():
    reference = TinyLM()
    saved = save({"m": reference})
    with torch.device("meta"):
        model = TinyLM()
    wrapped = compiled(nn.DataParallel(model))
    count = len(list(model.named_parameters()))
    bind(saved, {"m": wrapped})
    assert model.embed.weight is model.head.weight
    assert len(list(model.named_parameters())) == count
    assert_alike(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper, offload_wrapper, compiled])
def test_b83_buffers_on_meta_are_named_without_wrappers(wrap):
    saved = save({"m": Rotary()})
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(KeyMismatch) as found:
        bind(saved, {"m": wrap(model)})
    assert found.value.missing == ("m/inv_freq",)
    assert model.proj.weight.is_meta, "nothing was changed"
