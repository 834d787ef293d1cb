"""Tests rules that rename training checkpoints, and files that ranks wrote separately."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from dcp_tensors import same, tensors_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

import loadstone


def test_names_of_megatron_become_others_by_rules(tmp_path: Path) -> None:
    fused = torch.randn(12, 4)
    content = {"decoder.layers.0.self_attention.linear_qkv.weight": fused}
    save(content, checkpoint_id=tmp_path / "megatron", no_dist=True)
    source = r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.weight"
    targets = [f"model.layers.$1.self_attn.{each}_proj.weight" for each in "qkv"]
    rules = [{"op": "split", "sources": [source], "targets": targets, "dim": 0}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    target = tmp_path / "out.safetensors"
    done = run("convert", tmp_path / "megatron", target, "--rules", tmp_path / "rules.json")
    assert done.returncode == 0, done.stderr
    out = load_file(target)
    joined = [out[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkv"]
    assert same(torch.cat(joined), fused)


def converted(folder: Path, out: Path, rules: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    path = out.with_suffix(".rules.json")
    path.write_text(json.dumps(rules))
    done = run("convert", folder, out, "--rules", path)
    assert done.returncode == 0, done.stderr
    return tensors_of(out)


def test_names_of_a_compiled_fsdp2_model_become_those_of_the_hub(tmp_path: Path) -> None:
    state = {f"layers.{i}.self_attn.q_proj.weight": torch.randn(4, 4) for i in range(3)}
    content = {
        "model": {f"_orig_mod.{name}": value for name, value in state.items()},
        "optim": {"state": {"_orig_mod.layers.0.exp_avg": torch.randn(4)}},
    }
    save(content, checkpoint_id=tmp_path / "compiled", no_dist=True)
    rules = [{"op": "rename", "sources": [r"model\._orig_mod\.(.*)"], "targets": ["model.$1"]}]
    found = converted(tmp_path / "compiled", tmp_path / "out", rules)
    assert {name for name in found if not name.startswith("optim.")} == {
        f"model.{name}" for name in state
    }
    assert all(same(found[f"model.{name}"], value) for name, value in state.items())


def test_stacked_layers_of_megatron_become_a_tensor_each(tmp_path: Path) -> None:
    """Megatron-Core saves the layers of a stage as one tensor: [layers, ...]."""
    layers, heads, width, hidden = 3, 2, 4, 8
    qkv = torch.randn(layers, heads * 3 * width, hidden)
    proj = torch.randn(layers, hidden, hidden).bfloat16()
    norm = torch.randn(layers, hidden)
    below = "module.decoder.layers"
    content = {
        f"{below}.self_attention.linear_qkv.weight": qkv,
        f"{below}.self_attention.linear_proj.weight": proj,
        f"{below}.input_layernorm.weight": norm,
        "module.decoder.final_layernorm.weight": torch.ones(hidden),
    }
    save(content, checkpoint_id=tmp_path / "stacked", no_dist=True)

    def split(source: str, target: str, *shape: int) -> dict[str, Any]:
        return {
            "op": "split",
            "dim": 0,
            "sources": [rf"module\.decoder\.layers\.{source}"],
            "targets": [f"model.layers.{i}.{target}" for i in range(layers)],
            "then": [{"op": "reshape", "sizes": list(shape)}],
        }

    rules = [
        split(r"self_attention\.linear_proj\.weight", "self_attn.o_proj.weight", hidden, hidden),
        split(r"input_layernorm\.weight", "input_layernorm.weight", hidden),
        # q, k and v are interleaved by head; the rule moves them to the first dim for later rules.
        split(r"self_attention\.linear_qkv\.weight", "qkv", heads, 3, width, hidden),
        {"op": "rename", "sources": [r"module\.decoder\.final_layernorm\.(.*)"],
         "targets": ["model.norm.$1"]},
    ]  # fmt: skip
    rules[2]["then"] += [
        {"op": "transpose", "dims": [0, 1]},
        {"op": "reshape", "sizes": [3 * heads * width, hidden]},
    ]
    once = converted(tmp_path / "stacked", tmp_path / "once", rules)
    targets = [f"model.layers.$1.self_attn.{each}_proj.weight" for each in "qkv"]
    thirds = {
        "op": "split",
        "sources": [r"model\.layers\.(\d+)\.qkv"],
        "targets": targets,
        "dim": 0,
    }
    found = converted(tmp_path / "once", tmp_path / "out", [thirds])
    assert len(once) == 3 * layers + 1 and len(found) == 5 * layers + 1
    for i in range(layers):
        name = f"model.layers.{i}"
        assert same(found[f"{name}.self_attn.o_proj.weight"], proj[i])
        assert same(found[f"{name}.input_layernorm.weight"], norm[i])
        parts = qkv[i].reshape(heads, 3, width, hidden)
        for at, each in enumerate("qkv"):
            expected = parts[:, at].reshape(heads * width, hidden)
            assert same(found[f"{name}.self_attn.{each}_proj.weight"], expected)
    assert same(found["model.norm.weight"], torch.ones(hidden))


def rank_file(path: Path, offsets: list[int], rows: int) -> None:
    """Write the file of a rank as HuggingFaceStorageWriter(save_distributed=True) does."""
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
    metadata = {"format": "pt", "DCP_VERSION": "1.0"} | info
    save_file({"w": torch.zeros(rows, 2)}, path, metadata=metadata)


def test_a_rank_s_safetensors_file_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    rank_file(tmp_path / names[0], [0, 0], 3)
    rank_file(tmp_path / names[1], [3, 0], 2)
    for path in (tmp_path, tmp_path / names[1]):
        with pytest.raises(loadstone.FormatError) as error:
            loadstone.inspect(path)
        assert error.value.code == "dcp.unsupported"
        assert (error.value.tensor, error.value.field) == ("w", "DCP_SHARDING_INFO")
        done = run("convert", path, tmp_path / "out.safetensors")
        assert (done.returncode, "dcp.unsupported" in done.stderr) == (3, True)


@pytest.mark.parametrize("consolidates", [False, True])
def test_whole_tensors_of_the_hub_s_writer_are_read(tmp_path: Path, consolidates: bool) -> None:
    """Control: torch's writer on one rank writes whole tensors."""
    content = {"w": torch.randn(5, 2), "b": torch.ones(3)}
    writer = HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=consolidates
    )
    save(content, storage_writer=writer, no_dist=True)
    [path] = tmp_path.rglob("shard-*.safetensors")
    with safe_open(path, "pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()
    for place in (tmp_path, path):
        found = tensors_of(place)
        assert all(same(found[name], content[name]) for name in content)


def test_metadata_of_single_ranks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "__0.metadata").write_bytes(b"")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(tmp_path)
    assert error.value.code == "dcp.unsupported"
    assert "__0.metadata" in str(error.value)
    (tmp_path / "__0.metadata").rename(tmp_path / "__x.metadata")
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(tmp_path)
    assert error.value.code == "format.no_checkpoint"  # control
