"""Tests ``loadstone.patch("modelopt")`` on scripts that use only ModelOpt and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("modelopt")
import modelopt.torch.quantization as mtq
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.plugins import accelerate as plugin
from modelopt.torch.quantization.plugins.accelerate import init_quantized_weights
from modelopt_models import TOKENS, config, same_bytes, write
from transformers import AutoModelForCausalLM

import loadstone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


def script(folder: Path, target: Path, quant_cfg: Any, **kwargs: Any) -> Any:
    """Run the steps of ModelOpt's ``hf_ptq.py --low_memory_mode`` in order."""
    with init_quantized_weights(quant_cfg, gpu_mem_percentage=0.8, quant_gemm=False):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **kwargs)

    def calibrate_loop(model: Any) -> None:
        model(TOKENS)

    model = mtq.calibrate(model, quant_cfg["algorithm"], forward_loop=calibrate_loop)
    mtq.print_quant_summary(model)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=target)
    return model


def test_the_example_runs_as_it_is(folder: Path, tmp_path: Path) -> None:
    with loadstone.patch("modelopt"):
        script(folder, tmp_path / "export", mtq.FP8_DEFAULT_CFG)
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert (tmp_path / "export" / "hf_quant_config.json").exists()


def test_without_the_patch_it_fails(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        script(folder, tmp_path / "export", mtq.FP8_DEFAULT_CFG)


def test_arguments_of_from_pretrained(folder: Path) -> None:
    with loadstone.patch("modelopt"):
        with plugin.init_quantized_weights(config("nvfp4")):
            model = AutoModelForCausalLM.from_pretrained(
                folder, device_map="cpu", attn_implementation="eager", dtype=torch.float32
            )
        assert model.config._attn_implementation == "eager"
        assert model.lm_head.weight.dtype == torch.float32
        assert loadstone.audit(model).ok
        with (
            plugin.init_quantized_weights(config("nvfp4")),
            pytest.raises(loadstone.Error, match="offload_buffers") as caught,
        ):
            AutoModelForCausalLM.from_pretrained(folder, offload_buffers=True)
        assert caught.value.code == "plan.options"


def test_a_patched_load_gives_what_ours_does(folder: Path) -> None:
    with loadstone.patch("modelopt", "transformers"), init_quantized_weights(config("nvfp4")):
        patched = AutoModelForCausalLM.from_pretrained(folder)
    expected = loadstone.modelopt.load(AutoModelForCausalLM, folder, config("nvfp4")).state_dict()
    for name, tensor in patched.state_dict().items():
        assert same_bytes(tensor.data, expected[name].data), name


def test_everything_is_put_back(folder: Path) -> None:
    names = (
        "init_quantized_weights",
        "init_empty_weights",
        "infer_auto_device_map",
        "load_checkpoint_and_dispatch",
    )
    before = [getattr(plugin, name) for name in names]
    own = vars(transformers.AutoModelForCausalLM)["from_pretrained"]
    with loadstone.modelopt.init_quantized_weights(config("fp8")):
        AutoModelForCausalLM.from_pretrained(folder)
    with loadstone.patch("modelopt"), plugin.init_quantized_weights(config("fp8")):
        assert getattr(plugin, names[0]) is not before[0]
    assert [getattr(plugin, name) for name in names] == before
    assert vars(transformers.AutoModelForCausalLM)["from_pretrained"] is own
