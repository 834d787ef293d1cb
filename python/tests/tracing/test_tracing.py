"""Conversion code on symbols, against the same code on the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone.tracing import Symbol, Trace

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (3, 4, 2), "d": (8,)}
Code = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | torch.Tensor]


class Bare(torch.nn.Module):
    """A model with the given parameters."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            data = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


@pytest.fixture
def state(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["half"] = torch.randn(5, 3, generator=generator).to(torch.bfloat16)
    save_file(made, tmp_path / "model.safetensors")
    return made


def as_dict(made: dict[str, torch.Tensor] | torch.Tensor) -> dict[str, torch.Tensor]:
    return made if isinstance(made, dict) else {"made": made}


def load_traced(code: Code, folder: Path) -> dict[str, torch.Tensor]:
    """Load with recipes traced from the code; return the tensors."""
    catalog = loadstone.inspect(folder)
    trace = Trace(catalog)
    made = as_dict(code({name: trace.source(name) for name in catalog.encodings()}))
    for name, symbol in made.items():
        trace.add(name, symbol)
    from loadstone._execute.plan import Plan
    from loadstone._plan.planning import make_plan
    from loadstone._plan.recipes import LibraryRecipes

    traced = LibraryRecipes(trace.finish())
    model = Bare(made)
    Plan(make_plan(model, catalog, traced)).execute()
    return dict(model.named_parameters())


MOVEMENTS: dict[str, Code] = {
    "stack": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "cat": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "cat with an empty one": lambda t: torch.cat([t["a"][:0], t["a"]]),
    "chunk": lambda t: dict(zip("xyz", t["a"].chunk(3, dim=0), strict=True)),
    "split by sizes": lambda t: dict(zip("xy", t["a"].split([1, 5]), strict=True)),
    "split into parts": lambda t: dict(zip("xy", t["a"].split(3, dim=1), strict=True)),
    "unbind": lambda t: dict(zip("xyz", t["c"].unbind(0), strict=True)),
    "slices": lambda t: t["a"][1:-1, ::2],
    "negative slice": lambda t: t["a"][-2:],
    "select": lambda t: t["c"][1, :, 0],
    "transpose": lambda t: t["c"].transpose(0, 2).contiguous(),
    "t": lambda t: t["a"].T,
    "permute": lambda t: t["c"].permute(2, 0, 1).reshape(2, 12),
    "rope": lambda t: t["a"].view(3, 2, 4).transpose(1, 2).reshape(6, 4),
    "interleave": lambda t: torch.stack([t["a"], t["b"]], dim=1).flatten(0, 1),
    "unsqueeze and squeeze": lambda t: t["a"].unsqueeze(1).squeeze(),
    "expand": lambda t: t["d"].expand(3, 8).contiguous(),
    "repeat": lambda t: t["a"].repeat(2, 1, 2),
    "flip": lambda t: t["a"].flip(0),
    "index by numbers": lambda t: t["a"][torch.tensor([3, 4, 0, -1])],
    "index by a mask": lambda t: t["a"][:, torch.tensor([True, False, False, True])],
    "index_select": lambda t: t["c"].index_select(1, torch.tensor([2, 0])),
    "cast": lambda t: t["half"].float(),
    "cast down": lambda t: t["a"].to(torch.float16),
    "cast, then move": lambda t: t["half"].to(torch.float32).T.contiguous(),
    "promotion": lambda t: torch.cat([t["half"], t["half"].float()]),
    "detach, clone, alias": lambda t: t["a"].detach().clone().view_as(t["a"]),
    "constant": lambda t: torch.arange(6.0),
    "zeros of its form": lambda t: torch.zeros_like(t["a"]),
    "several": lambda t: {"x": torch.cat([t["a"], t["b"]]).chunk(4)[2], "y": t["d"][2:]},
}


@pytest.mark.parametrize("name", MOVEMENTS)
def test_movement_is_as_on_tensors(name: str, state, tmp_path: Path):
    wanted = as_dict(MOVEMENTS[name](state))
    found = load_traced(MOVEMENTS[name], tmp_path)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def test_a_wrong_recipe_is_seen(state, tmp_path: Path):
    """Control of the comparison above."""
    found = load_traced(lambda t: t["a"].flip(0), tmp_path)
    assert not torch.equal(found["made"], state["a"])


REFUSED: dict[str, tuple[Code, str, str]] = {
    "item": (lambda t: t["a"][0, 0].item(), "plan.data_dependent", "_local_scalar_dense"),
    "branch": (
        lambda t: t["a"] if t["a"][0, 0] else t["b"],
        "plan.data_dependent",
        "_local_scalar_dense",
    ),
    "tolist": (lambda t: t["d"].tolist(), "plan.data_dependent", "tolist"),
    "numpy": (lambda t: t["d"].numpy(), "plan.data_dependent", "numpy"),
    "equal": (lambda t: torch.equal(t["a"], t["b"]), "plan.data_dependent", "equal"),
    "arithmetic": (lambda t: t["a"] + 1, "plan.untraceable", "add"),
    "product": (lambda t: t["a"] * t["b"], "plan.untraceable", "mul"),
    "in place": (lambda t: t["a"].mul_(2), "plan.untraceable", "mul_"),
    "written into": (lambda t: torch.zeros(6, 4).copy_(t["a"]), "plan.untraceable", "copy_"),
    "joined with made values": (
        lambda t: torch.cat([t["a"], torch.zeros(1, 4)]),
        "plan.untraceable",
        "cat",
    ),
    "bits as another dtype": (lambda t: t["a"].view(torch.int32), "plan.untraceable", "view"),
    "looked up": (lambda t: t["a"][t["d"].long()], "plan.untraceable", "_to_copy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_code_is_refused_by_name(name: str, state, tmp_path: Path):
    code, expected, operation = REFUSED[name]
    with pytest.raises(loadstone.PlanError) as caught:
        load_traced(code, tmp_path)
    assert caught.value.code == expected
    text = str(caught.value)
    assert operation in caught.value.found or operation in text
    assert "test_tracing" in text  # the calling function
    assert caught.value.tensor in state  # and the checkpoint's tensor


def test_rounding_twice_is_refused(state, tmp_path: Path):
    with pytest.raises(loadstone.PlanError, match=r"round.*plan\.untraceable"):
        load_traced(lambda t: t["a"].to(torch.float16).to(torch.bfloat16), tmp_path)


def test_a_source_that_is_not_there_is_named(state, tmp_path: Path):
    with pytest.raises(loadstone.PlanError, match="absent"):
        Trace(loadstone.inspect(tmp_path)).source("absent")


def test_a_symbol_tells_its_form_and_no_values(state, tmp_path: Path):
    symbol = Trace(loadstone.inspect(tmp_path)).source("c")
    assert isinstance(symbol, Symbol)
    assert symbol.shape == (3, 4, 2)
    assert symbol.dtype == torch.float32
    assert symbol.device.type == "cpu"
    assert "'c'" in repr(symbol) or "c" in repr(symbol)


def test_no_data_is_read(state, tmp_path: Path):
    """A checkpoint with a header, but without data."""
    whole = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    sparse = tmp_path / "sparse" / "model.safetensors"
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.write(whole[:header])
        file.truncate(len(whole))
    catalog = loadstone.inspect(sparse)
    trace = Trace(catalog)
    made = torch.cat([trace.source("a"), trace.source("b")])
    assert made.shape == (12, 4)
