"""DoRA of every kind of layer, against peft's merge and against ComfyUI's formula.

peft has one magnitude for each output of a layer: for rows of a linear weight or a convolution, and
for columns of an embedding or a ``Conv1D``. LyCORIS and ComfyUI also have one for each input, with
the shape ``[1, in]``. Norms are summed in different orders, so :func:`close` bounds the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import EPSILON, close, randomised
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

peft = pytest.importorskip("peft")
conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D


class Net(nn.Module):
    """One layer of each kind; the sizes of square layers cannot reveal the orientation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.square_embed = nn.Embedding(24, 24)
        self.c_fc = conv1d(40, 24)
        self.c_proj = conv1d(24, 24)
        self.conv = nn.Conv2d(6, 10, 3, padding=1)
        self.square_conv = nn.Conv2d(6, 6, 3, padding=1)
        self.line_conv = nn.Conv1d(5, 7, 3)
        self.point = nn.Conv2d(8, 12, 1, bias=False)
        self.linear = nn.Linear(24, 40)


LAYERS = [name for name, _ in Net().named_children()]


def saved(folder: Path, layers: list[str], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Save a base and an adapter; return the base's tensors and peft's merge."""
    torch.manual_seed(3)
    net = Net().to(dtype)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save_file(before, folder / "base.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    config = peft.LoraConfig(target_modules=layers, r=4, lora_alpha=6, use_dora=True)
    wrapped = peft.get_peft_model(net, config, autocast_adapter_dtype=False)
    randomised(wrapped)
    wrapped.save_pretrained(folder / "adapter")
    return before, dict(wrapped.merge_and_unload().state_dict())


def merged(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    base, out = folder / "base.safetensors", folder / "out.safetensors"
    loadstone.merge(base, out, lora=folder / "adapter", **options)
    return load_file(out)


@pytest.mark.parametrize("layer", LAYERS)
def test_peft_merges_the_same(tmp_path: Path, layer: str) -> None:
    before, expected = saved(tmp_path, [layer], torch.float32)
    found = merged(tmp_path)
    for name, tensor in expected.items():
        close(found[name], tensor, 200)
    assert not torch.equal(found[f"{layer}.weight"], before[f"{layer}.weight"])
    model = Net()
    loadstone.load(model, tmp_path / "base.safetensors", lora=tmp_path / "adapter")
    assert torch.equal(model.get_submodule(layer).weight, found[f"{layer}.weight"])


def test_all_layers_in_16_bits(tmp_path: Path) -> None:
    """peft rounds the norm and each product to bfloat16, and loadstone rounds once."""
    before, expected = saved(tmp_path, LAYERS, torch.bfloat16)
    found = merged(tmp_path)
    for name, tensor in expected.items():
        assert found[name].dtype is torch.bfloat16
        error = (found[name].float() - tensor.float()).abs().max()
        assert error <= 8 * 2.0**-8 * tensor.float().abs().max(), name
        changed = not torch.equal(found[name], before[name])
        assert changed == (name.endswith(".weight"))


def test_a_saved_plan_and_small_windows(tmp_path: Path) -> None:
    """A result does not depend on windows or threads, and a plan keeps the magnitudes."""
    saved(tmp_path, LAYERS, torch.float32)
    expected = merged(tmp_path, threads=1)
    for threads in (2, 5):
        found = merged(tmp_path, threads=threads)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    plan = loadstone.plan(Net(), tmp_path / "base.safetensors", lora=tmp_path / "adapter")
    plan.save(tmp_path / "plan.json")
    model = Net()
    loadstone.Plan.load(tmp_path / "plan.json").execute(model=model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_more_rows_than_a_batch(tmp_path: Path) -> None:
    """The norms of columns need several passes over pieces of a large table."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(9001, 96))
    save_file(dict(net.state_dict()), tmp_path / "base.safetensors")
    config = peft.LoraConfig(target_modules=["0"], r=4, use_dora=True)
    wrapped = peft.get_peft_model(net, config)
    randomised(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = dict(wrapped.merge_and_unload().state_dict())
    found = merged(tmp_path)
    close(found["0.weight"], expected["0.weight"], 200)
    many = merged(tmp_path, threads=3, max_memory="16MiB")
    assert torch.equal(many["0.weight"], found["0.weight"])


def decomposed(weight: torch.Tensor, product: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ComfyUI's ``weight_decompose`` for a strength of 1, in F64."""
    changed = weight.double() + product.double()
    columns = changed.transpose(0, 1).reshape(changed.shape[1], -1)
    ones = [1] * (changed.dim() - 1)
    norm = columns.norm(dim=1).reshape(changed.shape[1], *ones).transpose(0, 1)
    return changed * (scale.double() / norm)


SHAPES = {"linear": (40, 24), "square": (24, 24), "convolution": (10, 6, 3, 3)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("naming", ["lora_unet_x_y", "diffusion_model.x.y"])
def test_magnitudes_of_inputs(tmp_path: Path, kind: str, naming: str) -> None:
    torch.manual_seed(2)
    shape = SHAPES[kind]
    weight, scale = torch.randn(shape), torch.rand(1, shape[1], *[1] * (len(shape) - 2)) + 0.5
    right = torch.randn(4, *shape[1:])
    left = torch.randn(shape[0], 4, *[1] * (len(shape) - 2))
    save_file({"model.diffusion_model.x.y.weight": weight}, tmp_path / "base.safetensors")
    names = {"lora_down.weight": right, "lora_up.weight": left, "dora_scale": scale}
    names["alpha"] = torch.tensor(2.0)
    (tmp_path / "adapter").mkdir()
    lora = tmp_path / "adapter" / "style.safetensors"
    save_file({f"{naming}.{name}": tensor for name, tensor in names.items()}, lora)
    product = 0.5 * (left.flatten(1).double() @ right.flatten(1).double()).reshape(shape)
    expected = decomposed(weight, product, scale)
    (found,) = merged(tmp_path).values()
    bound = 400 * EPSILON * expected.abs().max()
    assert (found.double() - expected).abs().max() <= bound
    # Control: magnitudes of outputs, for which the same test must fail.
    if kind == "square":
        names["dora_scale"] = scale.reshape(-1)
        save_file({f"{naming}.{name}": tensor for name, tensor in names.items()}, lora)
        (other,) = merged(tmp_path).values()
        assert (other.double() - expected).abs().max() > bound


def test_wrong_sizes_of_magnitudes(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(6, 4)}, tmp_path / "base.safetensors")
    (tmp_path / "adapter").mkdir()
    for shape in [(4,), (5,), (1, 6), (1, 5), (4, 1), ()]:
        names = {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(6, 2)}
        names["x.dora_scale"] = torch.ones(shape)
        save_file(names, tmp_path / "adapter" / "style.safetensors")
        with pytest.raises(loadstone.Error, match="magnitude") as caught:
            merged(tmp_path)
        assert caught.value.code == "format.adapter"
