"""torch.float4_e2m1fn_x2, which packs two values per element, in modules and all kinds of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import loadstone

PAIRS = torch.float4_e2m1fn_x2
CODES = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8, generator=torch.manual_seed(0))


class Packed(nn.Module):
    """A module with four-bit codes, and a float that is not their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(3, 5, 4, dtype=torch.uint8).view(PAIRS))
        self.gain = nn.Parameter(torch.zeros(2))


@pytest.fixture(scope="module", params=["safetensors", "pt"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / f"m.{request.param}"
    state = {"w": CODES.view(PAIRS), "gain": torch.tensor([1.5, -2.0])}
    (torch.save if request.param == "pt" else safetensors.torch.save_file)(state, path)
    return path


def built() -> Packed:
    with loadstone.skeleton():
        return Packed()


def by_saved_plan(model: Packed, file: Path) -> None:
    plan = file.with_name("plan.json")
    loadstone.plan(model, file).save(plan)
    loadstone.Plan.load(plan).execute(model=model)


WAYS = {
    "load": loadstone.load,
    "load in place": lambda model, file: loadstone.load(model, file, in_place=True),
    "views of the file": lambda model, file: loadstone.load(model, file, mmap=True),
    "in the file's dtypes": lambda model, file: loadstone.load(model, file, dtype="auto"),
    "a saved plan": by_saved_plan,
}


@pytest.mark.parametrize("make", [Packed, built])
@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_of_pairs_gets_the_bytes_of_the_file(way: str, make: type, file: Path) -> None:
    model = make()
    WAYS[way](model, file)
    assert (model.w.dtype, model.w.shape) == (PAIRS, CODES.shape)
    assert torch.equal(model.w.view(torch.uint8), CODES)
    assert torch.equal(model.gain.detach(), torch.tensor([1.5, -2.0]))
    assert loadstone.audit(model).ok


def test_each_file_gives_the_same_pairs(file: Path) -> None:
    assert loadstone.inspect(file).tensors["w"].shape == (3, 5, 8)  # the shape counts values
    for tensor in (loadstone.load_file(file)["w"], loadstone.open(file)["w"][:]):
        assert tensor.dtype == PAIRS
        assert torch.equal(tensor.view(torch.uint8), CODES)


def test_pairs_of_another_shape_are_refused(file: Path) -> None:
    model = Packed()
    model.register_buffer("w", torch.zeros(3, 5, 8, dtype=torch.uint8).view(PAIRS))
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(model, file)
    assert caught.value.code == "plan.shape"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pairs_are_not_cast(dtype: torch.dtype, file: Path) -> None:
    model = Packed()
    model.register_buffer("w", torch.zeros(3, 5, 8, dtype=dtype))
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(model, file)
    assert caught.value.code in ("plan.dtype", "plan.encoding")


def test_a_transposed_view_of_pairs_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": CODES.view(PAIRS).transpose(0, 1)}, tmp_path / "m.pt")
    with pytest.raises(loadstone.FormatError) as caught:
        loadstone.inspect(tmp_path / "m.pt")
    assert caught.value.code == "pt.unsupported"
    assert "'w'" in str(caught.value)
