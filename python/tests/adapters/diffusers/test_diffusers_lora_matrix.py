"""Tests that the table "LoRA with offloading and GGUF" of docs/diffusers.md is true, cell by cell.

The reference of a cell is the same way of adding the adapter with all weights in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers_gguf import BLOCK_CASES, File, Kind, quantization
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import loadstone

PAGE = Path(__file__).parents[4] / "docs" / "diffusers.md"
CASE = BLOCK_CASES[0]
CPU = torch.device("cpu")
LORA = "pytorch_lora_weights.safetensors"


def table() -> dict[tuple[str, str, str], str]:
    """Return the page's cells by weights, placement and way."""
    section = PAGE.read_text().split("## LoRA with offloading and GGUF\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ways = cells[0][2:]
    return {
        (row[0], row[1], way): cell
        for row in cells[1:]
        for way, cell in zip(ways, row[2:], strict=True)
    }


@dataclasses.dataclass
class Files:
    """The base in both encodings, the adapter, and the inputs of the model."""

    folder: Path
    blocks: File
    inputs: dict[str, torch.Tensor]
    references: dict[tuple[str, str], torch.Tensor] = dataclasses.field(default_factory=dict)

    def load(self, weights: str, **options: Any) -> Any:
        if weights == "plain":
            return loadstone.diffusers.from_pretrained(
                CASE.cls, self.folder / "plain", torch_dtype=torch.bfloat16, **options
            ).eval()
        return self.blocks.load(
            quantization_config=quantization(), torch_dtype=torch.bfloat16, **options
        ).eval()

    def output(self, model: Any) -> torch.Tensor:
        first, second = (model.eval()(**self.inputs).sample for _ in range(2))
        return first if torch.equal(first, second) else first * float("nan")

    def reference(self, weights: str, way: str) -> torch.Tensor:
        """Return the output with all weights in memory; ``way`` may be "" for no adapter."""
        key = (weights, way)
        if key not in self.references:
            model = self.load(weights, **self.lora(way))
            add_adapter(model, way, self)
            self.references[key] = self.output(model)
        return self.references[key]

    def lora(self, way: str) -> dict[str, Any]:
        return {"lora": self.folder / "lora" / LORA} if way == "`lora=`" else {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("matrix")
    blocks = File(
        folder / "blocks", CASE, lambda index: (Kind.Q8_0, Kind.Q4_0, Kind.F16)[index % 3]
    )
    model = CASE.build()
    model.save_pretrained(folder / "plain")
    targets = ["to_q", "to_v", "net.2"]
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    )
    model.save_lora_adapter(folder / "lora")
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "hidden_states": torch.randn(1, 16, 1, 4, 4, generator=generator).bfloat16(),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 4, 256, generator=generator).bfloat16(),
    }
    return Files(folder, blocks, inputs)


def add_adapter(model: Any, way: str, files: Files) -> None:
    if way.startswith(("`load_lora_adapter`", "`fuse_lora`")):
        model.load_lora_adapter(files.folder / "lora", prefix=None, weight_name=LORA)
    if way.startswith("`fuse_lora`"):
        model.fuse_lora()


def offload(model: Any, placement: str, folder: Path) -> None:
    options: dict[str, Any] = {"offload_device": CPU, "offload_type": "leaf_level"}
    if placement.startswith("adapter"):
        options |= {"offload_type": "block_level", "num_blocks_per_group": 1}
    if "to disk" in placement:
        options["offload_to_disk_path"] = str(folder / "groups")
    apply_group_offloading(model, CPU, **options)


def outcome(files: Files, weights: str, placement: str, way: str, folder: Path) -> str:
    """Return the word that the table must have."""
    options = files.lora(way)
    if placement.startswith("device map"):
        options |= {"device_map": {"": "cpu", "blocks.0": "disk"}}
        options["offload_folder"] = str(folder / "offload")
    try:
        with loadstone.patch("peft") if "patched" in way else contextlib.nullcontext():
            model = files.load(weights, **options)
            if placement.startswith("group"):
                offload(model, placement, folder)
            add_adapter(model, way, files)
            if placement.startswith("adapter"):
                offload(model, placement, folder)
    except loadstone.Error as error:
        return f"`{error.code}`"
    except RuntimeError:
        return "`RuntimeError`"
    found = files.output(model)
    if torch.equal(found, files.reference(weights, way.removesuffix(", patched"))):
        assert loadstone.audit(model).ok == ("to disk" not in placement)
        return "same"
    if torch.equal(found, files.reference(weights, "")):
        return "no effect"
    assert not loadstone.audit(model).ok
    return "wrong"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", ["plain", "GGUF blocks"])
def test_the_table_is_true(files: Files, tmp_path: Path, weights: str) -> None:
    found = {}
    for index, cell in enumerate(cell for cell in table() if cell[0] == weights):
        found[cell] = outcome(files, *cell, tmp_path / str(index))
    expected = {cell: word for cell, word in table().items() if cell[0] == weights}
    assert len(expected) == 30
    assert found == expected


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_changes_the_output(files: Files) -> None:
    """Control: "same" would mean nothing if all ways had the output of the base."""
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: files.reference("plain", ""),
        lambda: files.reference("plain", "`lora=`"),
        lambda: files.reference("plain", "`load_lora_adapter`"),
        lambda: files.reference("GGUF blocks", ""),
        lambda: files.reference("GGUF blocks", "`load_lora_adapter`"),
    ]
    outputs = [way() for way in ways]
    assert all(output.isfinite().all() for output in outputs)
    for index, output in enumerate(outputs):
        assert not any(torch.equal(output, other) for other in outputs[:index])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_gguf_file_without_its_blocks(files: Files, tmp_path: Path) -> None:
    """The ways that the page recommends instead of the rejected ones."""
    options = {"torch_dtype": torch.float32}
    model = files.blocks.load(**options, **files.lora("`lora=`"))
    fused = files.blocks.load(**options)
    before = fused.blocks[0].attn1.to_q.weight.clone()
    add_adapter(fused, "`fuse_lora`", files)
    found, expected = model.blocks[0].attn1.to_q.weight, fused.blocks[0].attn1.to_q.weight
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (found - before).abs().max() > 1e-2 * expected.abs().max()
    name = "blocks.0.self_attn.q"
    weight = torch.randn(4, 256), torch.randn(256, 4)
    lora = tmp_path / "comfy.safetensors"
    save_file(
        {
            f"diffusion_model.{name}.lora_A.weight": weight[0],
            f"diffusion_model.{name}.lora_B.weight": weight[1],
        },
        lora,
    )
    loadstone.merge(files.blocks.path, tmp_path / "merged.safetensors", lora=lora)
    loadstone.convert(files.blocks.path, tmp_path / "plain.safetensors")
    merged, plain = (load_file(tmp_path / f"{each}.safetensors") for each in ("merged", "plain"))
    changed = [name for name in plain if not torch.equal(merged[name], plain[name])]
    assert changed == [f"model.diffusion_model.{name}.weight"]
