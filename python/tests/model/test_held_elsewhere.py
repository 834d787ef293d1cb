"""Tests loads into skeletons whose tensors are also referenced from outside the modules.

The references get the values, or the audit's error names the object that has the reference.
"""

from __future__ import annotations

import collections
import functools
import gc
import tempfile
import warnings
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone
from loadstone._model import holders as _holders
from loadstone._model.model_lock import slots_of


class Holding(nn.Module):
    """A parameter with references in an object that loadstone's walk does not enter."""

    def __init__(self, how=""):
        super().__init__()
        self.w = weight = nn.Parameter(torch.randn(3, 3))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.w
        makers = {
            "": lambda: None,
            "partial": lambda: functools.partial(torch.matmul, other=weight),
            "userdict": lambda: collections.UserDict(w=weight),
            "set": lambda: {weight},
            "closure": lambda: lambda x: x @ weight,
            "bound method": lambda: weight.__rmatmul__,
            "default": lambda: _with_default(weight),
            "iterator": lambda: iter([weight]),
        }
        self.held = makers[how]()


def _with_default(weight):
    def function(x, weight=weight):
        return x @ weight

    return function


HOLDERS = [
    "partial",
    "userdict",
    "set",
    "closure",
    "bound method",
    "default",
    "iterator",
]


def held(model, how):
    """Return the tensor to which ``model.held`` refers, found through the garbage collector."""
    found = [each for each in gc.get_referents(model.held) if isinstance(each, torch.Tensor)]
    pending = [model.held]
    for _ in range(4):
        pending = [each for value in pending for each in gc.get_referents(value)]
        found += [each for each in pending if isinstance(each, torch.Tensor)]
    return found[0]


@pytest.fixture
def path(tmp_path):
    save_file({"w": torch.arange(9.0).view(3, 3)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def skeleton(how=""):
    with loadstone.skeleton():
        return Holding(how)


FORBIDS = {
    "a weak reference": weakref.ref,
    "a weak reference of C++": lambda tensor: torch._C._WeakTensorRef(tensor),
    "a graph": lambda tensor: (tensor * 2).sum(),
}


@pytest.mark.parametrize("how", HOLDERS)
def test_a_holder_sees_the_loaded_value(how, path):
    model = skeleton(how)
    before = held(model, how)
    assert before is model.w and before.is_meta
    loadstone.load(model, path)
    assert held(model, how) is model.w is before is model.head.weight
    assert torch.equal(before, torch.arange(9.0).view(3, 3))
    audit = loadstone.audit(model)
    assert audit.ok and not audit.held_elsewhere and not audit.changed


@pytest.mark.parametrize("why", FORBIDS)
@pytest.mark.parametrize("how", HOLDERS)
def test_where_torch_refuses_the_audit_names_the_holder(how, why, path):
    model = skeleton(how)
    kept = FORBIDS[why](model.w)
    with pytest.raises(loadstone.AuditError, match="still refers to the old tensor") as caught:
        loadstone.load(model, path)
    assert caught.value.code == "audit.on_meta" and caught.value.tensor == "w"
    assert not model.w.is_meta and held(model, how).is_meta and kept is not None
    audit = loadstone.audit(model)
    assert not audit.ok and audit.on_meta == ["w"] and set(audit.held_elsewhere) == {"w"}
    model.held = None  # control
    assert loadstone.audit(model).ok


@pytest.mark.parametrize("why", FORBIDS)
def test_what_nobody_holds_is_replaced_without_a_word(why, path):
    model = skeleton()
    kept = FORBIDS[why](model.w)
    loadstone.load(model, path)
    assert loadstone.audit(model).ok and torch.equal(model.w, torch.arange(9.0).view(3, 3))
    assert kept is not None and model.head.weight is model.w


@pytest.mark.parametrize("how", HOLDERS)
def test_a_holder_of_an_offloaded_tensor_is_a_fault(how, path, tmp_path):
    model = skeleton(how)
    places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    with pytest.raises(loadstone.AuditError, match="also refers to it"):
        loadstone.load(model, path, **places)
    model.held = None
    audit = loadstone.audit(model)
    assert audit.ok and audit.not_held and not audit.held_elsewhere


def test_an_optimizer_of_an_offloaded_tensor_is_named(path, tmp_path):
    """The optimizer would train nothing, because its tensor has no memory after the load."""
    model = skeleton()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    with pytest.warns(UserWarning, match=r"w \(list in SGD also refers to it\)"):
        loadstone.load(model, path, **places)
    audit = loadstone.audit(model)
    assert audit.ok and audit.held_elsewhere == {"w": "list in SGD also refers to it"}
    assert "SGD" in str(audit) and optimizer is not None


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_optimizer_made_on_a_skeleton_trains(name, dtype, path):
    model, expected = skeleton(), Holding()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    loadstone.load(model, path, dtype=dtype)
    loadstone.load(expected, path, dtype=dtype)
    other = getattr(torch.optim, name)(expected.parameters(), lr=0.1)
    for net, each in ((model, optimizer), (expected, other)):
        for _ in range(2):
            each.zero_grad()
            net.head(torch.ones(1, 3, dtype=net.w.dtype)).sum().backward()
            each.step()
    assert torch.equal(model.w, expected.w)
    assert not torch.equal(model.w, torch.arange(9.0).view(3, 3).to(model.w.dtype))


def test_hooks_of_a_parameter_on_meta_run_after_the_load(path):
    model, seen = skeleton(), []
    model.w.register_hook(lambda grad: seen.append("hook") or grad * 2)
    model.w.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor is model.w))
    loadstone.load(model, path)
    model.w.sum().backward()
    assert seen == ["hook", True] and torch.equal(model.w.grad, torch.full((3, 3), 2.0))


def test_a_failed_load_gives_the_objects_their_contents_back(path, monkeypatch):
    from loadstone._execute import execute

    for why in (None, *FORBIDS):
        model = skeleton("closure")
        before = model.w
        kept = None if why is None else FORBIDS[why](before)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(execute, "make_report", _interrupt)
            loadstone.load(model, path)
        assert model.w is before is model.head.weight is held(model, "closure")
        assert before.is_meta and before.requires_grad and not loadstone.audit(model).provenance
        del kept
        loadstone.load(model, path)  # keeps the object, because loadstone left no weak reference
        assert model.w is before and not before.is_meta


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_load_keeps_no_weak_reference_to_a_parameter(path):
    model = skeleton()
    loadstone.load(model, path)
    loadstone.audit(model)
    assert not weakref.getweakrefcount(model.w) and model.w._use_count() == 1
    torch.utils.swap_tensors(model.w, nn.Parameter(torch.zeros(3, 3)))  # raises on a weak reference


def test_no_search_where_nobody_holds_anything(path, tmp_path, monkeypatch):
    searched = []
    found = _holders._referrers
    monkeypatch.setattr(
        _holders, "_surroundings", lambda *_: collections.defaultdict(lambda: ("", False))
    )
    monkeypatch.setattr(_holders, "_referrers", lambda values: searched.append(1) or found(values))
    places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    for how, count in (("", 0), ("set", 1)):
        loadstone.load(skeleton(how), path, **places)
        assert len(searched) == count


def test_passes_over_the_collector_do_not_grow_with_the_tensors(monkeypatch):
    passes = []
    found = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: passes.append(len(of)) or found(*of))
    for count in (1, 8, 64):
        with torch.device("meta"):
            model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(count))
        partials = [functools.partial(print, each) for each in model.parameters()]
        passes.clear()
        holders = _holders.find_holders(model, slots_of(model))
        assert sum("partial" in holder.what for holder in holders) == count  # control
        assert 1 <= len(passes) <= 1 + _holders._STEPS_MAX
        del partials


def test_a_weight_that_is_quantized_is_another_object_and_its_holder_is_named(tmp_path):
    pytest.importorskip("bitsandbytes")
    save_file({"0.weight": torch.randn(64, 64)}, tmp_path / "m.safetensors")
    for holds in (True, False):
        with loadstone.skeleton():
            model = nn.Sequential(nn.Linear(64, 64, bias=False))
            model.held = {model[0].weight} if holds else set()
        if not holds:  # control
            loadstone.load(model, tmp_path / "m.safetensors", quantize="nf4")
            assert loadstone.audit(model).ok
            continue
        with pytest.raises(loadstone.AuditError, match="set in Sequential still refers to"):
            loadstone.load(model, tmp_path / "m.safetensors", quantize="nf4")


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_holders_in_a_model_of_transformers(tied, patched, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Held(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.head = functools.partial(nn.functional.linear, weight=self.lm_head.weight)
            embedding = self.model.embed_tokens.weight
            self.embedding = lambda: embedding

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(tie_word_embeddings=tied, **sizes, **heads)
    expected = transformers.LlamaForCausalLM(config)
    expected.save_pretrained(tmp_path)

    def load():
        if not patched:
            return loadstone.transformers.from_pretrained(Held, tmp_path)
        with loadstone.patch("transformers"):
            return Held.from_pretrained(tmp_path)

    if tied:  # transformers replaces the head's parameter, but not the one in the partial
        with pytest.raises(
            loadstone.AuditError, match=r"lm_head\.weight.* partial still refers to"
        ):
            load()
        return
    model = load()
    assert model.embedding() is model.model.embed_tokens.weight
    assert model.head.keywords["weight"] is model.lm_head.weight
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(model.embedding(), expected.model.embed_tokens.weight)
    assert all(each.requires_grad for each in model.parameters())


# --- models with memory whose dtype changes ------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


def with_old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)))


def plain():
    return nn.Sequential(nn.Linear(4, 4))


def distributed(model):
    """Wrap the model in DDP with one rank; DDP's reducer refers to the parameters."""
    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", f"file://{folder}/all", rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


def weight(model):
    return next(model.parameters())


# Obstacles to torch.utils.swap_tensors: functions that make a model, and functions that return an
# object which refers to the model's tensors.
LIVE = {
    "nothing": (plain, lambda model: None),
    "weak references of an LSTM": (Recurrent, lambda model: None),
    "weight_norm": (with_old_weight_norm, lambda model: None),
    "a live loss": (plain, lambda model: model(torch.ones(1, 2, 4)).sum()),
    "DistributedDataParallel": (plain, distributed),
    "a weak reference": (plain, lambda model: weakref.ref(weight(model))),
    "a weak reference of C++": (plain, lambda model: torch._C._WeakTensorRef(weight(model))),
}


def loaded_by_load(model, path, dtype, in_place):
    loadstone.load(model, path, dtype=dtype, in_place=in_place)


def loaded_by_a_plan(model, path, dtype, in_place):
    loadstone.plan(model, path, dtype=dtype, in_place=in_place).execute()


def loaded_into(model, path, dtype, in_place):
    loadstone.plan(model, path, dtype=dtype).execute(**{"into" if in_place else "model": model})


def loaded_for_accelerate(model, path, dtype, in_place):
    pytest.importorskip("accelerate")
    loadstone.accelerate.load_checkpoint_and_dispatch(model, path, dtype=dtype)


WAYS = (loaded_by_load, loaded_by_a_plan, loaded_into, loaded_for_accelerate)


def stale(kind, way, dtype, in_place, tmp_path):
    """Load into a model for which an optimizer exists.

    Returns:
        The names of the parameters that the optimizer's next step does not change.
    """
    make, hold = LIVE[kind]
    torch.manual_seed(0)
    state = {name: torch.randn_like(value) for name, value in make().state_dict().items()}
    save_file(state, tmp_path / "m.safetensors")
    model = make()
    before = dict(model.named_parameters())
    optimizer, held = torch.optim.SGD(model.parameters(), lr=1.0), hold(model)
    way(model, tmp_path / "m.safetensors", dtype, in_place)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)) and value.dtype == dtype
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    model(torch.ones(1, 2, 4, dtype=dtype)).square().sum().backward()
    optimizer.step()
    del held
    parameters = dict(model.named_parameters())
    same = {name for name, each in parameters.items() if each is before[name]}
    kept = {name for name, each in parameters.items() if torch.equal(each, values[name])}
    assert kept == parameters.keys() - same
    return kept


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LIVE)
def test_an_optimizer_trains_what_a_load_casts(kind, way, dtype, in_place, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not stale(kind, way, dtype, in_place, tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in LIVE if kind != "nothing"])
def test_control_a_replaced_parameter_is_not_trained_and_a_warning_names_it(
    kind, way, tmp_path, monkeypatch
):
    monkeypatch.setattr("loadstone._execute.destinations.accepts_data", lambda slot, value: False)
    with pytest.warns(UserWarning, match="SGD still refers to the old tensor") as caught:
        kept = stale(kind, way, torch.float64, False, tmp_path)
    found = [str(each.message) for each in caught if "after the load" in str(each.message)]
    assert len(found) == 1 and kept and all(name in found[0] for name in kept)


def test_a_parameter_of_inference_mode_cannot_stay_and_the_load_warns(path):
    with torch.inference_mode():
        model = Holding("set")
    kept = weakref.ref(model.w)
    with pytest.warns(UserWarning, match=r"1 tensor .*: w \(.* set in Holding still refers to"):
        loadstone.load(model, path)
    assert kept() is not model.w and loadstone.audit(model).held_elsewhere.keys() == {"w"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_another_dtype_is_dropped_and_comes_back_with_a_failure(
    dtype, path, monkeypatch
):
    from loadstone._execute import execute

    model = Holding()
    model.w.sum().backward()
    before, grad, kept = model.w.detach().clone(), model.w.grad, weakref.ref(model.w)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(execute, "make_report", _interrupt)
        loadstone.load(model, path, dtype=dtype)
    assert torch.equal(model.w, before) and model.w.dtype == before.dtype
    assert model.w.grad is grad and kept() is model.w
    loadstone.load(model, path, dtype=dtype)
    assert kept() is model.w and model.w.dtype == dtype
    assert model.w.grad is (grad if dtype == torch.float32 else None)
    model.w.sum().backward()
    assert model.w.grad.dtype == dtype


def test_a_graph_from_before_a_cast_is_refused_by_autograd(path):
    model = Holding()
    loss = model.w.square().sum()
    loadstone.load(model, path, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- optimizers of skeletons ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [Recurrent, with_old_weight_norm])
def test_the_error_for_an_optimizer_of_a_skeleton_advises_and_the_advice_works(make, tmp_path):
    save_file(make().state_dict(), tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(loadstone.AuditError, match=r"an optimizer.*after the load"):
        loadstone.load(model, tmp_path / "m.safetensors")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loadstone.load(model, tmp_path / "m.safetensors")
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    model(torch.ones(1, 2, 4)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(each, values[name]) for name, each in model.named_parameters())
