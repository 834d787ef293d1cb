"""Tests that the walk finds every reachable tensor, with its name and a way to replace it."""

from __future__ import annotations

import collections
import dataclasses
import json
import types
import weakref

import pytest
import torch
from storages import sharers
from torch import nn

from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import PlanError
from loadstone._model.walk import walk
from loadstone._skeleton.skeleton import save_skeleton, skeleton, skeleton_record


@dataclasses.dataclass(frozen=True)
class State:
    code: torch.Tensor
    state2: object = None


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self, value, hidden):
        self.value = value
        self.__hidden = hidden


Pair = collections.namedtuple("Pair", "cos sin")


def names(model):
    return [slot.name for slot in walk(model)]


def slot(model, name):
    return next(each for each in walk(model) if each.name == name)


def holding(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def ones():
    return torch.ones(2)


def test_kinds_and_order():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    model[0].register_buffer("table", ones(), persistent=False)
    model[0].plain = ones()
    assert [(each.name, each.kind) for each in walk(model)] == [
        ("0.weight", "parameter"),
        ("0.bias", "parameter"),
        ("0.running_mean", "persistent_buffer"),
        ("0.running_var", "persistent_buffer"),
        ("0.num_batches_tracked", "persistent_buffer"),
        ("0.table", "non_persistent_buffer"),
        ("1.weight", "parameter"),
        ("0.plain", "attribute"),
    ]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([ones(), [ones()]], ["x[0]", "x[1][0]"]),
        ((ones(), (3, ones())), ["x[0]", "x[1][1]"]),
        (Pair(ones(), ones()), ["x[0]", "x[1]"]),
        ({"cos": ones(), 3: {"a": ones()}}, ["x['cos']", "x[3]['a']"]),
        (collections.OrderedDict(a=ones()), ["x['a']"]),
        (collections.deque([1, ones()]), ["x[1]"]),
        (State(ones(), State(ones())), ["x.code", "x.state2.code"]),
        (Slotted(ones(), ones()), ["x.value", "x._Slotted__hidden"]),
        (types.SimpleNamespace(a=[State(ones())]), ["x.a[0].code"]),
        ([nn.Linear(1, 1)], ["x[0].weight", "x[0].bias"]),
    ],
)
def test_names_and_replacement_in_all_kinds_of_holders(value, found):
    model = holding(x=value)
    assert sorted(names(model)) == sorted(found)
    for number, each in enumerate(walk(model)):
        each.replace(torch.full((5,), float(number)))
    again = walk(model)
    assert [each.name for each in again] == [each.name for each in walk(holding(x=value))]
    for number, each in enumerate(again):
        assert torch.equal(each.tensor, torch.full((5,), float(number))), each.name
    assert type(model.x) is type(value)


def test_attributes_of_parameters_and_tensors():
    model = nn.Linear(2, 2, bias=False)
    model.weight.quant_state = State(ones(), State(ones()))
    assert names(model) == ["weight", "weight.quant_state.code", "weight.quant_state.state2.code"]
    slot(model, "weight.quant_state.state2.code").replace(torch.zeros(1))
    assert model.weight.quant_state.state2.code.tolist() == [0]


def test_ties_by_identity():
    model = nn.Module()
    model.lstm = nn.LSTM(2, 2)
    model.a = nn.Linear(2, 2, bias=False)
    model.b = nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    model.c = model.a
    model.early = [model.a.weight]
    ties = {each.name: each.tie_of for each in walk(model) if each.tie_of}
    assert ties == {
        "b.weight": "a.weight",
        "c.weight": "a.weight",
        "early[0]": "a.weight",
        **{
            f"lstm._flat_weights[{number}]": f"lstm.{name}"
            for number, name in enumerate(
                ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            )
        },
    }


def test_shared_memory_is_seen_and_equal_values_are_not():
    table = torch.arange(6.0)
    model = holding(a=table, b=table[2:], c=table.clone(), d=table)
    assert sharers(walk(model)) == {
        "a": None, "b": "a", "c": None, "d": None,
    }  # fmt: skip
    assert slot(model, "d").tie_of == "a"


def test_cycles_and_what_is_no_part_of_the_model():
    model = nn.Linear(2, 2, bias=False)
    child = nn.Linear(2, 2, bias=False)
    model.child = child
    child.__dict__["parent"] = model
    child.siblings = [model, child]
    loop = {}
    loop["self"] = loop
    loop["list"] = [loop, ones()]
    model.loop = loop
    model.tools = [torch, torch.nn.functional.relu, weakref.ref(child), type(child), torch.float32]
    model.register_forward_hook(lambda *_, held=child: None)
    assert names(model) == ["weight", "child.weight", "loop['list'][1]"]


def test_a_module_in_itself():
    model = nn.Linear(2, 2, bias=False)
    model.inner = nn.Sequential()
    model.inner.add_module("outer", model)
    assert names(model) == ["weight"]


def test_a_tuple_held_twice_is_replaced_in_both_places():
    pair = (ones(), 1)
    model = holding(a=pair, b=[pair])
    first, second = walk(model)
    assert (first.name, second.name, second.tie_of) == ("a[0]", "b[0][0]", "a[0]")
    new = torch.zeros(1)
    first.replace(new)
    second.replace(new)
    assert model.a[0] is model.b[0][0] is new


def test_depth_and_sharing_have_no_limit():
    chain = [ones()]
    for _ in range(5000):
        chain = types.SimpleNamespace(n=chain)
    shared = (ones(),)
    for _ in range(100):
        shared = (shared, shared)
    nested = nn.Linear(1, 1, bias=False)
    for _ in range(2000):
        outer = nn.Module()
        outer.add_module("m", nested)
        nested = outer
    model = holding(chain=chain, shared=shared)
    model.nested = nested
    found = walk(model)
    assert [each.kind for each in found if each.tie_of is None] == [
        "parameter", "attribute", "attribute",
    ]  # fmt: skip
    assert found[0].name == "nested." + "m." * 2000 + "weight"
    assert found[1].name == "chain" + ".n" * 5000 + "[0]"
    new = torch.zeros(1)
    next(each for each in found if each.name.startswith("shared")).replace(new)
    inner = model.shared
    while isinstance(inner, tuple):
        inner = inner[-1]
    assert inner is new  # the replacement also reaches a place that the walk does not list


def test_no_code_of_objects_runs():
    class Explosive(dict):
        def __iter__(self):
            raise AssertionError

        def __getattribute__(self, name):
            if name == "__class__":
                raise AssertionError
            return super().__getattribute__(name)

    class Gone:
        pass

    gone = Gone()
    proxy = weakref.proxy(gone)
    del gone
    model = nn.Module()
    model.__dict__ |= {"x": Explosive(a=ones()), "gone": proxy}
    assert names(model) == ["x['a']"]


def test_a_parameter_stays_one():
    model = nn.Linear(2, 2, bias=False)
    model.weight.requires_grad_(False)
    slot(model, "weight").replace(torch.zeros(2, 2))
    assert isinstance(model.weight, nn.Parameter) and not model.weight.requires_grad


def test_a_model_wholly_on_meta():
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(8, 2)
    assert names(model) == names(nn.TransformerEncoderLayer(8, 2))
    assert skeleton_record(model).findings == []


# --- skeletons as files, and values from a second construction -----------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16"),
        (torch.float64, "F64"), (torch.int64, "I64"), (torch.uint8, "U8"), (torch.bool, "BOOL"),
        (torch.complex64, "C64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"), (torch.uint16, "U16"),
    ],
)  # fmt: skip
def test_dtype_names(dtype, name):
    assert dtype_name(dtype) == name and torch_dtype(name) is dtype


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(PlanError, match=r"plan\.dtype"):
        dtype_name(torch.quint8)
    with pytest.raises(PlanError, match=r"plan\.dtype"):
        torch_dtype("F4")


def test_save_skeleton(tmp_path):
    with skeleton():
        model = nn.Module()
        model.a = nn.Linear(2, 3, bias=False, dtype=torch.bfloat16)
        model.b = nn.Linear(2, 3, bias=False)
        model.b.weight = model.a.weight
        model.register_buffer("steps", torch.arange(4), persistent=False)
        model.freqs = [torch.ones(2, dtype=torch.complex64)]
    save_skeleton(model, tmp_path / "s.json")

    def row(name, shape, dtype, kind, tie_of=None):
        return {"name": name, "shape": shape, "dtype": dtype, "kind": kind, "tie_of": tie_of}

    assert json.loads((tmp_path / "s.json").read_text())["targets"] == [
        row("steps", [4], "I64", "non_persistent_buffer"),
        row("a.weight", [3, 2], "BF16", "parameter"),
        row("b.weight", [3, 2], "BF16", "parameter", "a.weight"),
        row("freqs[0]", [2], "C64", "attribute"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_libraries_constructors_give_what_a_model_on_meta_lacks(dtype):
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    from loadstone._base.torch_modes import constructing
    from loadstone._skeleton.constructor import constructor_values

    def gemma():
        config = transformers.Gemma3TextConfig(
            hidden_size=64, num_hidden_layers=2, vocab_size=64, intermediate_size=64,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        )  # fmt: skip
        return transformers.Gemma3TextModel(config)

    def lumina():
        return diffusers.Lumina2Transformer2DModel(
            num_layers=1, num_refiner_layers=1, hidden_size=96, num_attention_heads=4,
            num_kv_heads=2, axes_dim_rope=(8, 8, 8), cap_feat_dim=16,
        )  # fmt: skip

    for make in (gemma, lumina):
        with constructing(dtype):
            truth = make()
            with torch.device("meta"):
                model = make()
        values = constructor_values(model, walk(model))
        tensors = {slot.name: slot.tensor for slot in walk(truth) if slot.kind != "parameter"}
        assert values and values.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert values[name].dtype == tensor.dtype and torch.equal(values[name], tensor), name
