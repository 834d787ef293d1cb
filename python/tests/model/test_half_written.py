"""Tests that tensors left half-written by a failed in-place load are marked.

The mark follows the tensor's value into copies, until a load writes the tensor completely.
"""

import copy
import io
import pickle

import pytest
import torch
from remote_server import Fault, Server
from safetensors.torch import save, save_file
from torch import nn

import loadstone
from loadstone._model.walk import HALF_WRITTEN, walk
from loadstone._plan.state_dict_overrides import has_code


def net():
    torch.manual_seed(7)
    parts = {"body": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "rest": nn.Linear(4, 2)}
    return nn.ModuleDict(parts)


@pytest.fixture
def files(tmp_path):
    """Write a checkpoint of the whole model, and one of its module ``rest``."""
    state = {name: torch.full_like(each, 3) for name, each in net().state_dict().items()}
    rest = {name: each for name, each in state.items() if name.startswith("rest")}
    save_file(state, tmp_path / "good.safetensors")
    save_file(rest, tmp_path / "rest.safetensors")
    return tmp_path


def interrupt(done, total):
    if done == total:
        raise KeyboardInterrupt


def fail(model, files, **options):
    with pytest.raises(KeyboardInterrupt):
        loadstone.load(
            model, files / "good.safetensors", in_place=True, progress=interrupt, **options
        )


def keep(model, files):
    return loadstone.load(model, files / "rest.safetensors", strict=False)


def is_refused(model, files):
    """Return true if loadstone rejects a load that keeps tensors; the model must stay unchanged."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    try:
        keep(model, files)
    except loadstone.AuditError as error:
        assert error.code == "audit.unaccounted"
        after = model.state_dict()
        assert all(torch.equal(each, after[name]) for name, each in before.items())
        assert not loadstone.audit(model).ok
        return True
    assert loadstone.audit(model).ok
    return False


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_copies(model):
    for module in (model["body"], model["norm"]):
        module.weight = nn.Parameter(module.weight.detach().clone())
    return model


WAYS = {
    "as it is": lambda model: model,
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "to and back": lambda model: model.double().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "twice": lambda model: copy.deepcopy(copy.deepcopy(model).half()),
    "copies": with_copies,
}


def state_of(files):
    return loadstone.torch.load_file(files / "good.safetensors")


REPAIRS = {
    "load": lambda model, files: loadstone.load(model, files / "good.safetensors"),
    "in place": lambda model, files: loadstone.load(
        model, files / "good.safetensors", in_place=True
    ),
    "load_state_dict": lambda model, files: model.load_state_dict(state_of(files)),
    "assign": lambda model, files: model.load_state_dict(state_of(files), assign=True),
    "load_model": lambda model, files: loadstone.torch.load_model(
        model, files / "good.safetensors"
    ),
}


def another_shape(model, files):
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state_of(files) | {"body.weight": torch.zeros(1)})


def step(model, files):
    with torch.no_grad():
        model["body"].weight += 1


def all_but_one(model, files):
    state = state_of(files)
    del state["body.weight"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["body.weight"]


NO_REPAIRS = {
    "own values": lambda model, files: model.load_state_dict(model.state_dict()),
    "another shape": another_shape,
    "a step of training": step,
    "all but one": all_but_one,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_known_where_its_value_goes(way, files):
    assert not is_refused(WAYS[way](net()), files)  # control: a model without a failed load
    model = net()
    fail(model, files)
    model = WAYS[way](model)
    assert is_refused(model, files)
    with pytest.raises(loadstone.AuditError, match=r"7 tensors .*'body\.weight', 'body\.bias'"):
        keep(model, files)


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_whole_once_it_is_written_whole(way, repair, files):
    model = net()
    fail(model, files)
    model = WAYS[way](model)
    REPAIRS[repair](model, files)
    assert not is_refused(model, files)
    assert all((each == 3).all() for each in model.state_dict().values())
    for module in model.modules():
        assert HALF_WRITTEN not in vars(module)
        assert not module._load_state_dict_pre_hooks and not module._load_state_dict_post_hooks


@pytest.mark.parametrize("write", NO_REPAIRS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_not_whole_after_another_write(way, write, files):
    model = net()
    fail(model, files)
    model = WAYS[way](model)
    NO_REPAIRS[write](model, files)
    with pytest.raises(loadstone.AuditError, match=r"'body\.weight'"):
        keep(model, files)


def test_a_tied_name_is_known_in_a_copy_of_its_own(files):
    model = net()
    model["twin"] = nn.Linear(3, 4)
    model["twin"].weight = model["body"].weight
    state = state_of(files) | {"twin.bias": torch.ones(4)}
    save_file(state, files / "good.safetensors")
    fail(model, files)
    save_file({"bias": torch.ones(4)}, files / "bias.safetensors")
    part = copy.deepcopy(model["twin"])
    with pytest.raises(loadstone.AuditError, match=r"'weight'"):
        loadstone.load(part, files / "bias.safetensors", strict=False)
    loadstone.load(model, files / "good.safetensors")
    assert all(HALF_WRITTEN not in vars(module) for module in model.modules())


def test_memory_that_another_module_repairs_is_whole(files):
    """The mark follows the memory, not the tensor object, as long as the tensor exists."""
    model, other = net(), net()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        two.data = one.data
    for one, two in zip(model.modules(), other.modules(), strict=True):
        two._buffers = one._buffers
    fail(model, files)
    assert is_refused(other, files) and is_refused(model, files)
    loadstone.load(other, files / "good.safetensors", in_place=True)
    assert not is_refused(model, files)


def test_the_record_is_no_part_of_the_model(files):
    model = net()
    names = [slot.name for slot in walk(model)]
    fail(model, files)
    assert HALF_WRITTEN in vars(model["body"])  # control
    assert [slot.name for slot in walk(model)] == names
    assert not has_code(model)
    model["body"].register_load_state_dict_post_hook(lambda module, keys: None)
    assert has_code(model)  # control
    REPAIRS["load"](model, files)  # because of the hook, loadstone rehearses on a copy of the model
    assert not is_refused(model, files)


def test_a_load_that_failed_before_its_first_byte_leaves_no_mark(files):
    model, file = net(), files / "good.safetensors"
    loadstone.load(model, file)
    plan = loadstone.plan(model, file, in_place=True)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(loadstone.LoadError) as found:
        plan.execute()
    assert found.value.half_written == [] and not hasattr(found.value, "__notes__")
    assert loadstone.audit(model).ok
    assert not is_refused(model, files)


def test_a_tensor_that_got_no_byte_is_not_marked(monkeypatch):
    """One thread reads three tensors in order, and the second is unreadable."""
    monkeypatch.setenv("no_proxy", "*")
    shape = (3, 1 << 19)
    state = {name: torch.ones(shape) for name in "abc"}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name in "abc"})
    server = Server()
    try:
        server.files["/model.safetensors"] = save(state)
        server.faults = [Fault("status", begins=7 << 20, status=404)]
        with pytest.raises(loadstone.LoadError) as found:
            loadstone.load(model, server.url("/model.safetensors"), in_place=True, threads=1)
    finally:
        server.close()
    assert found.value.half_written == ["a", "b"]
    assert not model["c"].any()
    assert list(vars(model)[HALF_WRITTEN]) == ["a", "b"]
