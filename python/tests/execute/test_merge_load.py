"""Merging adapters during a load gives the same bits as merging into a file and loading that."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from merge_models import (
    HIDDEN,
    INNER,
    Tensors,
    added,
    model,
    modules,
    products,
    rounded,
    same_bits,
    with_products,
    write_peft,
)
from safetensors.torch import save_file
from torch import nn

import loadstone


class Net(nn.Module):
    """A model with the names of :func:`merge_models.model`."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(11, dtype=torch.int64))
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.model.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            layer.self_attn.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
            layer.self_attn.v_proj = nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
            layer.mlp.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
            layer.mlp.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
            self.model.layers.append(layer)
        self.to(dtype)


def skeleton(build: Callable[[], nn.Module] = Net) -> nn.Module:
    with loadstone.skeleton():
        return build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base, two adapters, and a base of FP8 blocks."""
    folder = tmp_path_factory.mktemp("merge-load")
    (folder / "base").mkdir()
    save_file(model(0), folder / "base" / "model.safetensors")
    for seed in (1, 2):
        made = products(4, seed, modules(), torch.bfloat16)
        write_peft(folder / f"adapter-{seed}", made, r=4, lora_alpha=8)
    loadstone.convert(
        folder / "base" / "model.safetensors", folder / "fp8.safetensors", quantize="fp8"
    )
    return folder


def both(folder: Path) -> dict[str, float]:
    return {str(folder / "adapter-1"): 0.75, str(folder / "adapter-2"): -0.5}


def from_file(folder: Path, out: Path, base: str = "base", **options: Any) -> nn.Module:
    """Merge into a file, and load the file."""
    loadstone.merge(folder / base, out, lora=both(folder), **options)
    loaded = skeleton()
    loadstone.load(loaded, out, dtype=options.get("dtype"))
    return loaded


class TestLoad:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_as_from_a_file(
        self, folder: Path, tmp_path: Path, dtype: str | None, threads: int
    ) -> None:
        options = {} if dtype is None else {"dtype": dtype}
        expected = from_file(folder, tmp_path / "out.safetensors", **options)
        found = skeleton()
        loadstone.load(found, folder / "base", lora=both(folder), threads=threads, **options)
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))

    def test_as_promised(self, folder: Path) -> None:
        found = skeleton()
        loadstone.load(found, folder / "base", lora=folder / "adapter-1")
        made = products(4, 1, modules(), torch.bfloat16)
        same_bits(dict(found.state_dict()), rounded(with_products(model(0), made, 2), model(0)))

    def test_a_quantized_base(self, folder: Path, tmp_path: Path) -> None:
        expected = from_file(folder, tmp_path / "out.safetensors", "fp8.safetensors")
        found = skeleton()
        loadstone.load(found, folder / "fp8.safetensors", lora=both(folder))
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))

    @pytest.mark.parametrize("encoding", ["nf4", "int8"])
    def test_a_quantized_target(self, folder: Path, tmp_path: Path, encoding: str) -> None:
        pytest.importorskip("bitsandbytes")
        quantize = {r"model\.layers\..*_proj\.weight": encoding}
        loadstone.merge(folder / "base", tmp_path / "o.safetensors", lora=both(folder))
        found, expected = skeleton(), skeleton()
        loadstone.load(found, folder / "base", lora=both(folder), quantize=quantize)
        loadstone.load(expected, tmp_path / "o.safetensors", quantize=quantize)
        assert type(found.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))

    def test_rules_and_disk(self, folder: Path, tmp_path: Path) -> None:
        """Rules rename the tensors, and the device map places some of them on disk."""
        old = {name.replace("model.", "old."): tensor for name, tensor in model(0).items()}
        save_file(old, tmp_path / "old.safetensors")
        found, expected = skeleton(), skeleton()
        arguments: dict[str, Any] = {
            "rules": {"old.": "model."},
            "device_map": {"": "cpu", "model.layers.1": "disk"},
            "offload_folder": tmp_path / "offload",
        }
        report = loadstone.load(found, tmp_path / "old.safetensors", lora=both(folder), **arguments)
        assert report.provenance["model.layers.1.mlp.up_proj.weight"].delivery == "disk_write"
        loadstone.load(expected, folder / "base", lora=both(folder))
        name = "model.layers.0.mlp.up_proj.weight"
        same_bits({name: found.state_dict()[name]}, {name: expected.state_dict()[name]})
        from accelerate.utils import OffloadedWeightsLoader

        kept = OffloadedWeightsLoader(save_folder=str(tmp_path / "offload"))
        name = "model.layers.1.mlp.up_proj.weight"
        same_bits({name: kept[name].clone()}, {name: expected.state_dict()[name]})

    def test_names_of_the_checkpoint(self, folder: Path) -> None:
        """The model has no prefix, but the checkpoint and the adapter have one."""
        found, expected = skeleton().model, skeleton()
        rules = {"model.": ""}
        loadstone.load(found, folder / "base", lora=both(folder), rules=rules, unexpected="ignore")
        loadstone.load(expected, folder / "base", lora=both(folder))
        same_bits(dict(found.state_dict()), dict(expected.model.state_dict()))

    def test_experts_that_rules_stack(self, tmp_path: Path) -> None:
        hidden, inner = 16, 12
        base = {
            f"l.experts.{e}.{name}_proj.weight": torch.randn(inner, hidden)
            for e in range(3)
            for name in ("gate", "up")
        }
        save_file(base, tmp_path / "base.safetensors")
        made = products(2, 1, {"l.experts.1.up_proj": (inner, hidden)})
        write_peft(tmp_path / "adapter", made, r=2, lora_alpha=2)
        rules = [
            {
                "op": "stack_concat",
                "sources": [rf"l\.experts\.(\d+)\.{name}_proj\.weight" for name in ("gate", "up")],
                "targets": ["l.experts.gate_up_proj"],
                "dims": [0, 1],
            }
        ]
        net = nn.Module()
        net.l = nn.Module()
        net.l.experts = nn.Module()
        net.l.experts.gate_up_proj = nn.Parameter(torch.empty(3, 2 * inner, hidden))
        loadstone.load(net, tmp_path / "base.safetensors", rules=rules, lora=tmp_path / "adapter")
        name = "l.experts.1.up_proj"
        weight = added(base[f"{name}.weight"], made[f"{name}.lora_A"], made[f"{name}.lora_B"], 1)
        assert torch.equal(net.l.experts.gate_up_proj[1, inner:], weight)
        assert torch.equal(
            net.l.experts.gate_up_proj[0, :inner], base["l.experts.0.gate_proj.weight"]
        )

    def test_a_tie_has_two_names(self, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(12, 8)
                self.head = nn.Linear(8, 12, bias=False)
                self.head.weight = self.embed.weight

        weight = torch.randn(12, 8)
        save_file({"embed.weight": weight}, tmp_path / "base.safetensors")
        made = products(2, 1, {"head": (12, 8)})
        write_peft(tmp_path / "adapter", made, r=2, lora_alpha=2)
        changed = added(weight, made["head.lora_A"], made["head.lora_B"], 1)
        for tie in ("split", "keep"):
            tied = skeleton(Tied)
            loadstone.load(tied, tmp_path / "base.safetensors", lora=tmp_path / "adapter", tie=tie)
            assert (tied.head.weight is tied.embed.weight) == (tie == "keep")
            assert torch.equal(tied.head.weight, changed)
            assert torch.equal(tied.embed.weight, changed if tie == "keep" else weight)

    def test_where_values_came_from(self, folder: Path) -> None:
        found = skeleton()
        report = loadstone.load(found, folder / "base", lora=both(folder))
        item = report.provenance["model.layers.0.mlp.up_proj.weight"]
        assert item.origin == "checkpoint"
        assert [Path(path).parent.name for path in item.merged] == ["adapter-1", "adapter-2"]
        names = [source.tensor for source in item.sources]
        assert names[0] == "model.layers.0.mlp.up_proj.weight"
        assert len(names) == 5
        assert report.provenance["model.norm.weight"].merged == ()
        assert loadstone.audit(found, report).ok
        planned = loadstone.plan(skeleton(), folder / "base", lora=both(folder))
        assert len({t.name: t for t in planned.targets}[item.target].merged) == 2
        assert report.staging_bytes_peak <= planned.peak_bytes["cpu"]

    def test_into_a_model_that_has_memory(self, folder: Path) -> None:
        found, expected = Net(), skeleton()
        weight = found.model.layers[0].mlp.up_proj.weight
        loadstone.load(found, folder / "base", lora=both(folder), in_place=True)
        loadstone.load(expected, folder / "base", lora=both(folder))
        assert found.model.layers[0].mlp.up_proj.weight is weight
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))


class TestRefused:
    def refused(self, folder: Path, adapter: Tensors, tmp_path: Path, **arguments: Any) -> Any:
        write_peft(tmp_path / "adapter", adapter, r=2, lora_alpha=2)
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.load(skeleton(), folder / "base", lora=tmp_path / "adapter", **arguments)
        return caught.value

    def test_a_module_that_the_model_lacks(self, folder: Path, tmp_path: Path) -> None:
        error = self.refused(folder, products(2, 1, {"model.lost": (4, 4)}), tmp_path)
        assert error.code == "merge.unused"
        assert "model.lost" in str(error)

    def test_what_the_checkpoint_does_not_give(self, folder: Path, tmp_path: Path) -> None:
        class Wider(Net):
            def __init__(self) -> None:
                super().__init__()
                self.extra = nn.Linear(4, 4, bias=False)

        write_peft(tmp_path / "adapter", products(2, 1, {"extra": (4, 4)}), r=2, lora_alpha=2)
        with pytest.raises(loadstone.PlanError, match="origin zeros") as caught:
            loadstone.load(
                skeleton(Wider), folder / "base", lora=tmp_path / "adapter", missing="zeros"
            )
        assert caught.value.code == "merge.adapter"

    def test_integers(self, folder: Path, tmp_path: Path) -> None:
        error = self.refused(folder, {"positions": torch.zeros(11)}, tmp_path)
        assert error.code == "merge.adapter"
        assert "I64" in str(error)

    def test_patterns_without_adapters(self, folder: Path) -> None:
        with pytest.raises(loadstone.Error, match="lora_ignore requires lora"):
            loadstone.plan(skeleton(), folder / "base", lora_ignore="x")


class TestSaved:
    """Saved plans with adapters, which record the checkpoint and name of each source."""

    def test_carried_out_by_python(self, folder: Path, tmp_path: Path) -> None:
        expected, found, third = skeleton(), skeleton(), skeleton()
        plan = loadstone.plan(expected, folder / "base", lora=both(folder))
        plan.save(tmp_path / "plan.json")
        again = loadstone.Plan.load(tmp_path / "plan.json")
        assert again.to_json() == plan.to_json()
        plan.execute()
        again.execute(model=found)
        pickle.loads(pickle.dumps(plan)).execute(model=third)
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))
        same_bits(dict(third.state_dict()), dict(expected.state_dict()))

    def test_carried_out_by_the_command(self, folder: Path, tmp_path: Path) -> None:
        lora = [f"{path}:{factor}" for path, factor in both(folder).items()]
        out = tmp_path / "plan.json"
        loadstone.save_skeleton(skeleton(), tmp_path / "skeleton.json")
        options = ["--lora", lora[0], "--lora", lora[1], "--skeleton", tmp_path / "skeleton.json"]
        output("plan", folder / "base", *options, "-o", out)
        loaded = json.loads(output("load", "--plan", out, "--json"))
        assert loaded["audit"]["ok"]
        item = loaded["provenance"]["model.layers.0.mlp.up_proj.weight"]
        assert len(item["merged"]) == 2
        loaded = json.loads(output("load", folder / "base", *options, "--json"))
        assert loaded["audit"]["ok"]
        found, expected = skeleton(), skeleton()
        loadstone.Plan.load(out).execute(model=found)
        loadstone.load(expected, folder / "base", lora=both(folder))
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))

    def test_roots_given_anew(self, folder: Path, tmp_path: Path) -> None:

        shutil.copytree(folder, tmp_path / "here")
        here = tmp_path / "here"
        plan = loadstone.plan(skeleton(), here / "base", lora=both(here))
        plan.save(tmp_path / "plan.json")
        here.rename(tmp_path / "there")
        there = tmp_path / "there"
        with pytest.raises(loadstone.Error):
            loadstone.Plan.load(tmp_path / "plan.json", root=there / "base")
        roots = [there / name for name in ("base", "adapter-1", "adapter-2")]
        found, expected = skeleton(), skeleton()
        loadstone.Plan.load(tmp_path / "plan.json", root=roots).execute(model=found)
        loadstone.load(expected, there / "base", lora=both(there))
        same_bits(dict(found.state_dict()), dict(expected.state_dict()))
        loaded = json.loads(output("load", *roots, "--plan", tmp_path / "plan.json", "--json"))
        assert loaded["audit"]["ok"]
        with pytest.raises(loadstone.Error, match="more checkpoints were passed"):
            loadstone.Plan.load(tmp_path / "plan.json", root=[*roots, there])
        with pytest.raises(loadstone.LoadError) as caught:  # adapters swapped
            loadstone.Plan.load(tmp_path / "plan.json", root=[roots[0], roots[0], roots[2]])
        assert caught.value.code in ("io.changed", "io.not_found")
