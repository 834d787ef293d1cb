"""Tests that a model built in a skeleton block has the tensors of a direct construction."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import numpy
import pytest
import torch
from storages import sharers
from torch import nn

from loadstone._model.walk import walk
from loadstone._skeleton.skeleton import recompute, skeleton, skeleton_record

LARGE = (1 << 20,)  # 4 MiB of float32: larger than the tensors that stay real while building


def build(make):
    with skeleton():
        return make()


def slots(model):
    return {slot.name: slot for slot in walk(model)}


def codes(model):
    return {(found.code, found.target) for found in skeleton_record(model).findings}


def assert_as_constructed(make, *, excluded=(), derived=()):
    """Check that the skeleton equals a direct construction, except for the parameters' values."""
    made, direct = build(make), make()
    mine, truth = slots(made), slots(direct)
    assert list(mine) == list(truth)
    shared, truly_shared = sharers(mine.values()), sharers(truth.values())
    for name, slot in mine.items():
        other = truth[name]
        assert (slot.kind, slot.tie_of) == (other.kind, other.tie_of), name
        assert shared[name] == truly_shared[name], name
        assert type(slot.tensor) is type(other.tensor), name
        assert slot.tensor.dtype == other.tensor.dtype, name
        assert slot.tensor.shape == other.tensor.shape, name
        assert slot.tensor.requires_grad == other.tensor.requires_grad or name in derived, name
        if mine[slot.tie_of or name].kind == "parameter" or name in derived:
            assert slot.tensor.is_meta, name
        elif name not in excluded:
            assert slot.tensor.device == other.tensor.device, name
            assert torch.equal(slot.tensor, other.tensor), name
    return made, direct


class Module(nn.Module):
    """A module that calls the given function on itself in its constructor."""

    def __init__(self, construct):
        super().__init__()
        construct(self)


def of(construct):
    return lambda: Module(construct)


# --- parameters ----------------------------------------------------------------------------------


def test_usual_layers_have_no_memory_and_keep_their_form():
    def construct(m):
        m.linear = nn.Linear(3, 4)
        m.conv = nn.Conv2d(3, 8, 3, dtype=torch.bfloat16)
        m.norm = nn.BatchNorm1d(4)
        m.embedding = nn.Embedding(2048, 1024, padding_idx=1)
        m.lstm = nn.LSTM(4, 4, num_layers=2)
        m.attention = nn.MultiheadAttention(64, 4)
        m.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 3)
        m.table = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(LARGE)})

    made, _ = assert_as_constructed(of(construct))
    assert codes(made) == set()


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), LARGE])
@pytest.mark.parametrize("factory", [torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn])
def test_a_parameter_from_any_factory_lies_on_meta(factory, shape):
    made, _ = assert_as_constructed(of(lambda m: setattr(m, "p", nn.Parameter(factory(shape)))))
    assert made.p.untyped_storage().data_ptr() == 0
    assert codes(made) == set()


def test_a_parameter_from_old_constructors_and_numpy_lies_on_meta():
    def construct(m):
        m.a = nn.Parameter(torch.Tensor(3, 4))
        m.b = nn.Parameter(torch.FloatTensor([1.0, 2.0]))
        m.c = nn.Parameter(torch.from_numpy(numpy.ones(5, dtype=numpy.float32)))
        m.d = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

    assert_as_constructed(of(construct))


def test_requires_grad_class_and_attributes_of_a_parameter_stay():
    class Special(nn.Parameter):
        pass

    def construct(m):
        m.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        m.special = Special(torch.ones(3))
        m.special.mark = ["kept"]
        m.large = Special(torch.ones(LARGE))
        m.large.mark = 7
        m.later = nn.Parameter(torch.ones(3))
        m.later.requires_grad_(False)

    made, _ = assert_as_constructed(of(construct))
    assert made.special.mark == ["kept"] and made.large.mark == 7
    assert not made.frozen.requires_grad and not made.later.requires_grad


@pytest.mark.parametrize("shape", [(4, 4), (1024, 1024)])
def test_ties_keep_the_one_object(shape):
    def construct(m):
        m.first = nn.Linear(*shape, bias=False)
        m.second = nn.Linear(*shape, bias=False)
        held = nn.Parameter(torch.randn(shape))
        m.first.weight = held
        m.second.weight = held
        m.shared = m.first
        m.held = [held]

    made, _ = assert_as_constructed(of(construct))
    assert made.first.weight is made.second.weight is made.held[0]
    assert slots(made)["second.weight"].tie_of == "first.weight"
    assert slots(made)["held[0]"].tie_of == "first.weight"


def test_two_parameters_in_one_memory_stay_so():
    def construct(m):
        whole = torch.randn(2, 3)
        m.a, m.b = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        large = torch.randn(2, 1 << 19)
        m.c, m.d = nn.Parameter(large[0]), nn.Parameter(large[1])

    made, _ = assert_as_constructed(of(construct))
    assert sharers(walk(made))["b"] == "a"
    assert sharers(walk(made))["d"] == "c"


def test_initialisers_cost_nothing_and_draw_nothing():
    def construct(m):
        m.weight = nn.Parameter(torch.empty(512, 512))
        before = torch.get_rng_state()
        for initialise in (
            nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.xavier_uniform_,
            nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.ones_, nn.init.eye_,
        ):  # fmt: skip
            initialise(m.weight)
        nn.init.sparse_(m.weight, 0.5)
        m.weight.data.normal_().mul_(2).clamp_(-1, 1)
        m.drew = not torch.equal(before, torch.get_rng_state())

    made, direct = assert_as_constructed(of(construct))
    assert direct.drew  # control: a direct construction does draw random values
    assert not made.drew


def test_a_parameter_of_somebody_else_is_left_alone():
    outer = nn.Parameter(torch.randn(4))
    value = outer.detach().clone()
    with skeleton():
        inner = Module(lambda m: setattr(m, "p", outer))
    assert inner.p is outer and not outer.is_meta and torch.equal(outer, value)


def test_a_parameter_put_in_past_registration_goes_to_meta():
    def construct(m):
        m._parameters["p"] = nn.Parameter(torch.ones(3))
        clone = copy.deepcopy(nn.Linear(1024, 1024))
        m.inner = clone

    assert_as_constructed(of(construct))


def test_data_may_be_assigned():
    def construct(m):
        m.small = nn.Linear(3, 3, bias=False)
        m.small.weight.data = torch.eye(3)
        m.large = nn.Linear(1024, 1024, bias=False)
        m.large.weight.data = torch.eye(1024)
        m.large.weight.data = m.large.weight.data.half()
        m.other = nn.Linear(1024, 1024).to(torch.float64)

    assert_as_constructed(of(construct))


def test_lazy_parameters_are_named():
    made = build(lambda: nn.Sequential(nn.LazyLinear(3)))
    assert ("skeleton.not_replayable", "0.weight") in codes(made)


# --- other tensors -------------------------------------------------------------------------------


@dataclasses.dataclass
class Cache:
    cos: torch.Tensor
    more: list


class Slotted:
    __slots__ = ("code",)


@pytest.mark.parametrize("count", [10, *LARGE])
def test_buffers_and_plain_tensors_are_as_constructed(count):
    def construct(m):
        steps = torch.arange(count)
        m.register_buffer("steps", steps)
        m.register_buffer("cos", (steps * 0.5).cos(), persistent=False)
        m.plain = torch.linspace(0, 1, count)
        m.freqs = [
            torch.outer(torch.arange(3.0), torch.ones(count // 2)),
            (torch.full((count,), 2),),
        ]
        m.by_name = {"x": torch.polar(torch.ones(count), torch.linspace(0, 6, count))}
        m.cache = Cache(torch.ones(count), [torch.zeros(count)])
        m.slotted = Slotted()
        m.slotted.code = torch.eye(int(math.sqrt(count)))
        held = torch.ones(count)
        m.call = lambda: held
        m.holder = nn.Parameter(torch.ones(3))
        m.holder.quant = Cache(torch.zeros(count), [])

    made, direct = assert_as_constructed(of(construct))
    assert torch.equal(made.call(), direct.call())  # a closure's tensor, which no walk finds
    assert not made.call().is_meta
    assert codes(made) == set()


@pytest.mark.parametrize("count", [12, *LARGE])
def test_writes_and_views_come_out_as_constructed(count):
    def construct(m):
        table = torch.zeros(count // 2, 2)
        table[:, 0] = torch.arange(count // 2).sin()
        table[:, 1].add_(3).mul_(torch.tensor(2.0))
        table[1] = 7
        m.register_buffer("table", table, persistent=False)
        m.column = table[:, 1]
        m.turned = table.t()[1:]
        m.swapped = torch.empty(count).fill_(1)
        m.swapped.view(-1, 2)[:, 0] = 5
        early = m.swapped.clone()
        m.swapped.zero_()
        m.early = early

    made, _ = assert_as_constructed(of(construct))
    made.table[0, 1] = 99
    assert made.column[0] == 99  # the views still share memory


@pytest.mark.parametrize("count", [12, *LARGE])
def test_values_may_be_read_while_constructing(count):
    def construct(m):
        table = torch.arange(count).float()
        m.item = table[3].item()
        m.flag = bool(table[5] > 2)
        m.rows = table[:4].tolist()
        m.array = (table * 2).numpy()
        m.count = len(torch.nonzero(table > 5))
        m.text = repr(table)
        m.device = str(table.device)
        shared = torch.ones(count)
        shared.numpy()[1] = 4
        m.shared = shared
        m.after = shared * 2
        m.chosen = table[table > 3]

    made, direct = assert_as_constructed(of(construct))
    for name in ("item", "flag", "rows", "count", "text", "device"):
        assert getattr(made, name) == getattr(direct, name), name
    assert numpy.array_equal(made.array, direct.array)


def test_real_and_recorded_operands_mix():
    def construct(m):
        large, small = torch.ones(LARGE), torch.arange(LARGE[0] // 2).float()
        m.sum = large[: small.numel()] + small
        large[::2] = small
        m.large = large
        m.real = torch.zeros(small.numel())
        m.real.copy_(large[1::2])
        scale = torch.tensor([2.0])
        m.scaled = large * scale
        scale.fill_(50)  # must not affect `scaled`, which was computed before
        m.joined = torch.cat([large, torch.zeros(3)])

    assert_as_constructed(of(construct))


def test_devices_look_as_in_a_direct_construction():
    def construct(m):
        m.linear = nn.Linear(4, 4)
        m.wide = nn.Linear(1024, 1024)
        m.seen = [m.linear.weight.device.type, m.wide.weight.is_meta, m.wide.weight.is_cpu]
        m.position = torch.arange(4, device=m.linear.weight.device)
        m.ones = m.wide.weight.new_ones(4)
        m.like = torch.zeros_like(m.wide.weight)
        m.moved = torch.ones(3).to(m.wide.weight.device)

    made, direct = assert_as_constructed(of(construct))
    assert made.seen == direct.seen == ["cpu", False, True]
    with skeleton():
        linear = nn.Linear(2, 2)
        assert linear.weight.is_meta and linear.weight.device.type == "meta"  # not "cpu" in here


def test_default_dtypes_and_device_contexts_are_followed():
    def construct(m):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        m.scale = torch.tensor(0.3)
        m.large = torch.linspace(0, 1, *LARGE)
        m.divided = torch.arange(*LARGE) / 7
        m.linear = nn.Linear(2, 2)
        torch.set_default_dtype(before)
        with torch.device("cpu"):
            m.there = torch.ones(*LARGE)
            m.other = nn.Linear(2, 2)
        with torch.device("meta"):
            m.nothing = nn.Linear(2, 2)

    made, _ = assert_as_constructed(of(construct))
    assert made.large.dtype == torch.bfloat16


def test_meta_by_the_constructors_own_wish_is_named():
    made = build(of(lambda m: setattr(m, "here", torch.ones(3)) or m.register_buffer(
        "gone", torch.ones(3, device="meta"))))  # fmt: skip
    assert made.gone.is_meta
    assert codes(made) == {("skeleton.not_replayable", "gone")}


# --- random values -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [12, *LARGE])
def test_values_drawn_at_random_are_named_and_only_these(count):
    def construct(m):
        m.linear = nn.Linear(3, 3)
        m.register_buffer("drawn", torch.randn(count))
        m.follows = m.drawn * 2 + 1
        m.shuffled = [torch.randperm(count)]
        m.written = torch.zeros(count)
        m.written[: count // 2].uniform_()
        m.overwritten = torch.randn(count).fill_(3)
        m.constant = torch.ones(count)
        own = torch.Generator().manual_seed(4)
        m.own = torch.randn(count, generator=own)
        m.parameter = nn.Parameter(torch.randn(count))

    random = {"drawn", "follows", "shuffled[0]", "written"}
    made, _ = assert_as_constructed(of(construct), excluded=random)
    assert codes(made) == {("skeleton.random", name) for name in random}
    assert all(not slots(made)[name].tensor.is_meta for name in random)


def test_a_shared_generator_is_random_once_a_draw_was_left_out():
    def construct(m):
        own = torch.Generator().manual_seed(4)
        m.weight = nn.Parameter(torch.empty(4))
        m.weight.data.normal_(generator=own)
        m.drawn = torch.randn(4, generator=own)

    assert codes(build(of(construct))) == {("skeleton.random", "drawn")}


@pytest.mark.parametrize("count", [12, *LARGE])
def test_memory_never_written_to_is_named(count):
    def construct(m):
        m.blank = torch.empty(count)
        m.filled = torch.empty(count).zero_()
        m.by_numpy = torch.empty(count)
        m.by_numpy.numpy()[:] = 3

    made, _ = assert_as_constructed(of(construct), excluded={"blank"})
    assert codes(made) == {("skeleton.uninitialised", "blank")}


def test_a_random_value_that_decides_is_named():
    def construct(m):
        m.linear = nn.Linear(16, 16)
        m.flag = bool(m.linear.weight.sum() > 0)

    assert ("skeleton.random", "") in codes(build(of(construct)))

    def settled(m):
        m.norm = nn.LayerNorm(16)
        m.total = m.norm.weight.sum().item()
        m.rows = m.norm.weight.tolist()

    made = build(of(settled))
    assert made.total == 16 and made.rows == [1.0] * 16 and codes(made) == set()


# --- derived from parameters ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_follows_from_parameters_is_recomputed(width):
    def construct(m):
        m.linear = nn.Linear(width, width)
        m.normed = nn.utils.weight_norm(nn.Linear(width, width))
        m.row = m.linear.weight[1]
        m.doubled = m.linear.weight.detach() * 2
        m.settled = nn.LayerNorm(width).weight.detach() * 3
        table = torch.arange(float(width))
        m.table = table
        m.learned = nn.Parameter(table)

    derived = {"row", "doubled", "normed.weight", "table"}
    made, direct = assert_as_constructed(of(construct), derived=derived)
    assert codes(made) == {("skeleton.derived", name) for name in derived}
    record = skeleton_record(made)
    assert set(record.derived["normed.weight"]) == {"normed.weight_g", "normed.weight_v"}
    for slot in walk(made):
        if slot.kind == "parameter":
            slot.replace(nn.Parameter(slots(direct)[slot.name].tensor.detach().clone()))
    assert set(recompute(made)) == derived
    for name in derived:
        assert torch.equal(slots(made)[name].tensor, slots(direct)[name].tensor), name
    made.linear.weight.data[1, 0] = 5
    assert made.row[0] == 5  # `row` is a view of the current parameter
    again = derived - {"row", "table"}  # the omitted views share the parameter's memory
    assert codes(made) == {("skeleton.derived", name) for name in again}


def test_recompute_takes_the_dtype_of_the_loaded_parameter():
    made = build(of(lambda m: setattr(m, "linear", nn.Linear(4, 4)) or setattr(
        m, "row", m.linear.weight[1])))  # fmt: skip
    made.linear.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    recompute(made)
    assert made.row.dtype == torch.bfloat16 and made.row.tolist() == [1.0] * 4


def test_recompute_refuses_while_a_parameter_has_no_value():
    from loadstone._base.errors import Error

    made = build(of(lambda m: setattr(m, "linear", nn.Linear(4, 4)) or setattr(
        m, "row", m.linear.weight[1])))  # fmt: skip
    with pytest.raises(Error) as caught:
        recompute(made)
    assert caught.value.code == "skeleton.not_replayable"


def test_parametrizations_build():
    def construct(m):
        m.a = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        m.b = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    made = build(of(construct))
    assert all(parameter.is_meta for parameter in made.parameters())


def test_tensors_are_made_real_wherever_they_are_held():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.listed = [nn.Parameter(torch.zeros(LARGE))]
            hidden = nn.Parameter(torch.ones(LARGE))
            self.closure = lambda: hidden
            self.call = functools.partial(print, torch.full(LARGE, 2.0))
            self.weight = nn.Parameter(torch.randn(8))
            self.again = [nn.Parameter(self.weight.data)]

    with skeleton():
        made = Holder()
        layers = [copy.deepcopy(nn.Linear(size, size)) for size in (2, 1024)]
        copied = copy.deepcopy(made)
        loose = [nn.Parameter(torch.full(LARGE, 3.0))]
    for number, value in enumerate((made.listed[0], made.closure(), made.call.args[0], loose[0])):
        assert torch.equal(value, torch.full(LARGE, float(number)))
    assert torch.equal(copied.listed[0], torch.zeros(LARGE))
    on_meta = [made.weight, made.again[0], copied.weight, layers[0].weight, layers[1].weight]
    assert all(each.is_meta for each in on_meta)
    assert sharers(walk(made))["again[0]"] == "weight"


def test_parameters_can_be_swapped_while_constructing():
    with skeleton():
        made = nn.Linear(4, 4)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            made.half()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert made.weight.is_meta and made.weight.dtype == torch.half
