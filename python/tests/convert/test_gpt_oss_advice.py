"""Every chain of advice for GPT-OSS ends: in a conversion, or in "no output keeps these values"."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

Words = tuple[str, ...]
STYLES = ((), ("--style", "modelopt"), ("--style", "compressed-tensors"))
LAYOUTS = ((), *(("--experts", each) for each in ("keep", "separate", "fused")))
ENCODINGS = ("nvfp4", "fp8", "mxfp8", "mxfp4", "experts=mxfp8", "experts=mxfp4")
REQUESTS: list[Words] = [
    ("--quantize", encoding, *style, *layout)
    for encoding in ENCODINGS
    for style in STYLES
    for layout in LAYOUTS
]
IMPOSSIBLE = "no output keeps these values"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a tiny GPT-OSS in BF16, and the same model with its experts in MXFP4."""
    root = tmp_path_factory.mktemp("sources")
    config = transformers.GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=128,
    )
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(root / "bf16")
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(root / "bf16" / "model.safetensors").items():
        if not name.endswith(("experts.down_proj", "experts.gate_up_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        grid = (experts, rows, columns // 32)
        codes = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(110, 125, grid, dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    (root / "mxfp4").mkdir()
    save_file(tensors, root / "mxfp4" / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((root / "bf16" / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "mxfp4"}
    (root / "mxfp4" / "config.json").write_text(json.dumps(text))
    return {name: root / name for name in ("bf16", "mxfp4")}


def test_the_same_advice_is_given_once(sources: dict[str, Path], tmp_path: Path) -> None:
    for style in STYLES:
        words = ("--quantize", "nvfp4", "--experts", "separate", *style, "--dry-run")
        output = run("convert", sources["mxfp4"], tmp_path / "out", *words).stdout
        (line,) = [each for each in output.splitlines() if "[convert.unread]" in each]
        assert "the codes of 24 tensors as codes" in line and "nor 24 plain tensors" in line
        assert "'model.layers.*.mlp.experts.*.up_proj.weight' (8)" in line


def with_option(words: Words, option: str, value: str) -> Words:
    if option in words:
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    return (*words, option, value)


def requests_after(words: Words, text: str) -> list[Words]:
    """Return the requests that a message advises."""
    advised = []
    if "separate the experts (--experts separate)" in text and IMPOSSIBLE not in text:
        advised.append(with_option(words, "--experts", "separate"))
    if "(--experts keep)" in text:
        advised.append(with_option(words, "--experts", "keep"))
    for style in re.findall(r"choose the style ([\w-]+)", text):
        advised.append(with_option(words, "--style", style))
    if re.search(r"exclude (the tensors|them|it) \(--exclude\)", text):
        advised.append(with_option(words, "--exclude", "experts"))
    return advised


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_every_chain_of_advice_ends(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    results: dict[Words, tuple[int, list[str]]] = {}

    def outcome(words: Words) -> tuple[int, list[str]]:
        if words not in results:
            done = run("convert", sources[name], tmp_path / "out", *words, "--dry-run", "--json")
            report: dict[str, Any] = json.loads(done.stdout)
            found = report.get("findings", [report.get("error", {})])
            severe = [each for each in found if each.get("severity") != "info"]
            texts = [f"{each['message']} ({each.get('suggestion')})" for each in severe]
            results[words] = (done.returncode, texts)
        return results[words]

    def follow(words: Words, known: tuple[Words, ...]) -> None:
        assert words not in known, [(each, results[each]) for each in (*known, words)]
        status, texts = outcome(words)
        advised = [request for text in texts for request in requests_after(words, text)]
        ends = advised or any(IMPOSSIBLE in text for text in texts) or status == 0
        assert ends, (words, texts)
        for request in advised:
            follow(request, (*known, words))

    for words in REQUESTS:
        follow(words, ())
    lossy = [texts for _, texts in results.values() if any(IMPOSSIBLE in each for each in texts)]
    assert bool(lossy) == (name == "mxfp4")
