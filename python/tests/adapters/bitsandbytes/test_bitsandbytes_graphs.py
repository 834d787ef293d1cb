"""Tests quantized layers with torch.compile, export, jit.trace and activation checkpointing.

For each combination, loadstone's result is correct, or both bitsandbytes and loadstone raise.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
from bitsandbytes_models import copied, linear, same_bytes
from pairs import pairs
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

import loadstone
import loadstone.bitsandbytes as ours
from loadstone._adapters import patch

FOUR_BIT = ("nf4", "nf4+double")  # without fp4, which runs the same code
KINDS = (*FOUR_BIT, "int8")
# Rows of whole blocks, rows that bitsandbytes decodes wrongly, outputs that it cannot rearrange.
SHAPES = [(128, 64), (80, 64), (128, 40)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net(kind: str, shape: tuple[int, int], train: bool = False) -> torch.nn.Module:
    """Return two layers, quantized by bitsandbytes on the CPU."""
    torch.manual_seed(0)
    inputs, outputs = shape
    options = {} if kind == "int8" else {"compute_dtype": torch.bfloat16}
    layers = (linear(kind, inputs, outputs, **options), linear(kind, outputs, inputs, **options))
    model = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1])
    return model.to(dtype(kind)).to("cpu").train(train)


def dtype(kind: str) -> torch.dtype:
    return torch.float16 if kind == "int8" else torch.bfloat16


def rows(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(16, shape[0], generator=torch.Generator().manual_seed(1)).to(dtype(kind))


class Checkpointed(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.model, x, use_reentrant=self.reentrant)


def compiled(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")(x)


WAYS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "compile": compiled,
    "export": lambda model, x: torch.export.export(model, (x,), strict=True).module()(x),
    "trace": lambda model, x: torch.jit.trace(model, (x,))(x),
    "checkpoint": lambda model, x: Checkpointed(model)(x),
    "reentrant": lambda model, x: Checkpointed(model, reentrant=True)(x),
    "compiled checkpoint": lambda model, x: compiled(Checkpointed(model), x),
}
RECORDED = ("export", "trace")


def healed(kind: str, shape: tuple[int, int], train: bool = False) -> torch.nn.Module:
    return ours.heal(net(kind, shape, train))


def moved_inside(kind: str, shape: tuple[int, int], train: bool = False) -> torch.nn.Module:
    with loadstone.patch("bitsandbytes"):
        return net(kind, shape, train)


MODELS = ((healed, False), (moved_inside, True))  # flag: the model runs under a patch
Result = list[torch.Tensor] | Exception


def result(
    way: Callable[[torch.nn.Module, torch.Tensor], Any],
    model: torch.nn.Module,
    x: torch.Tensor,
    train: bool,
) -> Result:
    """Return the outputs, and the gradient if the model trains; or the exception."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_(train)
    try:
        with torch.set_grad_enabled(train):
            y = way(model, x)
        if train:
            y.float().sum().backward()
        if isinstance(y, FakeTensor):
            return ValueError("the graph has a constant without a value")
    except Exception as error:
        return error
    return [y.detach(), x.grad] if train else [y]


def expected(kind: str, shape: tuple[int, int], train: bool, way: str) -> Result:
    """Return the patched model's outputs; for saved graphs, those of the portable CPU code."""
    model = healed(kind, shape, train)
    for layer in (model[0], model[2]):
        if kind != "int8":
            layer.is_recorded = way in RECORDED
    return result(lambda model, x: model(x), model, rows(kind, shape), train)


def is_right(found: Result, wanted: Result) -> bool:
    assert not isinstance(wanted, Exception)
    return not isinstance(found, Exception) and all(
        torch.equal(left, right) for left, right in zip(found, wanted, strict=True)
    )


CELLS = pairs(  # pairwise combinations: (kind, shape), way, (model, training)
    list(itertools.product(KINDS, SHAPES)),
    list(WAYS),
    list(itertools.product(MODELS, [False, True])),
)


@pytest.mark.parametrize(("cell", "way", "use"), CELLS)
def test_a_cell_is_right_or_the_librarys_own_fails_there(cell: Any, way: str, use: Any) -> None:
    (kind, shape), ((make, patched), train) = cell, use
    x = rows(kind, shape)
    trains = train and way != "export"  # an exported graph has no backward pass
    wanted = expected(kind, shape, trains, way)
    model = make(kind, shape, train)
    healing = loadstone.patch("bitsandbytes")
    if patched:
        healing.start()
    try:
        found = result(WAYS[way], model, x, trains)
    finally:
        healing.stop()
    if not is_right(found, wanted):
        library = result(WAYS[way], net(kind, shape, train), x, trains)
        assert isinstance(library, Exception), found
        assert isinstance(found, Exception), "wrong, and no error"


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_no_break_where_the_library_has_none(kind: str) -> None:
    def breaks(model: torch.nn.Module) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(model, backend="eager")(rows(kind, SHAPES[0]))
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    with torch.no_grad():
        alone = breaks(net(kind, SHAPES[0]))
        assert breaks(healed(kind, SHAPES[0])) == alone
        with loadstone.patch("bitsandbytes"):
            assert breaks(net(kind, SHAPES[0])) == alone
        healing = loadstone.patch("bitsandbytes").start()
        assert breaks(net(kind, SHAPES[0])) == alone
        healing.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_gate_that_dynamo_traces_breaks_the_graph(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: False)
    model = net(kind, SHAPES[0])
    healing = loadstone.patch("bitsandbytes").start()
    try:
        found = result(compiled, model, rows(kind, SHAPES[0]), False)
    finally:
        healing.stop()
    assert isinstance(found, torch._dynamo.exc.Unsupported)
    assert patch.active.__name__ in str(found)


def test_control_bitsandbytes_alone_is_wrong_somewhere() -> None:
    kind, shape = "nf4", SHAPES[1]
    wanted = expected(kind, shape, True, "compile")
    found = result(compiled, net(kind, shape, True), rows(kind, shape), True)
    if isinstance(found, Exception) or is_right(found, wanted):
        pytest.skip("bitsandbytes does not vectorise on this CPU")


@pytest.mark.parametrize("kind", FOUR_BIT)
@pytest.mark.parametrize("way", RECORDED)
def test_a_recorded_graph_stays_right_and_later_runs_keep_the_layout(kind: str, way: str) -> None:
    """The recorded graph shares the weight's memory, so later runs must not rearrange it."""
    model, x, shape = healed(kind, SHAPES[0]), rows(kind, SHAPES[0]), SHAPES[0]
    before = copied(model.state_dict())
    wanted = expected(kind, shape, False, way)
    with torch.no_grad():
        graph = (
            torch.export.export(model, (x,), strict=True).module()
            if way == "export"
            else torch.jit.trace(model, (x,))
        )
        assert is_right([graph(x)], wanted)
        assert is_right([model(x)], wanted)
        assert same_bytes(model.state_dict(), before)
        assert is_right([graph(x)], wanted)


@pytest.mark.parametrize("kind", FOUR_BIT)
@pytest.mark.parametrize("way", RECORDED)
def test_a_rearranged_weight_is_not_recorded_and_the_advice_works(kind: str, way: str) -> None:
    model, x = healed(kind, SHAPES[0]), rows(kind, SHAPES[0])
    with torch.no_grad():
        model(x)
        if not getattr(model[0].weight.quant_state, "packing_format_for_cpu", False):
            pytest.skip("nothing is rearranged on this CPU")
        found = result(WAYS[way], model, x, False)
        assert isinstance(found, loadstone.Error) and found.code == "plan.options"
        assert "state_dict()" in str(found)
        model.state_dict()
        wanted = expected(kind, SHAPES[0], False, way)
        assert is_right(result(WAYS[way], model, x, False), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_runs_between_other_uses_stay_right(kind: str) -> None:
    model, x = healed(kind, SHAPES[0]), rows(kind, SHAPES[0])
    with torch.no_grad():
        before, wanted = copied(model.state_dict()), model(x)
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        trained = healed(kind, SHAPES[0], True)(x)
        for _ in range(2):
            assert torch.equal(graph(x), wanted) and torch.equal(model(x), wanted)
            assert same_bytes(model.state_dict(), before)
            model.train()
            assert torch.equal(graph(x), trained)
            model.eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_layers_are_right_or_refused(kind: str, way: str) -> None:
    x = rows(kind, SHAPES[0])
    wanted = expected(kind, SHAPES[0], False, way)
    model = healed(kind, SHAPES[0])
    accelerate.cpu_offload(model, execution_device="cpu")
    found = result(WAYS[way], model, x, False)
    assert isinstance(found, Exception) or is_right(found, wanted)
    if way == "compile":
        with torch.no_grad():  # graph breaks are allowed, because accelerate's hooks cause them
            assert is_right([torch.compile(model, backend="aot_eager")(x)], wanted)
