"""Tests that buffers and plain tensors of library models equal those of a direct construction.

The quick test takes some of the libraries' classes; the sweeps (``make test-all``) take all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import skeleton_worker

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

# Classes whose tables are easy to get wrong: lists, views, numpy, derived or large tensors.
DIFFUSERS_SAMPLE = (
    "Lumina2Transformer2DModel", "PixArtTransformer2DModel", "DiTTransformer2DModel",
    "WanTransformer3DModel", "QwenImageTransformer2DModel", "CogVideoXTransformer3DModel",
    "AutoencoderOobleck",
)  # fmt: skip
TRANSFORMERS_SAMPLE = ("bert", "gemma3", "t5", "llama", "mimi", "clip", "whisper")


def run(library: str, names: list[str], *flags: str) -> list[dict]:
    """Return the results of skeleton_worker.py for each name, computed in separate processes."""
    script = Path(__file__).parents[1] / "support" / "skeleton_worker.py"
    command = [sys.executable, *flags, os.fspath(script), library]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, *names], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == names
    return rows


def report(library: str, rows: list[dict]) -> list[dict]:
    """Print the comparisons; return the rows of the classes that could be constructed."""
    built = [row for row in rows if "not_built" not in row]
    for row in rows:
        if "not_built" in row:
            print(f"{library} {row['name']} does not construct: {row['not_built']}")
        for finding in row.get("findings", []):
            print(f"{library} {row['name']}: {finding['code']} {finding['target']}")
    tensors = sum(row.get("compared", 0) for row in built)
    derived = sum(len(row.get("derived", [])) for row in built)
    print(f"{library}: {len(built)} of {len(rows)} compared, {tensors} tensors, {derived} derived")
    return built


def problems(rows: list[dict]) -> dict[str, list[str]]:
    return {row["name"]: row["problems"] for row in rows if row.get("problems")}


def test_some_of_diffusers():
    rows = report("diffusers", run("diffusers, shallow", list(DIFFUSERS_SAMPLE)))
    assert problems(rows) == {}
    assert len(rows) == len(DIFFUSERS_SAMPLE)
    assert all(row["compared"] for row in rows)


def test_some_of_transformers():
    rows = report("transformers", run("transformers", list(TRANSFORMERS_SAMPLE)))
    assert problems(rows) == {}
    assert len(rows) == len(TRANSFORMERS_SAMPLE)


def test_the_comparison_sees_what_a_construction_on_meta_loses(monkeypatch):
    """Control: the comparison detects values that a model built on the meta device lacks."""
    import diffusers
    import torch

    monkeypatch.setattr(skeleton_worker, "skeleton", lambda: torch.device("meta"))
    monkeypatch.setattr(skeleton_worker, "recompute", lambda model: [])
    build = lambda: diffusers.Lumina2Transformer2DModel(  # noqa: E731
        num_layers=1, num_refiner_layers=1, hidden_size=96, num_attention_heads=4, num_kv_heads=2,
        axes_dim_rope=(8, 8, 8), cap_feat_dim=16,
    )  # fmt: skip
    result = skeleton_worker.compare(build, skeleton_worker.build_skeleton(build))
    assert any("freqs_cis[0] (attribute) differs" in problem for problem in result["problems"])


@pytest.mark.sweep
def test_all_of_diffusers():
    rows = report("diffusers", run("diffusers", skeleton_worker.diffusers_names()))
    assert problems(rows) == {}
    assert len(rows) >= 125


@pytest.mark.sweep
def test_all_of_transformers():
    rows = report("transformers", run("transformers", skeleton_worker.transformers_names()))
    assert problems(rows) == {}
    assert len(rows) >= 100


MEMORY = """
import json, torch, transformers
from loadstone._skeleton.skeleton import skeleton
from transformers import LlamaConfig, LlamaForCausalLM

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def build(layers):
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=layers, hidden_size=4096, intermediate_size=11008, vocab_size=32000,
        num_attention_heads=32, num_key_value_heads=32))

before = peak()
with skeleton():
    model = build(32)
count = sum(parameter.numel() for parameter in model.parameters())
grown = peak() - before
directly = build(0)
print(json.dumps({"grown": grown, "directly": peak() - before, "parameters": count}))
"""


def test_a_model_of_seven_billion_parameters_takes_no_memory():
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["parameters"] > 6.7e9
    assert result["grown"] < 200e6
    assert result["directly"] > 200e6  # control: one embedding alone takes more than this
