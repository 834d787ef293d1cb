"""Scales of an adapter's products, which ``X.alpha`` tensors, metadata and a config can specify.

A product has one scale. If a file specifies two different scales, loadstone cannot know which one
the training used. diffusers rejects such files too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import added
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

NAME = "blocks.0.to_q"
RANK = 8
GENERATOR = torch.Generator().manual_seed(0)
BASE = torch.randn(32, 24, generator=GENERATOR)
RIGHT, LEFT = (torch.randn(*shape, generator=GENERATOR) for shape in ((RANK, 24), (32, RANK)))


def written(folder: Path, alpha: torch.Tensor | None, **configured: Any) -> None:
    """Write a base, and an adapter as diffusers writes it, with metadata for any fields given."""
    save_file({f"{NAME}.weight": BASE}, folder / "base.safetensors")
    tensors = {
        f"transformer.{NAME}.lora_A.weight": RIGHT,
        f"transformer.{NAME}.lora_B.weight": LEFT,
    }
    if alpha is not None:
        tensors[f"transformer.{NAME}.alpha"] = alpha
    metadata = {f"transformer.{key}": value for key, value in configured.items()}
    save_file(
        tensors,
        folder / "adapter.safetensors",
        {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None,
    )


def _merged(folder: Path) -> torch.Tensor:
    out = folder / "out.safetensors"
    loadstone.merge(folder / "base.safetensors", out, lora=folder / "adapter.safetensors")
    return load_file(out)[f"{NAME}.weight"]


def _by_command(folder: Path) -> torch.Tensor:
    out = folder / "out.safetensors"
    paths = [folder / "base.safetensors", "--lora", folder / "adapter.safetensors", "-o", out]
    done = run("merge", *paths, "--json")
    if done.returncode:
        report = json.loads(done.stdout)
        error = report.get("error") or report["findings"][0]
        raise loadstone.Error(f"{error}", code=error["code"])
    return load_file(out)[f"{NAME}.weight"]


def _loaded(folder: Path) -> torch.Tensor:
    net = nn.ModuleDict(
        {"blocks": nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(24, 32, False)})])}
    )
    loadstone.load(net, folder / "base.safetensors", lora=folder / "adapter.safetensors")
    return net.get_parameter(f"{NAME}.weight").detach()


DOORS: dict[str, Callable[[Path], torch.Tensor]] = {
    "merge": _merged,
    "command": _by_command,
    "load": _loaded,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_alphas_of_any_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], door: str, tmp_path: Path
) -> None:
    written(tmp_path, torch.full(shape, 4, dtype=dtype))
    assert torch.equal(DOORS[door](tmp_path), added(BASE, RIGHT, LEFT, 4 / RANK))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("alpha", [torch.tensor(True), torch.tensor(4j), torch.tensor([4.0, 4.0])])
def test_alphas_that_are_no_number(alpha: torch.Tensor, door: str, tmp_path: Path) -> None:
    written(tmp_path, alpha)
    with pytest.raises(loadstone.Error) as caught:
        DOORS[door](tmp_path)
    assert caught.value.code == "format.adapter"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_two_scales_of_one_product(dtype: torch.dtype, door: str, tmp_path: Path) -> None:
    alpha = torch.tensor(4, dtype=dtype)
    for configured in (
        {"r": RANK, "lora_alpha": 16},
        {"r": RANK, "lora_alpha": 4, "use_rslora": True},
        {"r": RANK, "lora_alpha": 4, "alpha_pattern": {NAME: 5}},
    ):
        written(tmp_path, alpha, **configured)
        with pytest.raises(loadstone.Error) as caught:
            DOORS[door](tmp_path)
        assert caught.value.code == "format.adapter"
        assert f"transformer.{NAME}.alpha" in str(caught.value) and "0.5" in str(caught.value)
    # Controls: these configs specify the same scale as the alpha tensor.
    for configured in (
        {"r": RANK, "lora_alpha": 4},
        {"r": RANK, "lora_alpha": 16, "alpha_pattern": {NAME: 4}},
    ):
        written(tmp_path, alpha, **configured)
        assert torch.equal(DOORS[door](tmp_path), added(BASE, RIGHT, LEFT, 4 / RANK))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_alpha_may_be_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """The stored alpha applies, even if its dtype rounded the alpha of the metadata."""
    alpha = torch.tensor(5.3, dtype=dtype)
    written(tmp_path, alpha, r=RANK, lora_alpha=5.3)
    expected = added(BASE, RIGHT, LEFT, alpha.float().item() / RANK)
    assert torch.equal(_merged(tmp_path), expected)
    written(tmp_path, alpha, r=RANK, lora_alpha=5.4)
    with pytest.raises(loadstone.Error, match="specifies the scale"):
        _merged(tmp_path)


def test_a_configuration_in_a_file_counts_as_metadata_does(tmp_path: Path) -> None:
    written(tmp_path, torch.tensor(4.0))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(loadstone.Error, match="specifies the scale"):
        _merged(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4}))
    assert torch.equal(_merged(tmp_path), added(BASE, RIGHT, LEFT, 4 / RANK))


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model."])
@pytest.mark.parametrize("door", ["merge", "command", "load"])
def test_a_configuration_beside_the_metadata(door: str, prefix: str, tmp_path: Path) -> None:
    """The metadata applies to the models that it names, and the config to all others."""
    written(tmp_path, None, r=RANK, lora_alpha=16)
    file = tmp_path / "adapter.safetensors"
    metadata = {
        "lora_adapter_metadata": json.dumps({"transformer.r": 8, "transformer.lora_alpha": 16})
    }
    tensors = {f"{prefix}{NAME}.lora_A.weight": RIGHT, f"{prefix}{NAME}.lora_B.weight": LEFT}
    save_file(tensors, file, metadata)
    beside = {"peft_type": "LORA", "r": RANK, "lora_alpha": 80}
    (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    scale = 2 if prefix == "transformer." else 10
    assert torch.equal(DOORS[door](tmp_path), added(BASE, RIGHT, LEFT, scale))
    # Without the metadata, the config applies.
    save_file(tensors, file)
    assert torch.equal(DOORS[door](tmp_path), added(BASE, RIGHT, LEFT, 10))
    # The metadata and the config cover the same modules.
    save_file(tensors, file, {"lora_adapter_metadata": json.dumps(beside)})
    with pytest.raises(loadstone.Error) as caught:
        DOORS[door](tmp_path)
    assert caught.value.code == "format.adapter"


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_copy_of_the_base_is_left_out_as_the_error_advises(tmp_path: Path, factor: float) -> None:
    folder, module = tmp_path / "adapter", f"base_model.model.{NAME}"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["to_q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"{NAME}.weight": BASE}, tmp_path / "base.safetensors")
    products = {f"{module}.lora_A.weight": RIGHT, f"{module}.lora_B.weight": LEFT}
    copy = {f"{module}.base_layer.weight": BASE}
    save_file(products | copy, folder / "adapter_model.safetensors")

    def merged(**options: Any) -> torch.Tensor:
        out = tmp_path / "out.safetensors"
        loadstone.merge(tmp_path / "base.safetensors", out, lora={folder: factor}, **options)
        return load_file(out)[f"{NAME}.weight"]

    if factor == 1:
        merged()
    else:
        with pytest.raises(loadstone.PlanError, match="replaces the base's tensor") as caught:
            merged()
        (found,) = caught.value.findings
        assert "--lora-ignore base_layer" in found.suggestion
    expected = BASE + factor * LEFT @ RIGHT
    assert torch.allclose(merged(lora_ignore="base_layer"), expected, atol=1e-4)
