"""Tests that weights quantized by bitsandbytes are moved, copied and saved with all components."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import subprocess
import sys

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes_checkpoints import config, plain
from bitsandbytes_models import FOUR_BIT, KINDS, Net, copied, inputs, linear, net, on_meta
from bitsandbytes_models import same_bytes as same
from transformers_models import by_name

import loadstone
import loadstone.bitsandbytes as ours
from loadstone._adapters.bitsandbytes import parameters
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._model.walk import walk

kinds = pytest.mark.parametrize("kind", KINDS)
four_bit = pytest.mark.parametrize("kind", FOUR_BIT)


def healed(kind, **options):
    return ours.heal(net(kind, **options))


def objects(model):
    return [id(each) for each in (*model.modules(), *model.parameters())]


@kinds
def test_healing_changes_classes_and_nothing_else(kind):
    model = net(kind)
    before, stored = objects(model), copied(model.state_dict())
    names = [type(each).__name__ for each in (*model.modules(), *model.parameters())]
    assert ours.heal(model) is model
    assert objects(model) == before and same(stored, copied(model.state_dict()))
    assert names == [type(each).__name__ for each in (*model.modules(), *model.parameters())]
    for layer in model.quantized():
        assert isinstance(layer, bnb.nn.Linear8bitLt if kind == "int8" else bnb.nn.Linear4bit)
        assert isinstance(layer.weight, bnb.nn.Int8Params | bnb.nn.Params4bit)
    classes = [type(each) for each in model.modules()]
    ours.heal(model)
    assert classes == [type(each) for each in model.modules()]


@kinds
def test_the_libraries_are_as_they_were(kind):
    owners = (bnb.nn.Params4bit, bnb.nn.Int8Params, bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    before = [dict(vars(owner)) for owner in owners]
    healed(kind)(inputs())
    assert [dict(vars(owner)) for owner in owners] == before


@kinds
def test_a_forward_pass_leaves_every_byte(kind):
    """bitsandbytes alone would rearrange the weight and round scales on a CPU with AVX512-BF16."""
    model = healed(kind)
    stored = copied(model.state_dict())
    for _ in range(2):
        assert torch.equal(model(inputs()), net(kind)(inputs()))
        assert same(stored, copied(model.state_dict()))
    unit = QuantizedWeight.from_parameter(model.body[0].weight)
    assert same(unit.state_dict("body.0"), {n: stored[n] for n in unit.state_dict("body.0")})


@pytest.mark.parametrize("kind", FOUR_BIT)
@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes rearranges nothing on this CPU")
def test_control_bitsandbytes_changes_the_scales_that_it_saves(kind):
    model = net(kind)
    stored = copied(model.state_dict())
    model(inputs())
    assert not same(stored, copied(model.state_dict()))


@pytest.mark.parametrize("kind", FOUR_BIT)
@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes rearranges nothing on this CPU")
def test_healing_after_a_forward_pass_says_that_scales_are_rounded(kind, caplog):
    model = net(kind)
    expected = model(inputs())
    ours.heal(model)
    assert "has rounded the scales" in caplog.text
    assert torch.equal(model(inputs()), expected)
    assert on_meta(model.to("meta"))


@kinds
def test_a_move_leaves_the_source(kind):
    model = healed(kind)
    stored = copied(model.state_dict())
    for layer in model.quantized():
        moved = layer.weight.to("meta")
        assert moved.is_meta and type(moved) is type(layer.weight)
        assert all(tensor.is_meta for tensor in parts(moved))
        assert not any(tensor.is_meta for tensor in parts(layer.weight))
    assert same(stored, copied(model.state_dict()))
    assert torch.equal(model(inputs()), net(kind)(inputs()))


def parts(weight):
    if isinstance(weight, bnb.nn.Int8Params):
        return [weight.CB, weight.SCB]
    return list(parameters.components_of(weight).values())


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_control_bitsandbytes_shares_what_it_moves(kind):
    model = net(kind)
    moved = model.body[0].weight.to("meta")
    assert moved.quant_state is model.body[0].weight.quant_state
    assert model.body[0].weight.quant_state.absmax.is_meta


@kinds
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_move_that_fails_in_the_middle_leaves_the_model_valid(kind, part, monkeypatch):
    """The move fails for the last component of a weight, or for the bias after it."""
    model = healed(kind)
    stored, expected = copied(model.state_dict()), net(kind)(inputs())
    layer = model.body[2]
    last = parts(layer.weight)[-1] if part == "weight" else layer.bias
    real = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if tensor is last or (part == "bias" and tensor.shape == last.shape):
            raise MemoryError("no room")
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(MemoryError):
        layer.to("meta")
    monkeypatch.undo()
    assert not on_meta(model)
    assert same(stored, copied(model.state_dict()))
    assert torch.equal(model(inputs()), expected)


@kinds
def test_a_moved_model_has_nothing_left_behind(kind):
    model = healed(kind)
    model(inputs())
    model.to("meta")
    assert len(on_meta(model)) == len(walk(model))
    assert all(len(layer._parameters) == 2 for layer in model.quantized())
    assert list(model.body[0]._parameters) == ["weight", "bias"]


@kinds
def test_a_deep_copy_shares_nothing(kind):
    model = healed(kind)
    for before in (False, True):  # True: after a forward pass, which leaves state in the module
        if before:
            model(inputs())
        other = copy.deepcopy(model)
        places = {slot.tensor.untyped_storage().data_ptr() for slot in walk(model)}
        assert places.isdisjoint(slot.tensor.untyped_storage().data_ptr() for slot in walk(other))
        assert getattr(other.body[0].weight, "module", other.body[0]) in (other.body[0], None)
        other.to("meta")
        assert torch.equal(model(inputs()), net(kind)(inputs()))


@kinds
def test_a_state_dict_holds_plain_tensors(kind):
    for state in (healed(kind).state_dict(), net(kind).state_dict()):
        assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    assert any(
        type(t) is not torch.Tensor for t in healed(kind).state_dict(keep_vars=True).values()
    )


@kinds
def test_torch_may_make_a_parameter_of_it(kind):
    weight = healed(kind).body[0].weight
    again = torch.nn.Parameter(weight, requires_grad=False)
    assert type(again) is type(weight)
    assert same(
        QuantizedWeight.from_parameter(again).state_dict(),
        QuantizedWeight.from_parameter(weight).state_dict(),
    )


@kinds
def test_a_cast_says_nothing_about_packed_bytes(kind):
    model = healed(kind)
    stored = copied(model.state_dict())
    for cast in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.float()):
        cast()
        now = copied(model.state_dict())
        assert all(same({n: now[n]}, {n: stored[n]}) for n in stored if not n.endswith("bias"))
    assert model.body[0].bias.dtype == torch.float32


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_bytes_stored_as_floats_are_not_cast(storage):
    def layer():
        torch.manual_seed(0)
        made = linear("nf4", 128, 64, quant_storage=storage)
        made.bias = None
        return made.to("cpu").eval()

    whole = ours.heal(layer()).half().float()
    assert whole.weight.dtype == storage
    assert torch.equal(whole(inputs()), layer()(inputs()))
    assert layer().half().float().weight.dtype == torch.float32  # bitsandbytes casts packed codes


@kinds
def test_weights_that_are_quantized_later_are_healed_too(kind):
    model = ours.heal(Net(kind))
    assert not any(parameters.is_packed(layer.weight) for layer in model.quantized())
    model.to("cpu")
    assert all(parameters.is_packed(layer.weight) for layer in model.quantized())
    model.body[0].weight.to("meta")
    assert torch.equal(model(inputs()), net(kind)(inputs()))


@kinds
def test_a_model_that_was_made_on_meta_goes_to_empty_memory(kind):
    model = healed(kind).to("meta")
    model.to_empty(device="cpu")
    assert on_meta(model) == []
    stored = net(kind).state_dict()
    assert {n: t.shape for n, t in model.state_dict().items() if "quant_state" not in n} == {
        n: t.shape for n, t in stored.items() if "quant_state" not in n
    }


@kinds
def test_ties_stay_where_torch_keeps_them(kind):
    model = net(kind)
    model.body.append(torch.nn.Linear(64, 128))
    model.body.append(linear(kind, 128, 64).to("cpu").eval())
    model.body[-1].weight = model.body[2].weight
    ours.heal(model)
    model.to("cpu")
    assert model.body[-1].weight is model.body[2].weight


@kinds
def test_a_healed_model_can_be_pickled(kind):
    model = healed(kind)
    expected = model(inputs())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert [type(each) for each in other.modules()][1:] == [type(each) for each in model.modules()][
        1:
    ]
    assert pickle.loads(pickle.dumps(type(other.body[1])))
    # For int8, neither torch nor bitsandbytes saves the parameter's class and scales.
    if kind == "int8":
        return
    assert torch.equal(other(inputs()), expected)


def own_globals(pickled: bytes) -> set[str]:
    """Return the functions and classes of loadstone that a pickle names."""
    names = [arg for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"]
    return {name for name in names if name.startswith("loadstone")}


def test_a_new_process_reads_pickles_by_public_names(tmp_path):
    model = healed("nf4+double").body
    pickled = pickle.dumps(model, protocol=2)
    assert own_globals(pickled) == {"loadstone.bitsandbytes rebuild_module"}
    earlier = pickled.replace(
        b"cloadstone.bitsandbytes\nrebuild_module\n",
        b"cloadstone._adapters.bitsandbytes.modules\n_rebuilt\n",
    )
    torch.save((pickled, earlier, inputs(), model(inputs())), tmp_path / "saved.pt")
    script = (
        "import pickle, sys, torch; *pickles, x, expected = torch.load(sys.argv[1]); "
        "assert all(torch.equal(pickle.loads(each)(x), expected) for each in pickles)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "saved.pt")], check=True)


@kinds
def test_classes_of_weights_are_pickled_by_public_names(kind):
    cls = type(healed(kind).body[0].weight)
    assert own_globals(pickle.dumps(cls, protocol=2)) == {f"loadstone.bitsandbytes {cls.__name__}"}
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_quantized_experts_are_pickled_by_public_names(tmp_path):
    cls, folder = by_name("mixtral").cls, plain("mixtral", tmp_path)
    model = loadstone.transformers.from_pretrained(
        cls, folder, quantize_experts=True, quantization_config=config("nf4")
    )
    experts = model.model.layers[0].mlp.experts
    pickled = pickle.dumps(experts, protocol=2)
    assert b"cloadstone.bitsandbytes\nrebuild_experts\n" in pickled
    assert b"loadstone._" not in pickled
    read_back = pickle.loads(pickled)
    assert type(read_back) is type(experts)
    assert torch.equal(read_back.down_proj[1], experts.down_proj[1])


@four_bit
def test_training_after_a_forward_pass_has_a_gradient(kind):
    """bitsandbytes alone would use the rearranged weight, which has no gradient."""
    model = healed(kind)
    model(inputs())
    model.train()
    x = inputs().requires_grad_(True)
    model(x).sum().backward()
    other = net(kind).train()
    y = inputs().requires_grad_(True)
    other(y).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.grad)


def test_int8_has_a_gradient():
    x, y = inputs().requires_grad_(True), inputs().requires_grad_(True)
    healed("int8")(x).sum().backward()
    net("int8")(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_what_is_no_model_is_refused():
    with pytest.raises(loadstone.Error) as caught:
        ours.heal("a name")
    assert caught.value.code == "plan.options"


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("width", [128, 96, 40])
def test_embeddings_are_moved_whole_too(kind, width):
    def table():
        torch.manual_seed(0)
        if kind == "int8":
            return bnb.nn.Embedding8bit(10, width).to("cpu")
        return bnb.nn.Embedding4bit(10, width, quant_type=kind).to("cpu")

    rows = torch.tensor([0, 3, 9])
    model = ours.heal(table())
    expected = model(rows)
    if width != 96:
        assert torch.equal(expected, table()(rows))
    copy.deepcopy(model).to("meta")
    model.weight.to("meta")
    assert torch.equal(model(rows), expected)
