"""Tests that rules move values of quantized tensors, decoded once, like plain values."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import codec_bnb
import codec_nibbles
import packed_files
import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from codec_checkpoint import Checkpoint, Tensors, Written
from codec_files import mixed, rounded
from codec_gguf import GgufFile
from codec_models import assert_equal, model_of, tensors_of
from codec_scaled import blocks_of_128
from command import run
from safetensors import safe_open
from safetensors.torch import save_file

import loadstone

EXPERTS = 256
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
Rules = list[dict[str, Any]]


def add_block(made: Checkpoint, name: str, rows: int, columns: int) -> None:
    data = made.fp8(rows, columns)
    scale = made.uniform(0.01, 0.3, -(-rows // 128), -(-columns // 128))
    components = {"data": ("", data), "scale": ("_scale_inv", scale)}
    numbers = data.float() * blocks_of_128(scale, data.shape)
    made.add(name, "fp8-block", components, numbers)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write experts as DeepSeek does: separate, with incomplete blocks at the edges."""
    made = Checkpoint(60)
    made.add_layers()
    for expert in range(EXPERTS):
        prefix = f"model.layers.3.mlp.experts.{expert}"
        add_block(made, f"{prefix}.gate_proj.weight", 130, 5)
        add_block(made, f"{prefix}.up_proj.weight", 130, 5)
        add_block(made, f"{prefix}.down_proj.weight", 5, 130)
    return made.save(tmp_path_factory.mktemp("experts"))


FUSING: Rules = [
    {
        "op": "stack_concat",
        "sources": [
            r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.gate_proj\.weight",
            r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.up_proj\.weight",
        ],
        "targets": ["decoder.$1.experts.gate_up_proj"],
        "dims": [0, 1],
    },
    {
        "op": "stack",
        "sources": [r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.down_proj\.weight"],
        "targets": ["decoder.$1.experts.down_proj"],
        "dim": 0,
        "then": [{"op": "transpose", "dims": [1, 2]}],
    },
    {"op": "rename", "sources": [r"(embed|norm)\.(.*)"], "targets": ["decoder.$1.$2"]},
]


def fused(file: Written) -> Tensors:
    def all_of(role: str) -> torch.Tensor:
        prefix = "model.layers.3.mlp.experts"
        return torch.stack(
            [file.numbers[f"{prefix}.{e}.{role}_proj.weight"] for e in range(EXPERTS)]
        )

    return {
        "decoder.3.experts.gate_up_proj": torch.cat([all_of("gate"), all_of("up")], 1),
        "decoder.3.experts.down_proj": all_of("down").transpose(1, 2).contiguous(),
        "decoder.embed.weight": file.numbers["embed.weight"],
        "decoder.norm.weight": file.numbers["norm.weight"],
        "head.bias": file.numbers["head.bias"],
    }


def check(
    file: Written, rules: Rules, numbers: Tensors, dtype: torch.dtype, **options: Any
) -> None:
    model = model_of(numbers, dtype)
    loadstone.load(model, file.path, rules=rules, unexpected="error", **options)
    expected = {name: rounded(tensor, dtype) for name, tensor in numbers.items()}
    assert_equal(tensors_of(model), expected)


def check_command(file: Written, rules: Rules, numbers: Tensors, folder: Path) -> None:
    """Plan, decode and write with the command."""
    loadstone.save_skeleton(model_of(numbers, torch.bfloat16), folder / "skeleton.json")
    (folder / "rules.json").write_text(json.dumps(rules))
    needs = ("--skeleton", folder / "skeleton.json", "--rules", folder / "rules.json")
    to_disk = ("--device-map", "disk", "--offload-folder", folder / "offload")
    done = run("load", file.path, *needs, *to_disk, "--unexpected", "error", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    reader = OffloadedWeightsLoader(save_folder=str(folder / "offload"))
    expected = {name: rounded(tensor, torch.bfloat16) for name, tensor in numbers.items()}
    assert_equal({name: reader[name] for name in reader}, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_in_blocks_become_one_tensor(experts: Written, dtype: torch.dtype) -> None:
    check(experts, FUSING, fused(experts), dtype)


@pytest.mark.parametrize("threads", [1, 4])
def test_their_bytes_follow_from_no_threads_and_no_staging(experts: Written, threads: int) -> None:
    options = {"threads": threads, "staging_bytes_max": 2048}
    check(experts, FUSING, fused(experts), torch.bfloat16, **options)


def test_the_command_fuses_them_too(experts: Written, tmp_path: Path) -> None:
    check_command(experts, FUSING, fused(experts), tmp_path)


def test_a_missing_expert_is_named(experts: Written, tmp_path: Path) -> None:
    made = Checkpoint(61)
    for expert in (0, 1, 3):
        add_block(made, f"model.layers.3.mlp.experts.{expert}.down_proj.weight", 5, 130)
    file = made.save(tmp_path)
    model = model_of({"decoder.3.experts.down_proj": torch.empty(4, 130, 5)})
    with pytest.raises(loadstone.PlanError, match=r"experts\.2\.down_proj") as caught:
        loadstone.load(model, file.path, rules=FUSING[1:])
    assert caught.value.code == "plan.missing"


# ---- each operation, on several codecs


MOVES: Rules = [
    {
        "op": "split",
        "sources": [r"(.*)\.q_proj\.weight"],
        "targets": ["$1.first", "$1.second", "$1.third"],
        "dim": 0,
        "sizes": [129, 1, 70],
    },
    {
        "op": "transpose",
        "sources": [r"(.*)\.up_proj\.weight"],
        "targets": ["$1.up"],
        "dims": [0, 1],
    },
    {
        "op": "reshape",
        "sources": [r"(.*)\.down_proj\.weight"],
        "targets": ["$1.down"],
        "sizes": [7, 90],
    },
    {
        "op": "slice",
        "sources": [r"(.*)\.k_proj\.weight"],
        "targets": ["$1.k"],
        "dim": 1,
        "start": 3,
        "sizes": [30],
    },
    {
        "op": "permute",
        "sources": [r"(.*)\.experts\.up"],
        "targets": ["$1.experts"],
        "dims": [2, 0, 1],
    },
    {"op": "rename", "sources": ["(.*)"], "targets": ["$1"]},
]


def moved(numbers: Tensors) -> Tensors:
    layer, made = "model.layers.1", dict(numbers)
    first, second, third = torch.split(made.pop(f"{layer}.q_proj.weight"), [129, 1, 70])
    made |= {f"{layer}.first": first, f"{layer}.second": second, f"{layer}.third": third}
    made[f"{layer}.up"] = made.pop(f"{layer}.up_proj.weight").T
    made[f"{layer}.down"] = made.pop(f"{layer}.down_proj.weight").reshape(7, 90)
    made[f"{layer}.k"] = made.pop(f"{layer}.k_proj.weight")[:, 3:33]
    made[f"{layer}.experts"] = made.pop(f"{layer}.experts.up").permute(2, 0, 1)
    return {name: tensor.contiguous() for name, tensor in made.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_moves_decoded_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    file = mixed().save(tmp_path)
    check(file, MOVES, moved(file.numbers), dtype)
    check(file, MOVES, moved(file.numbers), dtype, threads=4, staging_bytes_max=1)


def test_the_command_moves_them_too(tmp_path: Path) -> None:
    file = mixed().save(tmp_path)
    check_command(file, MOVES, moved(file.numbers), tmp_path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_gguf_are_split_stacked_and_transposed(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    made = GgufFile(62)
    made.add_blocks("blk.0.attn_qkv.weight", "Q4_K", (6, 256))
    for expert in range(3):
        made.add_blocks(
            f"blk.0.ffn_up.{expert}.weight", ("Q8_0", "Q6_K", "IQ4_XS")[expert], (2, 256)
        )
    file = made.save(tmp_path)
    rules: Rules = [
        {
            "op": "split",
            "sources": [r"blk\.(\d+)\.attn_qkv\.weight"],
            "targets": ["$1.q", "$1.k", "$1.v"],
            "dim": 0,
        },
        {
            "op": "stack",
            "sources": [r"blk\.(\d+)\.ffn_up\.(\d+)\.weight"],
            "targets": ["$1.up"],
            "dim": 1,
            "then": [{"op": "transpose", "dims": [0, 2]}],
        },
    ]
    q, k, v = file.numbers["blk.0.attn_qkv.weight"].chunk(3)
    ups = torch.stack([file.numbers[f"blk.0.ffn_up.{e}.weight"] for e in range(3)], 1)
    numbers = {"0.q": q, "0.k": k, "0.v": v, "0.up": ups.transpose(0, 2).contiguous()}
    check(file, rules, numbers, dtype)
    if dtype == torch.bfloat16:
        check_command(file, rules, numbers, tmp_path)


def test_experts_of_several_encodings_become_one_tensor(tmp_path: Path) -> None:
    """The experts have different encodings, as in checkpoints with more bits for some of them."""
    made = Checkpoint(63)
    add_block(made, "experts.0.weight", 6, 10)
    codec_bnb.add_4bit(made, "experts.1.weight", "nf4", (6, 10))
    made.add_plain("experts.2.weight", made.normal(6, 10).bfloat16())
    codec_bnb.add_int8(made, "experts.3", (6, 10))
    file = made.save(tmp_path)
    rules: Rules = [
        {"op": "stack", "sources": [r"experts\.(\d+)\.weight"], "targets": ["experts"], "dim": 0}
    ]
    whole = torch.stack([file.numbers[f"experts.{e}.weight"].float() for e in range(4)])
    for dtype in DTYPES:
        check(file, rules, {"experts": whole}, dtype)


def test_a_rule_for_a_weight_that_has_another_name_in_the_file(tmp_path: Path) -> None:
    """A rule warns if it names the weight, but the file has its codes under a different name.

    Regression: without a warning, the unchanged copy looked as if it had been renamed.
    """

    def told(rules: Rules) -> list[str]:
        shutil.rmtree(out, ignore_errors=True)
        report = loadstone.convert(file.path, out, rules=rules)
        found = [each for each in report.findings if each.code == "plan.pattern"]
        assert all(each.severity == "warning" for each in found)
        return [f"{each.message} {each.suggestion}" for each in found]

    def rename(*patterns: str) -> Rules:
        return [{"op": "rename", "sources": [*patterns], "targets": ["new.$1"]}]

    walked = set()
    for codec, write in sorted({**packed_files.PACKED, **codec_nibbles.WRITERS}.items()):
        file, out = write(tmp_path / codec), tmp_path / "out"
        data = {name: each.components["data"] for name, each in file.quantized.items()}
        name = next((name for name in sorted(data) if data[name] != name), None)
        if name is None:
            continue
        walked.add(data[name].removeprefix(name.removesuffix("weight")))
        weight = re.escape(name)
        idle, passed = sorted(told(rename(f"({weight})", "(absent)")), key=len)
        assert "absent" in idle and weight not in idle, codec
        assert weight in passed and f"'{data[name]}'" in passed and "absent" not in passed, codec
        assert {*names_of(out)} == {*file.stored}, codec
        joined = {"op": "concat", "dim": 0, "sources": [f"({weight})"], "targets": ["all"]}
        assert len(told([joined])) == 1
        # A rule for the whole module matches the codes under any name.
        assert told(rename(f"({re.escape(name.removesuffix('.weight'))}.*)")) == []
        assert f"new.{data[name]}" in names_of(out), codec
        assert told(rename("(.*)")) == []
    assert walked >= {"qweight", "weight_packed"}, walked


def names_of(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("order", ["qk", "kq"])
def test_codes_and_numbers_are_not_joined(order: str, tmp_path: Path) -> None:
    """Regression: the conversion dropped the plain tensor without an error."""
    file = packed_files.PACKED["packed-4-g32"](tmp_path / "model")
    names = {"q": packed_files.MODULE + ".weight", "k": "model.layers.0.k.weight"}
    plain = torch.zeros_like(file.numbers[names["q"]]).bfloat16()
    save_file(file.stored | {names["k"]: plain}, file.path / "model.safetensors")
    sources = [re.escape(names[each]) for each in order]
    rules = [{"op": "concat", "dim": 0, "sources": sources, "targets": ["qk"]}]
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(file.path, tmp_path / "out", rules=rules)
    assert caught.value.code == "plan.dtype"
