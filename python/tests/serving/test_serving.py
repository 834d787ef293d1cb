"""vLLM serves tiny models by ``--load-format loadstone`` as by its own loader, bit for bit.

Runs where vLLM is installed: ``make test-vllm``. A model a process, each of 15 seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

import loadstone  # noqa: E402
from loadstone._sites.vllm import SITES  # noqa: E402

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 250,  # vLLM pads it
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, Any] = {
    "llama": ("LlamaConfig", SIZES | {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (kind, values) in CONFIGS.items():
        torch.manual_seed(7)
        config = getattr(transformers, kind)(**values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name], max_shard_size="500KB")
    return made


def serve(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(program), str(folder), json.dumps(options)]
    return subprocess.run(command, capture_output=True, text=True)


def served(folder: Path, **options: Any) -> dict[str, Any]:
    done = serve(folder, **options)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    if options.get("load_format") == "loadstone":
        assert "all parameters have values" in done.stdout + done.stderr
    return result


def test_vllm_is_as_its_table_says() -> None:
    assert SITES.lacking() == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_as_by_vllms_own_loader(name: str, folders: dict[str, Path]) -> None:
    expected, found = served(folders[name]), served(folders[name], load_format="loadstone")
    assert found == expected
    assert len(expected["tokens"]) == len(expected["logprobs"]) == 8 and len(expected["held"]) > 10


def test_a_folder_of_bin_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path)
    torch.save(loadstone.load_file(folder), folder / "pytorch_model.bin")
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    assert served(folder, load_format="loadstone") == served(folders["llama"])


def copied(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("encoding", ["fp8", "nvfp4"])
def test_a_quantized_folder_as_numbers(
    encoding: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Served from codes as from a folder of the numbers that they stand for."""
    codes, numbers = tmp_path / "codes", tmp_path / "numbers"
    exclude = ["lm_head.*", ".*embed.*"]
    loadstone.convert(folders["llama"], codes, quantize=encoding, exclude=exclude)
    loadstone.convert(codes, numbers, dequantize=True)
    wanted: dict[str, Any] = {"model_loader_extra_config": {"dequantize": True}}
    text = failed(codes, **wanted)  # vLLM's layers want codes still
    if encoding == "fp8":  # a CPU has no kernel for the other, which is vLLM's to say
        assert "[plan.options]" in text and "hf-overrides" in text
    wanted["hf_overrides"] = {"quantization_config": None}
    found = served(codes, load_format="loadstone", **wanted)
    assert found == served(numbers)
    assert found["held"] != served(folders["llama"])["held"]  # the control


def failed(folder: Path, **options: Any) -> str:
    done = serve(folder, load_format="loadstone", **options)
    assert done.returncode != 0 and "RESULT " not in done.stdout
    return done.stdout + done.stderr


def changed(folder: Path, to: Path, change: Any) -> Path:
    """The folder as one file, with other tensors."""
    state = loadstone.load_file(folder)
    for path in folder.glob("*.json"):
        if not path.name.endswith("index.json"):
            (to / path.name).write_bytes(path.read_bytes())
    change(state)
    loadstone.torch.save_file(state, to / "model.safetensors")
    return to


def test_a_missing_expert_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = changed(folders["qwen3_moe"], tmp_path, lambda state: state.pop(name))
    text = failed(folder)
    assert "[audit.unaccounted]" in text and "layers.1" in text and "expert 2" in text
    # What it would be without: vLLM serves memory that nobody wrote.
    assert serve(folder).returncode == 0


def test_a_wrong_shape_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def cut(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name][:-1].contiguous()

    text = failed(changed(folders["llama"], tmp_path, cut))
    assert "[plan.shape]" in text and name in text and "[127, 128]" in text


def test_a_corrupt_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    text = failed(folder)
    assert "[st.truncated]" in text and shard.name in text


def test_an_unknown_option_is_refused(folders: dict[str, Path]) -> None:
    text = failed(folders["llama"], model_loader_extra_config={"thread": 3})
    assert "[plan.options]" in text and "'thread'" in text
