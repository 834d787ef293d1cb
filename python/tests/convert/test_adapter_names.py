"""Adapters whose names have a different prefix from the base's, and adapters named by their file.

The adapter and the base may each put their own prefix before the name of a module. A merge, a load
and the command must find the module for every combination of the two, and must reject a name that
can refer to two tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output, run
from merge_models import Tensors, added, products, same_bits
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

MODULE = "double_blocks.0.img_attn.proj"
RANK = 4

DENOISERS = ("", "transformer.", "unet.", "diffusion_model.", "model.diffusion_model.", "model.")
# The names of a module in an adapter, without the names of its two matrices.
NAMINGS = {
    "peft": f"base_model.model.{MODULE}",
    "kohya": "lora_unet_" + MODULE.replace(".", "_"),
    "onetrainer": "lora_transformer_" + MODULE.replace(".", "_"),
    "lycoris": "lycoris_" + MODULE.replace(".", "_"),
    **{prefix or "bare": prefix + MODULE for prefix in DENOISERS},
}
BASES = (*DENOISERS, "net.")
ENCODERS = {
    1: (
        ("text_encoder.", "lora_te_", "lora_te1_"),
        ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.", "text_encoder."),
    ),
    2: (
        ("text_encoder_2.", "lora_te2_"),
        ("text_encoders.clip_g.transformer.", "text_encoder_2."),
    ),
}


def adapter_file(path: Path, module: str, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Write an adapter with one product; return its two matrices."""
    matrices = products(RANK, seed, {module: (24, 16)})
    right, left = matrices[f"{module}.lora_A"], matrices[f"{module}.lora_B"]
    words = (
        ("lora_down", "lora_up") if module.startswith(("lora_", "lyc")) else ("lora_A", "lora_B")
    )
    path.parent.mkdir(exist_ok=True)
    names = {f"{module}.{words[0]}.weight": right, f"{module}.{words[1]}.weight": left}
    save_file(names, path)
    if module.startswith("base_model"):
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
        (path.parent / "adapter_config.json").write_text(json.dumps(settings))
    return right, left


def base_file(folder: Path, *modules: str) -> Tensors:
    """Write a base with a weight and a bias for each module."""
    generator = torch.Generator().manual_seed(3)
    base = {}
    for name in modules:
        base[f"{name}.weight"] = torch.randn(24, 16, generator=generator)
        base[f"{name}.bias"] = torch.randn(24, generator=generator)
    save_file(base, folder / "base.safetensors")
    return base


def tree(*modules: str) -> nn.Module:
    """Return a model with an ``nn.Linear`` at each path."""
    model = nn.Module()
    for path in modules:
        *parents, leaf = path.split(".")
        parent = model
        for name in parents:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(leaf, nn.Linear(16, 24))
    return model


def by_merge(folder: Path, lora: Path, *modules: str) -> Tensors:
    out = folder / "merged.safetensors"
    loadstone.merge(folder / "base.safetensors", out, lora=lora)
    return load_file(out)


def by_load(folder: Path, lora: Path, *modules: str) -> Tensors:
    model = tree(*modules)
    loadstone.load(model, folder / "base.safetensors", lora=lora)
    return dict(model.state_dict())


def by_command(folder: Path, lora: Path, *modules: str) -> Tensors:
    out = folder / "written.safetensors"
    output("merge", folder / "base.safetensors", "--lora", lora, "-o", out)
    return load_file(out)


DOORS = {"merge": by_merge, "load": by_load}


def expect(folder: Path, prefixes: Sequence[str], lora: Path, door: str) -> None:
    """Check that the product is added to the module under each prefix of a base."""
    right, left = adapter_file(lora, lora.stem)
    for prefix in prefixes:
        modules = (prefix + MODULE, f"{prefix}other.{MODULE}")
        expected = base_file(folder, *modules)
        name = f"{prefix}{MODULE}.weight"
        expected[name] = added(expected[name], right, left, 1)
        same_bits(DOORS[door](folder, lora, *modules), expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fits_every_prefix_of_the_base(tmp_path: Path, naming: str, door: str) -> None:
    expect(tmp_path, BASES, tmp_path / naming / f"{NAMINGS[naming]}.safetensors", door)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_text_encoders(tmp_path: Path, encoder: int) -> None:
    namings, prefixes = ENCODERS[encoder]
    for naming in namings:
        module = MODULE if naming.endswith(".") else MODULE.replace(".", "_")
        expect(tmp_path, prefixes, tmp_path / "loras" / f"{naming}{module}.safetensors", "merge")


def test_a_prefix_of_another_part_does_not_fit(tmp_path: Path) -> None:
    base_file(tmp_path, f"cond_stage_model.transformer.{MODULE}")
    lora = tmp_path / "loras" / "style.safetensors"
    for naming in ("unet.", "text_encoder_2."):
        adapter_file(lora, naming + MODULE)
        with pytest.raises(loadstone.Error) as caught:
            by_merge(tmp_path, lora)
        assert caught.value.code == "merge.unused"


@pytest.mark.parametrize("door", DOORS)
def test_names_of_another_library_have_a_next_step(tmp_path: Path, door: str) -> None:
    theirs = "blocks.0.self_attn.q"
    base_file(tmp_path, theirs)
    lora = tmp_path / "loras" / "style.safetensors"
    adapter_file(lora, "transformer.blocks.0.attn1.to_q")
    with pytest.raises(loadstone.Error) as caught:
        DOORS[door](tmp_path, lora, theirs)
    assert caught.value.code == "merge.unused"
    suggestion = caught.value.findings[0].suggestion
    assert "the base has none of the adapter's modules" in suggestion and theirs in suggestion
    assert "merge it into the checkpoint that has these names" in suggestion


class TestAmbiguous:
    """A name that fits two tensors of the base is an error that names both."""

    CANDIDATES = (f"model.diffusion_model.{MODULE}", f"net.{MODULE}")

    def message(self, folder: Path, lora: Path, door: Callable[..., Any]) -> str:
        with pytest.raises(loadstone.Error) as caught:
            door(folder, lora, *self.CANDIDATES)
        assert caught.value.code == "merge.adapter"
        assert "--lora-ignore" in caught.value.findings[0].suggestion
        return str(caught.value)

    @pytest.mark.parametrize(
        "naming", [name for name in NAMINGS if name != "model.diffusion_model."]
    )
    def test_it_names_both(self, tmp_path: Path, naming: str) -> None:
        base_file(tmp_path, *self.CANDIDATES)
        lora = tmp_path / "loras" / "style.safetensors"
        adapter_file(lora, NAMINGS[naming])
        for door in DOORS.values():
            message = self.message(tmp_path, lora, door)
            assert all(f"{name}.weight" in message for name in self.CANDIDATES)
            assert str(lora) in message
        done = run("merge", tmp_path / "base.safetensors", "--lora", lora, "-o", tmp_path / "o")
        assert done.returncode == 1
        assert all(f"{name}.weight" in done.stderr for name in self.CANDIDATES)

    def test_the_full_name_is_not_ambiguous(self, tmp_path: Path) -> None:
        expected = base_file(tmp_path, *self.CANDIDATES)
        lora = tmp_path / "loras" / "style.safetensors"
        name = self.CANDIDATES[0]
        right, left = adapter_file(lora, name)
        expected[f"{name}.weight"] = added(expected[f"{name}.weight"], right, left, 1)
        same_bits(by_merge(tmp_path, lora), expected)
        same_bits(by_command(tmp_path, lora), expected)

    def test_a_whole_tensor(self, tmp_path: Path) -> None:
        """A bias that was trained in full follows the same rule as a product."""
        lora = tmp_path / "style.safetensors"
        bias = torch.randn(24)
        save_file({f"diffusion_model.{MODULE}.bias": bias}, lora)
        expected = base_file(tmp_path, self.CANDIDATES[0])
        expected[f"{self.CANDIDATES[0]}.bias"] = bias
        same_bits(by_merge(tmp_path, lora), expected)
        base_file(tmp_path, *self.CANDIDATES)
        message = self.message(tmp_path, lora, by_merge)
        assert all(f"{name}.bias" in message for name in self.CANDIDATES)


class TestFiles:
    """Findings and reports name an adapter by its file, because a folder may have several."""

    def test_errors(self, tmp_path: Path) -> None:
        base_file(tmp_path, MODULE)
        first, second = (tmp_path / "loras" / f"{name}.safetensors" for name in ("one", "two"))
        adapter_file(first, MODULE)
        adapter_file(second, "lost.module")
        for door in DOORS.values():
            with pytest.raises(loadstone.Error) as caught:
                door(tmp_path, {first: 1.0, second: 1.0}, MODULE)
            assert str(second) in str(caught.value)
            assert str(first) not in str(caught.value)

    def test_reports(self, tmp_path: Path) -> None:
        base_file(tmp_path, MODULE)
        loras = [tmp_path / "loras" / f"{name}.safetensors" for name in ("one", "two")]
        for seed, lora in enumerate(loras):
            adapter_file(lora, MODULE, seed)
        model = tree(MODULE)
        lora = dict.fromkeys(loras, 1.0)
        report = loadstone.load(model, tmp_path / "base.safetensors", lora=lora)
        assert report.provenance[f"{MODULE}.weight"].merged == tuple(map(str, loras))
