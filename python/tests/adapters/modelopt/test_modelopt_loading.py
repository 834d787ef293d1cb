"""Tests ModelOpt's low_memory_mode on loadstone: bytes, state and forward passes."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("modelopt")
import modelopt.torch.quantization as mtq
from modelopt_models import EXPERTS, NAMES, config, logits, raw, resident, same_bytes, write
from transformers import AutoConfig, AutoModelForCausalLM

import loadstone
from loadstone._adapters.modelopt.experts import PackedExperts

ROWS = [
    *((name, kind) for name in NAMES for kind in ("fp8", "nvfp4")),
    *((name, kind) for name in ("llama", "qwen3_moe") for kind in ("int4", "mxfp4", "mxfp8")),
]


WEIGHTS = "*weight_quantizer"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, root / name) for name in NAMES}


def load(folder: Path, kind: str, *off: str, mode: str = "modelopt-compat") -> Any:
    with loadstone.modelopt.init_quantized_weights(config(kind, *off), mode=mode):
        return AutoModelForCausalLM.from_pretrained(folder)


loaded = functools.cache(load)  # only for tests that do not change the model


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_bytes_and_scales_are_those_of_the_resident_model(
    name: str, kind: str, folders: dict[str, Path]
) -> None:
    model = loaded(folders[name], kind)
    _, expected = resident(folders[name], kind)

    found = loadstone.audit(model)
    assert found.ok, found
    assert not found.on_meta
    assert not [each for each in model.state_dict().values() if each.is_meta]
    state = {name: tensor.data for name, tensor in model.state_dict().items()}
    assert state.keys() == expected.keys()
    for each, tensor in state.items():
        if each.endswith("._amax"):
            assert tensor.shape == expected[each].shape or kind == "int4", each
            if kind in ("nvfp4", "mxfp4", "mxfp8"):
                assert same_bytes(tensor, expected[each]), each
            elif kind == "fp8":
                assert torch.equal((tensor / 448).to(torch.bfloat16), state[scale_of(each)]), each
        else:
            assert same_bytes(tensor, expected[each]), each


def scale_of(amax: str) -> str:
    return amax.removesuffix("_amax") + "_scale"


def test_pickles_name_the_public_class_of_experts() -> None:
    pickled = pickle.dumps(PackedExperts)
    assert pickle.loads(pickled) is PackedExperts is loadstone.modelopt.PackedExperts
    assert b"loadstone._" not in pickled


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("name", EXPERTS)
def test_no_expert_is_left_in_numbers(name: str, kind: str, folders: dict[str, Path]) -> None:
    model = loaded(folders[name], kind)
    stacks = [each for each in model.parameters() if isinstance(each, PackedExperts)]
    assert len(stacks) == 4
    expected = torch.float8_e4m3fn if kind == "fp8" else torch.uint8
    assert {stack.dtype for stack in stacks} == {expected}
    wide = [
        each
        for each, tensor in model.state_dict().items()
        if ".experts." in each and tensor.dim() > 0 and tensor.dtype == torch.bfloat16
    ]
    assert not wide


@pytest.mark.parametrize(("kind", "size"), [("fp8", 49_152), ("nvfp4", 24_576)])
def test_payload_of_the_experts(kind: str, size: int, folders: dict[str, Path]) -> None:
    model = loaded(folders["qwen3_moe"], kind)
    stacks = [each for each in model.parameters() if isinstance(each, PackedExperts)]
    assert sum(stack.numel() * stack.element_size() for stack in stacks) == size


# glm_moe_dsa's indexer multiplies by a layer's weight directly, so the weight must stay plain.
@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_that_of_the_resident_model(
    name: str, kind: str, folders: dict[str, Path]
) -> None:
    off = ("*indexer*",) if name == "glm_moe_dsa" else ()
    model = loaded(folders[name], kind, *off)
    reference, _ = resident(folders[name], kind, *off)
    found = logits(model)
    assert torch.isfinite(found).all()
    assert torch.equal(found, logits(reference))


def test_the_resident_library_cannot_run_its_compressed_experts(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"])
    mtq.quantize(model, config("fp8"))
    mtq.compress(model)
    with pytest.raises(TypeError, match="must be Tensor, not FP8QTensor"):
        logits(model)


def test_a_slice_of_a_stack_is_a_view_that_tells_its_expert(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_moe"], "nvfp4")
    experts = model.model.layers[0].mlp.experts
    stack = experts.gate_up_proj
    for index in range(4):
        one = stack[torch.tensor(index)]
        assert one.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
        assert experts._get_expert_idx_from_first_proj(one) == index
        assert tuple(one.metadata["shape"]) == (64, 64)
        assert same_bytes(one.data, stack.data[index])
    with pytest.raises(TypeError, match="one at a time"):
        stack[torch.tensor([0, 1])]


@pytest.mark.parametrize("name", EXPERTS)
def test_without_a_config_experts_are_fused_as_the_library_does_it(
    name: str, folders: dict[str, Path]
) -> None:
    plan = loadstone.plan(skeleton(folders[name]), folders[name], rules="transformers")
    assert [each for each in plan.findings if each.severity != "info"] == []
    model = skeleton(folders[name])
    loadstone.load(model, folders[name], rules="transformers")
    assert loadstone.audit(model).ok
    expected = AutoModelForCausalLM.from_pretrained(folders[name]).state_dict()
    for each, tensor in model.state_dict().items():
        assert same_bytes(tensor, expected[each]), each


def skeleton(folder: Path) -> Any:
    with loadstone.skeleton():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


# --- exact ---------------------------------------------------------------------------------------


def numbers(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.float() for name, tensor in model.state_dict().items()}


def exact_fp8(values: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = amax / 448
    return (values / scale).to(torch.float8_e4m3fn), scale


def exact_nvfp4(values: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode in nvfp4 with one global scale, one code per byte, as docs/modelopt.md defines it."""
    whole = amax / 2688
    blocks = values.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * whole)[..., None]
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = (scaled.abs().double()[..., None] - steps.double()).abs()
    code = distance.argmin(-1)
    above = (code + 1).clamp(max=7)
    is_tie = distance.gather(-1, above[..., None]) == distance.gather(-1, code[..., None])
    code = torch.where(is_tie[..., 0] & (code % 2 == 1), above, code)
    return (code + 8 * (scaled < 0)).to(torch.uint8).flatten(-2), scale, whole


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_exact_fp8_has_one_scale_and_one_rounding(name: str, folders: dict[str, Path]) -> None:
    model, source = load(folders[name], "fp8", mode="exact"), numbers(folders[name])
    for path, leaf, index, amax in quantized(source):
        quantizer = quantizer_of(model, path, leaf, index)
        weight = source[f"{path}.{leaf}"]
        weight = weight if index is None else weight[index]
        data, scale = exact_fp8(weight, amax)
        found = model.get_parameter(f"{path}.{leaf}").data
        assert same_bytes(found if index is None else found[index], data), (path, leaf, index)
        assert same_bytes(quantizer._scale, scale)
        assert same_bytes(quantizer._amax, amax)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_exact_nvfp4_shares_its_global_scale_among_partners(
    name: str, folders: dict[str, Path]
) -> None:
    model, source = load(folders[name], "nvfp4", mode="exact"), numbers(folders[name])
    for path, leaf, index, amax in quantized(source):
        quantizer = quantizer_of(model, path, leaf, index)
        weight = source[f"{path}.{leaf}"]
        weight = weight if index is None else weight[index]
        codes, scale, whole = exact_nvfp4(weight, amax)
        found = model.get_parameter(f"{path}.{leaf}").data
        found = found if index is None else found[index]
        assert same_bytes(found, codes[..., 0::2] | codes[..., 1::2] << 4), (path, leaf, index)
        assert same_bytes(quantizer._scale, scale)
        assert same_bytes(quantizer._double_scale, whole)
        assert same_bytes(quantizer._amax, amax)


def quantized(source: dict[str, torch.Tensor]) -> Any:
    """Yield the path, parameter, expert and largest magnitude of each quantized matrix."""
    partners = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    for name, tensor in source.items():
        path, _, leaf = name.rpartition(".")
        if tensor.dim() == 3:
            for index, matrix in enumerate(tensor):
                yield path, leaf, index, matrix.abs().max()
        elif path.endswith("_proj"):
            parent, _, own = path.rpartition(".")
            group = next((each for each in partners if own in each), (own,))
            yield path, leaf, None, max(source[f"{parent}.{n}.weight"].abs().max() for n in group)


def quantizer_of(model: Any, path: str, leaf: str, index: int | None) -> Any:
    module = model.get_submodule(path)
    if index is None:
        return module.weight_quantizer
    return getattr(module, f"{leaf}_weight_quantizers")[index]


# --- layouts of checkpoints ----------------------------------------------------------------------


def fused(folder: Path, target: Path, layers: list[int]) -> Path:
    """Copy a checkpoint of qwen3_moe, with the experts of some layers fused into one tensor."""
    state = load_file(folder / "model.safetensors")
    for layer in layers:
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: [state.pop(f"{path}.{index}.{name}.weight") for index in range(4)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        state[f"{path}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{path}.down_proj"] = torch.stack(parts["down_proj"])
    return save(state, folder, target)


def save(state: dict[str, torch.Tensor], folder: Path, target: Path) -> Path:
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", target)
    return target


@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=["fused", "mixed"])
def test_checkpoints_that_hold_experts_in_one_tensor(
    layers: list[int], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = fused(folders["qwen3_moe"], tmp_path / "fused", layers)
    model = load(folder, "nvfp4")
    expected = load(folders["qwen3_moe"], "nvfp4").state_dict()
    assert loadstone.audit(model).ok
    for name, tensor in model.state_dict().items():
        assert same_bytes(tensor.data, expected[name].data), name


def test_a_missing_expert_is_named_and_the_model_stays_as_it_was(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    state = load_file(folders["qwen3_moe"] / "model.safetensors")
    del state[lost]
    folder = save(state, folders["qwen3_moe"], tmp_path / "lost")
    model = skeleton(folder)
    modules = [type(each) for each in model.modules()]

    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.modelopt.load(model, folder, config("nvfp4"))

    assert caught.value.code == "plan.missing"
    for word in (lost, "layer 1", "expert 3"):
        assert word in str(caught.value)
    assert [type(each) for each in model.modules()] == modules
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(loadstone.PlanError, match=lost):
        load(folder, "nvfp4")


# --- existing models ------------------------------------------------------------------------------


def test_a_skeleton_is_filled_in_place(folders: dict[str, Path]) -> None:
    folder = folders["mixtral"]
    model = skeleton(folder)
    assert loadstone.modelopt.load(model, folder, config("fp8")) is model
    assert loadstone.audit(model).ok
    expected = load(folder, "fp8").state_dict()
    for name, tensor in model.state_dict().items():
        assert same_bytes(tensor.data, expected[name].data), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write("qwen3_moe", tmp_path / "other", dtype)
    model = load(folder, "nvfp4")
    _, expected = resident(folder, "nvfp4")
    assert loadstone.audit(model).ok
    for name, tensor in model.state_dict().items():
        if not name.endswith("_amax"):
            assert same_bytes(tensor.data, expected[name]), name


def test_a_model_with_numbers_is_refused(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with pytest.raises(loadstone.Error, match="already allocated") as caught:
        loadstone.modelopt.load(model, folders["llama"], config("fp8"))
    assert caught.value.code == "plan.options"
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    with loadstone.skeleton():  # as the message advises
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    model = loadstone.modelopt.load(model, folders["llama"], config("fp8"))
    assert loadstone.audit(model).ok


def test_a_format_that_cannot_be_written_is_refused_by_name(folders: dict[str, Path]) -> None:
    chosen = config("int4")
    (entry,) = [each for each in chosen["quant_cfg"] if each["quantizer_name"] == WEIGHTS]
    entry["cfg"]["block_sizes"] = {-1: 64}
    with pytest.raises(loadstone.Error, match=r"layers\.0\.self_attn\.q_proj\.weight") as caught:
        loadstone.modelopt.load(AutoModelForCausalLM, folders["llama"], chosen)
    assert caught.value.code == "plan.quantize"
    assert "{-1: 64}" in str(caught.value)
    chosen["quant_cfg"].append({"quantizer_name": WEIGHTS, "enable": False})  # as advised
    assert loadstone.audit(
        loadstone.modelopt.load(AutoModelForCausalLM, folders["llama"], chosen)
    ).ok


def test_a_mode_that_is_none_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(loadstone.Error, match="the mode is unknown"):
        load(folders["llama"], "fp8", mode="nearest")


def test_a_map_with_disk_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(loadstone.Error, match="packed weights must be in memory"):
        loadstone.modelopt.load(
            AutoModelForCausalLM,
            folders["llama"],
            config("fp8"),
            device_map={"": "cpu", "model.layers.1": "disk"},
        )


def test_what_a_config_sets_in_quantizers_stays(folders: dict[str, Path]) -> None:
    chosen = mtq.utils.update_quant_cfg_with_kv_cache_quant(
        config("fp8"), copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    )
    chosen["quant_cfg"][-1]["cfg"]["constant_amax"] = 240.0
    model = loadstone.modelopt.load(AutoModelForCausalLM, folders["llama"], chosen)
    assert model.model.layers[1].self_attn.k_bmm_quantizer._amax.item() == 240.0
    audit = loadstone.audit(model)
    assert audit.ok, audit
    name = "model.layers.1.self_attn.k_bmm_quantizer._amax"
    assert audit.provenance[name].origin == "constructor"


def test_the_model_goes_on_to_be_calibrated(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_moe"], "fp8")
    before = {name: raw(tensor.data).clone() for name, tensor in model.state_dict().items()}
    mtq.calibrate(model, "max", forward_loop=logits)
    after = model.state_dict()
    assert all(torch.equal(raw(after[name].data), bytes_) for name, bytes_ in before.items())
    assert "model.layers.0.mlp.experts.gate_up_proj_input_quantizer._amax" in after
