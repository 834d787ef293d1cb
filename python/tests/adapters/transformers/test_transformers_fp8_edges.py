"""Tests FP8 with incomplete blocks at the edges: every entry point yields the same values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from safetensors.torch import load_file, save_file

import loadstone

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 136}
LATENT = {
    "kv_lora_rank": 512,  # with the 64 below, the 576 rows of DeepSeek's kv_a_proj
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"hidden_size": 160, "intermediate_size": 200, "num_key_value_heads": 2, "head_dim": 40},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"hidden_size": 160, "num_key_value_heads": 2, "head_dim": 40, "num_experts": 4, **EXPERTS},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "hidden_size": 256,
            "intermediate_size": 256,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
            **EXPERTS,
            **LATENT,
        },
    ),
}


def parts(name: str) -> tuple[Any, Any]:
    cls, config, sizes = MODELS[name]
    return getattr(transformers, cls), getattr(transformers, config)(**SMALL, **sizes)


def encoded(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode block by block; return the codes, the scales and the decoded values."""
    rows, columns = values.shape
    grid = (-(-rows // size), -(-columns // size))
    scales, codes, decoded = torch.zeros(grid), torch.zeros_like(values), torch.zeros_like(values)
    for i in range(grid[0]):
        for j in range(grid[1]):
            where = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scale = values[where].abs().max() / 448
            block = (values[where] / scale).to(torch.float8_e4m3fn).float()
            scales[i, j], codes[where], decoded[where] = scale, block, block * scale
    return codes.to(torch.float8_e4m3fn), scales, decoded


def checkpoint(name: str, folder: Path, size: int = 128) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a folder in FP8; return the model class, and the decoded values by name in the file."""
    cls, config = parts(name)
    torch.manual_seed(0)
    state = {}
    cls(config).save_pretrained(folder)
    values = {
        key: torch.randn(value.shape) * 0.1
        for key, value in load_file(folder / "model.safetensors").items()
    }
    for key, value in list(values.items()):
        if ".layers." in key and value.dim() == 2 and not key.endswith("mlp.gate.weight"):
            state[key], state[f"{key}_scale_inv"], values[key] = encoded(value, size)
        else:
            state[key] = values[key] = value.bfloat16()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    section |= {"weight_block_size": [size, size]}  # type: ignore[dict-item]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
    return cls, values


def expected(name: str, values: dict[str, torch.Tensor], folder: Path, dtype: Any) -> Any:
    """Return the model that transformers loads from a checkpoint of the decoded values."""
    cls, config = parts(name)
    plain = folder.parent / "plain"
    config.save_pretrained(plain)
    save_file(
        {key: value.to(dtype) for key, value in values.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    return cls.from_pretrained(plain, dtype=dtype)


def by_patch(cls: Any, folder: Path, dtype: Any) -> Any:
    with loadstone.patch("transformers"):
        return cls.from_pretrained(folder, dtype=dtype)


def by_load(cls: Any, folder: Path, dtype: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with loadstone.skeleton():
        model = cls(config)
    loadstone.load(model, folder, dtype=dtype, rules="transformers")
    return model


def by_plan(cls: Any, folder: Path, dtype: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with loadstone.skeleton():
        model = cls(config)
    file = folder.parent / "plan.json"
    loadstone.plan(model, folder, dtype=dtype, rules="transformers").save(file)
    loadstone.Plan.load(file).execute(into=model)
    return model


def by_conversion(cls: Any, folder: Path, dtype: Any) -> Any:
    written = folder.parent / "written"
    loadstone.convert(folder, written, dequantize=True)
    return loadstone.transformers.from_pretrained(cls, written, dtype=dtype)


ours = loadstone.transformers.from_pretrained
WAYS: dict[str, Callable[[Any, Path, Any], Any]] = {
    "from_pretrained": lambda cls, folder, dtype: ours(cls, folder, dtype=dtype),
    "dequantize": lambda cls, folder, dtype: ours(cls, folder, dtype=dtype, dequantize=True),
    "patch": by_patch,
    "load": by_load,
    "plan": by_plan,
    "convert": by_conversion,
}
SAYS = ("from_pretrained", "patch")  # both warn, because transformers would decode differently


# A conversion writes only the config's dtype.
CELLS = [
    *pairs(
        list(MODELS), [way for way in WAYS if way != "convert"], [torch.bfloat16, torch.float32]
    ),
    *((name, "convert", torch.bfloat16) for name in MODELS),
]


@pytest.mark.parametrize(("name", "way", "dtype"), CELLS)
def test_values_are_those_of_the_configs_blocks(
    name: str, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    cls, values = checkpoint(name, tmp_path / "model")
    library = expected(name, values, tmp_path / "model", dtype)
    for _ in range(2):  # the second time with recipes from the cache
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = WAYS[way](cls, tmp_path / "model", dtype)
        assert_same(model, library)
        said = [
            warning for warning in caught if "of this weight are incomplete" in str(warning.message)
        ]
        assert len(said) == (way in SAYS)


def assert_same(model: Any, library: Any) -> None:
    """Compare values, and decoded dtypes; in F32 transformers keeps the dtype of plain tensors."""
    state, wanted = model.state_dict(), library.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name].float(), value.float()), name
        if name.endswith("proj.weight"):
            assert state[name].dtype == value.dtype, name


@pytest.mark.parametrize("name", MODELS)
def test_control_the_library_alone_is_wrong_or_fails(name: str, tmp_path: Path) -> None:
    cls, values = checkpoint(name, tmp_path / "model")
    library = expected(name, values, tmp_path / "model", torch.bfloat16)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(cls.from_pretrained(tmp_path / "model", dtype=torch.bfloat16), library)


def test_control_whole_blocks_are_the_librarys(tmp_path: Path) -> None:
    """Control: blocks of 8 by 8 are complete, so transformers is right, and nothing warns."""
    cls, values = checkpoint("qwen3", tmp_path / "model", 8)
    library = expected("qwen3", values, tmp_path / "model", torch.bfloat16)
    assert_same(cls.from_pretrained(tmp_path / "model", dtype=torch.bfloat16), library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(ours(cls, tmp_path / "model", dtype=torch.bfloat16), library)


def test_blocks_larger_than_a_matrix_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setitem(MODELS, "small", ("Qwen3ForCausalLM", "Qwen3Config", sizes))
    cls, values = checkpoint("small", tmp_path / "model")
    library = expected("small", values, tmp_path / "model", torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(ours(cls, tmp_path / "model", dtype=torch.bfloat16), library)


@pytest.mark.parametrize("way", ["from_pretrained", "patch", "load", "dequantize"])
def test_cut_blocks_of_another_size_are_refused_by_name(way: str, tmp_path: Path) -> None:
    cls, _ = checkpoint("qwen3", tmp_path / "model", 64)
    with pytest.raises(loadstone.PlanError) as caught:
        WAYS[way](cls, tmp_path / "model", torch.bfloat16)
    assert "plan.encoding" in {finding.code for finding in caught.value.findings}
    assert "64 by 64" in str(caught.value)
