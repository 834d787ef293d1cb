"""Differences that adapters add to whole tensors: ``.diff``, ``.diff_b``, ``.w_norm``, ``.b_norm``.

ComfyUI computes ``weight += strength * diff``, without alpha, and skips a difference of a different
shape with a warning. loadstone computes the same in F32, rounds once, and rejects a difference of
another shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from merge_models import Tensors, added, products, rounded, same_bits
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone


def base_tensors(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "model.diffusion_model.blocks.0.ffn.weight": (40, 24),
        "model.diffusion_model.blocks.0.ffn.bias": (40,),
        "model.diffusion_model.blocks.0.norm.weight": (24,),
        "model.diffusion_model.blocks.0.norm.bias": (24,),
        "model.diffusion_model.blocks.0.modulation": (1, 6, 24),
        "model.diffusion_model.patch.weight": (40, 3, 1, 2, 2),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


FFN = "model.diffusion_model.blocks.0.ffn"
NORM = "model.diffusion_model.blocks.0.norm"
# Names in the adapter, and the tensors of the base that they change.
NAMES = {
    "diffusion_model.blocks.0.ffn.diff": f"{FFN}.weight",
    "diffusion_model.blocks.0.ffn.diff_b": f"{FFN}.bias",
    "lora_unet_blocks_0_norm.w_norm": f"{NORM}.weight",
    "lora_unet_blocks_0_norm.b_norm": f"{NORM}.bias",
    "diffusion_model.blocks.0.modulation.diff": "model.diffusion_model.blocks.0.modulation",
    "model.diffusion_model.patch.diff": "model.diffusion_model.patch.weight",
}


def differences(base: Tensors, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(base[target].shape, generator=generator).half()
        for name, target in NAMES.items()
    }


def with_differences(base: Tensors, adapter: Tensors, strength: float) -> Tensors:
    """Return ComfyUI's result in F32: the strength times the difference, added to the weight."""
    changed = {NAMES[name]: tensor for name, tensor in adapter.items()}
    factor = torch.tensor(strength, dtype=torch.float32)
    return base | {
        name: base[name].float() + factor * tensor.float() for name, tensor in changed.items()
    }


def tree(tensors: Tensors) -> nn.Module:
    model = nn.Module()
    for path, tensor in tensors.items():
        *parents, leaf = path.split(".")
        parent = model
        for name in parents:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.register_parameter(leaf, nn.Parameter(torch.empty_like(tensor)))
    return model


def by_merge(folder: Path, lora: dict[Path, float], **options: Any) -> Tensors:
    loadstone.merge(folder / "base.safetensors", folder / "out.safetensors", lora=lora, **options)
    return load_file(folder / "out.safetensors")


def by_command(folder: Path, lora: dict[Path, float]) -> Tensors:
    given = [word for path, factor in lora.items() for word in ("--lora", f"{path}:{factor}")]
    output("merge", folder / "base.safetensors", *given, "-o", folder / "written.safetensors")
    return load_file(folder / "written.safetensors")


def by_load(folder: Path, lora: dict[Path, float]) -> Tensors:
    model = tree(load_file(folder / "base.safetensors"))
    loadstone.load(model, folder / "base.safetensors", lora=lora)
    return dict(model.state_dict())


def by_saved_plan(folder: Path, lora: dict[Path, float]) -> Tensors:
    tensors = load_file(folder / "base.safetensors")
    plan = loadstone.plan(tree(tensors), folder / "base.safetensors", lora=lora)
    plan.save(folder / "plan.json")
    model = tree(tensors)
    loadstone.Plan.load(folder / "plan.json").execute(model=model)
    return dict(model.state_dict())


DOORS = [by_merge, by_command, by_load, by_saved_plan]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("strength", [1.0, 0.7, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_name(tmp_path: Path, door: Any, strength: float, dtype: torch.dtype) -> None:
    base = base_tensors(dtype)
    adapter = differences(base)
    save_file(base, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "style.safetensors")
    found = door(tmp_path, {tmp_path / "style.safetensors": strength})
    same_bits(found, rounded(with_differences(base, adapter, strength), base))
    with pytest.raises(AssertionError):
        same_bits(found, rounded(with_differences(base, adapter, strength * 1.01), base))


@pytest.mark.parametrize("method", ["linear", "task-arithmetic", "slerp"])
def test_models_and_a_difference(tmp_path: Path, method: str) -> None:
    """A difference is added to the merge of the models, and does not take part in it."""
    one, other = base_tensors(torch.float32), base_tensors(torch.float32)
    adapter = differences(one)
    other = {name: tensor * 1.25 for name, tensor in other.items()}
    save_file(one, tmp_path / "base.safetensors")
    save_file(other, tmp_path / "other.safetensors")
    save_file(adapter, tmp_path / "style.safetensors")
    weights = {tmp_path / "base.safetensors": 1.0, tmp_path / "other.safetensors": 0.5}
    options = {"method": method}
    loadstone.merge(weights, tmp_path / "models.safetensors", **options)
    lora = {tmp_path / "style.safetensors": 0.5}
    loadstone.merge(weights, tmp_path / "both.safetensors", lora=lora, **options)
    expected = with_differences(load_file(tmp_path / "models.safetensors"), adapter, 0.5)
    same_bits(tmp_path / "both.safetensors", expected)


def test_a_product_and_a_difference_of_two_adapters(tmp_path: Path) -> None:
    """Adapters are added in their order."""
    base = base_tensors(torch.float32)
    matrices = products(4, 2, {"x": (40, 24)})
    right, left = matrices["x.lora_A"], matrices["x.lora_B"]
    names = ("diffusion_model.blocks.0.ffn.lora_A.weight", "lora_unet_blocks_0_ffn.diff")
    first = {names[0]: right, names[0].replace("lora_A", "lora_B"): left}
    difference = torch.randn(40, 24)
    bias = torch.randn(40)
    save_file(base, tmp_path / "base.safetensors")
    save_file({**first, "diffusion_model.blocks.0.ffn.diff_b": bias}, tmp_path / "a.safetensors")
    save_file({names[1]: difference}, tmp_path / "b.safetensors")
    expected = dict(base)
    expected[f"{FFN}.bias"] = base[f"{FFN}.bias"] + bias
    expected[f"{FFN}.weight"] = added(base[f"{FFN}.weight"], right, left, 1) + difference
    lora = {tmp_path / "a.safetensors": 1.0, tmp_path / "b.safetensors": 1.0}
    same_bits(by_merge(tmp_path, lora), expected)
    same_bits(by_load(tmp_path, lora), expected)


REFUSED: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "a different shape": ("merge.adapter", {"diffusion_model.blocks.0.ffn.diff": (40, 25)}),
    "a larger norm": ("merge.adapter", {"diffusion_model.blocks.0.norm.diff": (48,)}),
    "no bias": ("merge.unused", {"diffusion_model.blocks.0.modulation.diff_b": (24,)}),
    "no weight": ("merge.unused", {"diffusion_model.blocks.9.ffn.diff": (40, 24)}),
    "a product too": (
        "format.adapter",
        {
            "diffusion_model.blocks.0.ffn.diff": (40, 24),
            "diffusion_model.blocks.0.ffn.lora_A.weight": (2, 24),
            "diffusion_model.blocks.0.ffn.lora_B.weight": (40, 2),
        },
    ),
    "an alpha": (
        "merge.unused",
        {"lora_unet_blocks_0_ffn.diff": (40, 24), "lora_unet_blocks_0_ffn.alpha": ()},
    ),
    "two names of one weight": (
        "format.adapter",
        {
            "diffusion_model.blocks.0.ffn.diff": (40, 24),
            "lora_unet_blocks_0_ffn.w_norm": (40, 24),
        },
    ),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_it_names_the_file(self, tmp_path: Path, case: str) -> None:
        code, shapes = REFUSED[case]
        generator = torch.Generator().manual_seed(1)
        adapter = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file(base_tensors(), tmp_path / "base.safetensors")
        save_file(adapter, tmp_path / "style.safetensors")
        for door in (by_merge, by_load):
            with pytest.raises(loadstone.Error) as caught:
                door(tmp_path, {tmp_path / "style.safetensors": 1.0})
            assert caught.value.code == code
            assert str(tmp_path / "style.safetensors") in str(caught.value)
            assert not (tmp_path / "out.safetensors").exists()

    def test_not_finite(self, tmp_path: Path) -> None:
        base = base_tensors()
        adapter = differences(base)
        adapter["diffusion_model.blocks.0.ffn.diff"][3, 4] = float("nan")
        save_file(base, tmp_path / "base.safetensors")
        save_file(adapter, tmp_path / "style.safetensors")
        with pytest.raises(loadstone.Error) as caught:
            by_merge(tmp_path, {tmp_path / "style.safetensors": 1.0})
        assert caught.value.code == "q.nan"


def test_a_whole_tensor_whose_name_contains_diff(tmp_path: Path) -> None:
    """The names of a denoiser begin with ``diffusion_model``, which is not a difference."""
    base = base_tensors()
    bias = torch.randn(40).bfloat16()
    save_file(base, tmp_path / "base.safetensors")
    save_file({f"{FFN}.bias": bias}, tmp_path / "style.safetensors")
    found = by_merge(tmp_path, {tmp_path / "style.safetensors": 1.0})
    same_bits(found, base | {f"{FFN}.bias": bias})
