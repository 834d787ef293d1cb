"""Tests that the model gets the same values, whatever a server's loading code does to tensors."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from codec_files import CODECS
from codec_models import assert_equal
from command import run
from compare import same

import loadstone
from loadstone._adapters.serving.converted import plan_conversion
from loadstone._adapters.serving.loading import ModelLoad
from loadstone._adapters.serving.options import ConversionOptions, Options
from loadstone._adapters.serving.receipts import save
from loadstone._files.receipt import Receipt

ROWS, COLUMNS = 8, 6
Tensors = Iterator[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """A model with one parameter, and custom loading code."""

    def __init__(self, take: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((ROWS, COLUMNS), torch.nan))
        self._take = take

    def load_weights(self, weights: Tensors) -> None:
        for _, tensor in weights:
            self._take(self.weight, tensor)


def loaded(path: Path, model: torch.nn.Module, **options: Any) -> tuple[str, bool]:
    loading = ModelLoad(Options(**options), "BF16")
    load: Any = model.load_weights
    return loading.run(
        lambda: load(loading.tensors(str(path), lambda name: True)),
        model,
        str(path),
        lambda name, module: False,
    )


@pytest.fixture
def values(tmp_path: Path) -> torch.Tensor:
    tensor = torch.randn(ROWS, COLUMNS)
    loadstone.torch.save_file({"weight": tensor}, tmp_path / "model.safetensors")
    return tensor


def zeroed(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    tensor.zero_()  # as gpt_oss does on all ranks except the first
    weight.data.copy_(tensor)


def scaled_all(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 2.0)
    weight.data.copy_(tensor)


def scaled_a_view(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    before = tensor[2:4]
    assert tensor.sum().item() != 0  # forces a read of the tensor
    tensor.view(-1)[: 3 * COLUMNS].mul_(2)
    weight.data.copy_(tensor)
    weight.data[6:8].copy_(before)


def added_to_a_copy(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    weight.data.copy_(tensor.clone().add_(1))


def by_a_matrix_of_flags(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    flags = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    weight.data.copy_(tensor[flags].view(ROWS, COLUMNS))


IN_PLACE = [zeroed, scaled_all, scaled_a_view, added_to_a_copy]


@pytest.mark.parametrize("take", [*IN_PLACE, by_a_matrix_of_flags])
def test_what_needs_memory_gets_it(take: Any, values: torch.Tensor, tmp_path: Path) -> None:
    model, expected = Model(take), Model(take)
    line, is_as_always = loaded(tmp_path, model)
    expected.load_weights(iter([("weight", values.clone())]))
    assert same(model.weight.data, expected.weight.data)
    if take in IN_PLACE:  # the run was repeated with whole tensors, and the log gives the reason
        assert not is_as_always and "each tensor was read whole, as" in line
        assert "'weight'" in line or "a tensor" in line


def _element_by_element(tensor: torch.Tensor) -> torch.Tensor:
    found: list[float] = []
    tensor.map_(tensor, lambda one, _: found.append(one) or one)  # type: ignore[func-returns-value]
    return torch.tensor(found).view(tensor.shape)


def _by_address(tensor: torch.Tensor) -> torch.Tensor:
    kind = ctypes.c_float * tensor.numel()
    return torch.tensor(list(kind.from_address(tensor.data_ptr()))).view(tensor.shape)


def _by_storage(storage: Any, tensor: torch.Tensor) -> torch.Tensor:
    kind = ctypes.c_float * tensor.numel()
    return torch.tensor(list(kind.from_address(storage.data_ptr()))).view(tensor.shape)


LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tolist": lambda tensor: torch.tensor(tensor.tolist()),
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
    "asarray": lambda tensor: torch.from_numpy(np.asarray(tensor) * 1),
    "from_dlpack": lambda tensor: torch.from_numpy(np.from_dlpack(tensor).copy()),
    "data_ptr": _by_address,
    "untyped_storage": lambda tensor: _by_storage(tensor.untyped_storage(), tensor),
    "storage": lambda tensor: _by_storage(tensor.storage(), tensor),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "map_": _element_by_element,
    "sum": lambda tensor: tensor + tensor.sum() * 0,  # control: a plain torch operation
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_at_memory_sees_the_values(
    look: str, is_parameter: bool, values: torch.Tensor, tmp_path: Path
) -> None:
    """Reads bypass torch's operations, on a destination parameter or on the deferred tensor."""

    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        weight.data.copy_(tensor)
        seen.append(LOOKS[look](weight.data if is_parameter else tensor))

    seen: list[torch.Tensor] = []
    model = Model(take)
    line, is_as_always = loaded(tmp_path, model)
    assert same(seen[-1].clone() + 0, values) and same(model.weight.data, values)
    needs_memory = look in ("data_ptr", "untyped_storage", "storage", "map_") and not is_parameter
    assert is_as_always != needs_memory
    assert not needs_memory or "each tensor was read whole, as" in line


def test_memory_that_was_given_away_gets_values_at_once(
    values: torch.Tensor, tmp_path: Path
) -> None:
    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        array = weight.detach().numpy()
        weight.data[:4].copy_(tensor[:4])
        weight.data[4:].copy_(tensor[4:])
        seen.append(torch.from_numpy(array.copy()))

    seen: list[torch.Tensor] = []
    assert loaded(tmp_path, Model(take))[1]
    assert same(seen[0], values)


@pytest.mark.parametrize("looks_at_it", [False, True])
def test_what_takes_memory_away_is_refused_by_name(
    looks_at_it: bool, values: torch.Tensor, tmp_path: Path
) -> None:
    """A parameter whose ``data`` is a deferred tensor is unusable."""

    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        weight.data = tensor
        if looks_at_it:
            weight.untyped_storage().data_ptr()

    with pytest.raises(loadstone.PlanError, match=r"deferred.*data of a parameter") as caught:
        loaded(tmp_path, Model(take))
    assert caught.value.code == "plan.options"
    model = Model(take)
    loaded(tmp_path, model, deferred=False)
    assert same(model.weight.data, values)


def test_what_needs_none_is_not_done_twice(values: torch.Tensor, tmp_path: Path) -> None:
    taken = []

    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        taken.append(tensor)
        weight.data.copy_(tensor)

    model = Model(take)
    line, is_as_always = loaded(tmp_path, model)
    assert is_as_always and "all parameters have values" in line and len(taken) == 1
    assert same(model.weight.data, values)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([0, ROWS]), torch.tensor([-ROWS - 1]), torch.ones(ROWS - 1, dtype=torch.bool)],
)
def test_places_that_are_not_there_are_refused(
    index: torch.Tensor, values: torch.Tensor, tmp_path: Path
) -> None:
    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        weight.data[: len(index)].copy_(tensor[index])

    with pytest.raises(IndexError):
        take(Model(take).weight, values)
    with pytest.raises(loadstone.PlanError, match="IndexError") as caught:
        loaded(tmp_path, Model(take))
    assert caught.value.code == "plan.shape"


def test_what_moves_to_another_device_is_read(values: torch.Tensor, tmp_path: Path) -> None:
    found = []

    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        found.append(tensor.to("meta"))
        weight.data.copy_(tensor)

    loaded(tmp_path, Model(take))
    assert type(found[0]) is torch.Tensor and found[0].device.type == "meta"


class Anything(torch.nn.Module):
    """A model with one parameter per tensor, which has the given dtype for floats."""

    def __init__(self, path: Path, dtype: torch.dtype, skips: str = "") -> None:
        super().__init__()
        self.kept = torch.nn.ParameterDict()
        self._dtype = dtype
        self._path = path

    def load_weights(self, weights: Tensors) -> None:
        for name, tensor in weights:
            dtype = self._dtype if tensor.dtype.is_floating_point else tensor.dtype
            place = torch.nn.Parameter(torch.empty(tensor.shape, dtype=dtype), requires_grad=False)
            place.data.copy_(tensor)
            self.kept[name.replace(".", "/")] = place


def is_plain(codec: str) -> bool:
    return not codec.startswith(("gguf", "bnb"))


@pytest.mark.parametrize("codec", sorted(filter(is_plain, CODECS)))
def test_scales_of_another_dtype_are_cast(codec: str, tmp_path: Path) -> None:
    """Parameters and scales have different dtypes; vLLM's own loader casts such scales."""
    path = CODECS[codec](tmp_path).path
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        early = Anything(path, dtype)
        loaded(path, early, deferred=False)
        for staging in (64, 64 << 20):
            late = Anything(path, dtype)
            loaded(path, late, staging_bytes_max=staging)
            assert_equal(late.state_dict(), early.state_dict())


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(
        loadstone.PlanError, match="dequantize cannot be combined with other changes"
    ):
        Options.from_mapping({"dequantize": True, "quantize": "fp8"})


def test_links_that_leave_the_folder(values: torch.Tensor, tmp_path: Path) -> None:
    (folder := tmp_path / "linked").mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")

    def take(weight: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        weight.data.copy_(tensor)

    with pytest.raises(loadstone.Error, match="allow_links"):
        loaded(folder, Model(take))
    model = Model(take)
    loaded(folder, model, allow_links=True)
    assert same(model.weight.data, values)
    with pytest.raises(loadstone.Error, match="allow_links"):
        plan_conversion(str(folder), ConversionOptions())
    assert plan_conversion(str(folder), ConversionOptions(), allow_links=True)


# --- receipts -------------------------------------------------------------------------------------


class Fused(torch.nn.Module):
    """A model that fuses two tensors and casts, reads a scalar, and copies a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.empty(2 * ROWS, COLUMNS, dtype=torch.bfloat16))
        self.part = torch.nn.Parameter(torch.empty(ROWS, 2))
        self.register_buffer("step", torch.zeros(()))

    def load_weights(self, weights: Tensors) -> None:
        for name, tensor in weights:
            if name == "part":
                self.part.data.copy_(tensor[:, 2:4])
            elif name == "step":
                self.step.fill_(tensor.item())
            else:
                begin = "qk".index(name) * ROWS
                self.qk.data[begin : begin + ROWS].copy_(tensor)


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256-tree"])
def test_a_receipt_says_what_was_read_and_what_is_held(digest: str, tmp_path: Path) -> None:
    state = {name: torch.randn(ROWS, COLUMNS) for name in ("q", "k", "part")}
    state["step"] = torch.tensor(7.0)
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    model = Fused()
    loading = ModelLoad(Options(receipt="given", digest=digest), "BF16")
    loading.run(
        lambda: model.load_weights(loading.tensors(str(tmp_path), lambda name: True)),
        model,
        str(tmp_path),
        lambda name, module: False,
    )
    saved = save(loading.receipt(model), str(tmp_path / "receipts"), 3)
    assert saved.name == "receipt-3.json"
    receipt = Receipt.load(saved)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    assert receipt.targets.keys() == held.keys() and receipt.digest == digest
    assert all(receipt.matches(name, tensor) for name, tensor in held.items())
    sources = {name: entries[0].get("sources") for name, entries in receipt.targets.items()}
    assert sources == {"qk": ["q", "k"], "part": ["part"], "step": None}
    assert {each["name"] for each in receipt.sources[0]["tensors"]} == state.keys()
    for tensor in held.values():
        tensor.data.view(-1)[-1] += 1
    assert not any(receipt.matches(name, tensor) for name, tensor in held.items())
    # The original checkpoint passes, but a changed bit in any tensor fails.
    arguments = ("verify", tmp_path, "--receipt-file", saved)
    assert run(*arguments).returncode == 0
    for name in state:
        changed = {key: tensor.clone() for key, tensor in state.items()}
        changed[name].view(-1).view(torch.int32)[-3 if name == "part" else 0] ^= 1
        loadstone.torch.save_file(changed, tmp_path / "model.safetensors")
        done = run(*arguments)
        assert done.returncode == 1 and f"'{name}'" in done.stdout + done.stderr


def test_a_receipt_goes_with_no_conversion() -> None:
    with pytest.raises(loadstone.PlanError, match="convert the folder first, with --receipt"):
        Options.from_mapping({"receipt": "folder", "quantize": "fp8"})
