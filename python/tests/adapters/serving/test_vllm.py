"""Tests vLLM's load format without vLLM: options, converted tensors, and write tracking.

``test_serving_deferred.py`` tests deferred tensors; ``serving/test_serving.py`` runs an installed
vLLM (``make test-vllm``).
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import same

import loadstone.vllm
from loadstone._adapters.serving.converted import (
    ConvertedCheckpoint,
    plan_conversion,
    quantization_config,
)
from loadstone._adapters.serving.options import ConversionOptions, Options
from loadstone._adapters.serving.write_tracking import Unwritten, WriteTracker
from loadstone._adapters.sites.vllm import SITES

# --- the plugin -----------------------------------------------------------------------------------


def test_a_vllm_that_is_not_known_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would prevent the server's start, even with a different load format."""
    other = types.ModuleType("vllm")
    other.__version__ = "99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    SITES.reset()
    try:
        loadstone.vllm.register()
    finally:
        SITES.reset()
    assert "unsupported version of vllm" in caplog.text and "99.0" in caplog.text


def test_vllm_finds_the_plugin() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="loadstone")
    assert [each.load() for each in found] == [loadstone.vllm.register]


# --- options --------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    assert Options.from_mapping({}) == Options()
    given = {"threads": 3, "staging_bytes_max": "16MiB", "dequantize": True}
    assert Options.from_mapping(given) == Options(3, 16 << 20, True)
    changes = {"quantize": "fp8", "exclude": "lm_head", "lora": {"a/": 0.5}}
    expected = ConversionOptions("fp8", exclude=("lm_head",), lora={"a/": 0.5})
    assert Options.from_mapping(changes) == Options(changes=expected)


def test_options_stand_in_the_config_too() -> None:
    overrides = {"loadstone_quantize": "nvfp4", "loadstone_include": ["a", "b"], "rope_theta": 3}
    assert ConversionOptions.from_overrides(overrides) == ConversionOptions(
        "nvfp4", include=("a", "b")
    )
    assert not ConversionOptions.from_overrides({"vocab_size": 3})
    with pytest.raises(loadstone.PlanError, match="did you mean 'quantize'"):
        ConversionOptions.from_overrides({"loadstone_quantise": "fp8"})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"thread": 3}, "thread"),
        ({"threads": 0}, "0"),
        ({"threads": True}, "True"),
        ({"threads": "many"}, "'many'"),
        ({"staging_bytes_max": 0}, "0"),
        ({"staging_bytes_max": "much"}, "'much'"),
        ({"dequantize": "yes"}, "'yes'"),
        ({"dequantize": 1}, "1"),
        ({"missing": "ignore"}, "'ignore'"),
        ({"deferred": 0}, "0"),
        ({"quantize": 8}, "8"),
        ({"style": "mine"}, "'mine'"),
        ({"include": 3}, "3"),
        ({"lora": {"a": "b"}}, "{'a': 'b'}"),
        (["threads"], "list"),
        ({"style": "modelopt"}, "style"),
        ({"include": ["a"], "exclude": "b", "lora": "a"}, "include, exclude"),
        ({"digest": "sha256-tree"}, "digest"),
        *(({name: ""}, "''") for name in ("weights", "receipt", "quantize", "include", "lora")),
        *(({name: []}, "[]") for name in ("include", "exclude")),
        *(({name: {}}, "{}") for name in ("quantize", "lora")),
    ],
)
def test_other_options_are_refused(given: Any, found: str) -> None:
    with pytest.raises(loadstone.PlanError) as caught:
        Options.from_mapping(given)
    assert (caught.value.code, caught.value.found) == ("plan.options", found)


def test_options_that_belong_to_others_are_taken_with_them(tmp_path: Path) -> None:
    how = {"style": "modelopt", "include": ["a"], "exclude": "b"}
    expected = ConversionOptions("fp8", "modelopt", ("a",), ("b",))
    assert Options.from_mapping({"quantize": "fp8"} | how).changes == expected
    names = {f"loadstone_{name}": value for name, value in how.items()}
    assert ConversionOptions.from_overrides({"loadstone_quantize": "fp8"} | names) == expected
    with pytest.raises(loadstone.PlanError, match="requires quantize"):
        ConversionOptions.from_overrides(names)
    given = {"digest": "sha256-tree", "receipt": str(tmp_path), "weights": str(tmp_path)}
    assert Options.from_mapping(given) == Options(**given)


# --- converted tensors ----------------------------------------------------------------------------


def made(path: Path, group_bytes: int = 64 << 20, **changes: Any) -> ConvertedCheckpoint:
    return ConvertedCheckpoint(
        plan_conversion(str(path), ConversionOptions(**changes), group_bytes=group_bytes)
    )


def model_folder(folder: Path) -> Path:
    """Write layers with projections that share scales, if the encoding has scales."""
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    state = {"model.embed_tokens.weight": weight(100, 128), "model.norm.weight": weight(128)}
    for layer in range(3):
        for name in ("q_proj", "k_proj", "v_proj"):
            state[f"model.layers.{layer}.self_attn.{name}.weight"] = weight(256, 128)
        for expert in range(4):
            for name in ("gate_proj", "up_proj"):
                state[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = weight(128, 128)
    loadstone.torch.save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128}))
    return folder


ENCODINGS = [
    ("fp8", "modelopt"),
    ("fp8", "compressed-tensors"),
    ("fp8-channel", "compressed-tensors"),
    ("fp8-block", "modelopt"),
    ("int8-channel", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("nvfp4", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nf4", ""),
]


@pytest.mark.parametrize(("encoding", "style"), ENCODINGS)
@pytest.mark.parametrize("group_bytes", [1000, 64 << 20])
def test_what_is_quantized_on_the_way_is_the_offline_folder(
    encoding: str, style: str, group_bytes: int, tmp_path: Path
) -> None:
    (folder := tmp_path / "model").mkdir()
    model_folder(folder)
    offline = tmp_path / "offline"
    loadstone.convert(folder, offline, quantize=encoding, style=style or None)
    expected = loadstone.torch.load_file(offline)
    converted = made(folder, group_bytes, quantize=encoding, style=style)
    found = dict(converted.tensors())
    assert found.keys() == expected.keys() and len(found) > 15
    assert [name for name in found if not same(found[name], expected[name])] == []
    config = json.loads((offline / "config.json").read_text())["quantization_config"]
    assert (
        quantization_config(plan_conversion(str(folder), ConversionOptions(encoding, style)))
        == config
    )


def test_what_is_merged_on_the_way_is_the_offline_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    (lora := tmp_path / "lora").mkdir()
    model_folder(folder)
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    factors = {
        f"{name}.lora_A.weight": torch.randn(4, 128),
        f"{name}.lora_B.weight": torch.randn(256, 4),
    }
    loadstone.torch.save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj"]})
    )
    for quantize in ("", "fp8"):
        offline = tmp_path / f"offline{quantize}"
        style = "compressed-tensors" if quantize else None
        loadstone.merge(folder, offline, lora={lora: 0.5}, quantize=quantize or None, style=style)
        expected = loadstone.torch.load_file(offline)
        found = dict(made(folder, 5000, quantize=quantize, lora={str(lora): 0.5}).tensors())
        assert found.keys() == expected.keys()
        assert [each for each in found if not same(found[each], expected[each])] == []
    plain = loadstone.load_file(folder)
    changed = "model.layers.1.self_attn.k_proj.weight"
    merged = loadstone.load_file(tmp_path / "offline")
    assert [each for each in plain if not same(plain[each], merged[each])] == [changed]  # control


def saved(path: Path, count: int, numel: int) -> Path:
    state = {f"t{i}": torch.full((numel,), i, dtype=torch.int32) for i in range(count)}
    loadstone.torch.save_file(state, path / "model.safetensors")
    return path


def test_who_keeps_all_has_all(tmp_path: Path) -> None:
    """The tensors must not reuse memory, because a model may collect all before it reads them."""
    kept = list(made(saved(tmp_path, 50, 1000), 16384).tensors())
    assert {name for name, _ in kept} == {f"t{i}" for i in range(50)}
    assert all((tensor == int(name[1:])).all() for name, tensor in kept)


def test_who_stops_early_leaves_nothing_behind(tmp_path: Path) -> None:
    def at_work() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("loadstone")]

    tensors = made(saved(tmp_path, 50, 1000), 16384).tensors()
    assert next(tensors)[0] == "t0" and len(at_work()) == 1
    tensors.close()  # type: ignore[attr-defined]
    assert at_work() == []


def test_what_is_not_wanted_is_not_made(tmp_path: Path) -> None:
    converted = made(saved(tmp_path, 50, 1000), 4000)
    assert [name for name, _ in converted.tensors(lambda name: name == "t7")] == ["t7"]
    assert converted.bytes_read == 4000
    assert list(made(tmp_path).tensors(lambda name: False)) == []


def test_a_damaged_file_ends_it(tmp_path: Path) -> None:
    saved(tmp_path, 50, 1000)
    converted = made(tmp_path, 4000)
    tensors = converted.tensors()
    next(tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(loadstone.Error) as caught:
        list(tensors)
    assert caught.value.code in ("io.changed", "io.short_read") and "model.safetensors" in str(
        caught.value
    )


MEASURED = """
import sys, torch, loadstone
from loadstone._adapters.serving.converted import ConvertedCheckpoint, plan_conversion
from loadstone._adapters.serving.options import ConversionOptions

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

made = plan_conversion(sys.argv[1], ConversionOptions(), group_bytes=(64 << 20) // 3)
before, kept = peak(), []
for name, tensor in ConvertedCheckpoint(made).tensors():
    if sys.argv[2] == "keeps":
        kept.append(tensor)
print(peak() - before)
"""


@pytest.mark.parametrize("way", ["drops", "keeps"])
def test_memory_is_bounded(way: str, tmp_path: Path) -> None:
    """Convert 400 MB in steps of 64 MiB; as a control, keep all tensors."""
    saved(tmp_path, 40, 2_500_000)
    command = [sys.executable, "-c", MEASURED, str(tmp_path), way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{way}: {int(done.stdout) / 1e6:.0f} MB")
    assert (int(done.stdout) <= 128 << 20) == (way == "drops")


# --- write tracking -------------------------------------------------------------------------------


def test_all_that_is_written_is_seen() -> None:
    whole, rows, columns, turned = (torch.empty(6, 8) for _ in range(4))
    with WriteTracker() as writes:
        whole.data.copy_(torch.ones(6, 8))
        rows.data[:4].copy_(torch.ones(4, 8))
        rows.data[4:].fill_(0)
        for half in columns.data.chunk(2, dim=1):
            half.copy_(torch.ones(6, 4))
        turned.data.t().copy_(torch.ones(8, 6))
    assert [writes.unwritten(each) for each in (whole, rows, columns, turned)] == [None] * 4


def test_what_is_left_is_seen() -> None:
    nothing, rows, columns = torch.empty(6, 8), torch.empty(6, 8), torch.empty(6, 8)
    stack, scalar, empty = torch.empty(4, 3, 5), torch.empty(()), torch.empty(0, 3)
    with WriteTracker() as writes:
        rows.data[:5].copy_(torch.ones(5, 8))
        columns.data.narrow(1, 0, 7).copy_(torch.ones(6, 7))
        for expert in (0, 1, 3):
            stack.data[expert].copy_(torch.ones(3, 5))
        torch.ones(9)  # a write outside of the model's memory
    assert writes.unwritten(nothing) == Unwritten((0, 0), 48)
    assert writes.unwritten(rows) == Unwritten((5, 0), 8)
    assert writes.unwritten(columns) == Unwritten((0, 7), 6)
    assert writes.unwritten(stack) == Unwritten((2, 0, 0), 15)
    assert writes.unwritten(scalar) == Unwritten((), 1)
    assert writes.unwritten(empty) is None
    assert writes.unwritten(rows[:5]) is None and writes.unwritten(columns[:, 2:7]) is None


def test_what_a_model_keeps_counts_by_its_values() -> None:
    """Parameters get the results of operations, of foreach operations, or uninitialised memory."""
    first, second, third, fourth = (torch.nn.Parameter(torch.empty(4, 6)) for _ in range(4))
    with WriteTracker() as writes:
        first.data = torch.ones(6, 4, dtype=torch.float64).t().to(torch.float32)
        second.data = torch.cat([torch.ones(2, 6), torch.zeros(2, 6)])
        third.data = torch.empty(4, 6)
        third.data.narrow(0, 0, 4)  # creates a view, which is not a write
        torch._foreach_copy_([fourth.data[:1], fourth.data[1:]], [torch.ones(1, 6)] * 2)
    assert [writes.unwritten(each) for each in (first, second, fourth)] == [None] * 3
    assert writes.unwritten(third) == Unwritten((0, 0), 24)


def test_memory_that_is_used_again_begins_anew() -> None:
    with WriteTracker() as writes:
        written = [torch.ones(300, 500) for _ in range(20)]
        places = {each.data_ptr() for each in written}
        assert [writes.unwritten(each) for each in written] == [None] * 20
        written.clear()
        blanks: list[torch.Tensor] = []
        # The allocator may use other free memory first.
        while len(blanks) < 1000 and not places & {each.data_ptr() for each in blanks}:
            blanks.append(torch.empty(300, 500))
    assert places & {each.data_ptr() for each in blanks}
    assert {writes.unwritten(each) for each in blanks} == {Unwritten((0, 0), 150_000)}


def test_random_writes_are_counted() -> None:
    """Compare the counts with a mask of the elements."""
    random = torch.Generator().manual_seed(5)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=random))

    for _ in range(300):
        shape = [1 + below(5) for _ in range(1 + below(4))]
        tensor, mask = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
        order = torch.randperm(len(shape), generator=random).tolist()
        tensor = tensor.permute(order)
        mask = mask.permute(order)
        with WriteTracker() as writes:
            for _ in range(below(4)):
                box = [slice(begin := below(n), begin + 1 + below(n), 1 + below(2))
                       for n in tensor.shape]  # fmt: skip
                tensor.data[tuple(box)].fill_(1)
                mask[tuple(box)] = True
        hole, left = writes.unwritten(tensor), int((~mask).sum())
        assert (hole is None) == (left == 0)
        if hole is not None:
            assert hole.count == left and not mask[hole.index]
