"""Tests that vLLM serves tiny models with ``--load-format loadstone`` as with its own loader.

Tensors and output must be equal bit for bit. The tests run if vLLM is installed
(``make test-vllm``), with one process per model, which takes 15 seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

import loadstone  # noqa: E402
from loadstone._adapters.sites.vllm import SITES  # noqa: E402
from loadstone._files.receipt import Receipt  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))
import gguf_models  # noqa: E402
import image_models  # noqa: E402

SIZES = gguf_models.SIZES  # with a vocabulary size that vLLM pads
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
    environment = dict(os.environ)
    # By default vLLM binds each rank to its own memory node, but this machine may have only one.
    if ranks := options.get("tensor_parallel_size"):
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@dataclasses.dataclass
class Served:
    """A server's tensors before packing, and its output for a prompt.

    The lists have one element per rank of the model, then one per rank of its drafter.

    Attributes:
        held: digests of all parameters and buffers, by name.
        taken: cost of the load: seconds, peak memory in bytes, and bytes of parameters.
        read: bytes that loadstone read, according to the log.
    """

    held: list[dict[str, str]]
    generated: tuple[Any, Any]  # tokens and log-probabilities; empty if this machine lacks a kernel
    taken: list[dict[str, float]]
    read: list[float]


def served(folder: Path, generates: bool = True, **options: Any) -> Served:
    done = serve(folder, **options)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    log = done.stdout + done.stderr
    loads = len(result["held"])
    read = [float(n) * UNITS[unit] for n, unit in re.findall(r"loadstone read ([\d.]+) (\w+)", log)]
    if options.get("load_format") == "loadstone":
        assert log.count("all parameters have values") == len(read) == loads
    generated = result.get("tokens"), result.get("logprobs")
    if generates:
        assert generated != (None, None)
        assert len(generated[0]) == len(generated[1]) == 8
    models = 2 if "speculative_config" in options else 1
    assert loads == models * options.get("tensor_parallel_size", 1)
    assert all(len(held) > 5 for held in result["held"])
    return Served(result["held"], generated, result["taken"], read)


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def assert_same(found: Served, expected: Served) -> None:
    assert found.held == expected.held and found.generated == expected.generated


def test_vllm_is_as_its_table_says() -> None:
    assert SITES.lacking() == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_as_by_vllms_own_loader(name: str, folders: dict[str, Path]) -> None:
    assert_same(served(folders[name], load_format="loadstone"), served(folders[name]))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_two_ranks(name: str, folders: dict[str, Path]) -> None:
    """Each rank has the tensors of vLLM's own loader, but reads only part of the files."""
    expected = served(folders[name], tensor_parallel_size=2)
    found = served(folders[name], load_format="loadstone", tensor_parallel_size=2)
    assert_same(found, expected)
    assert found.held[0] != found.held[1]  # control
    whole = loadstone.inspect(folders[name]).total_bytes
    for read, taken in zip(found.read, found.taken, strict=True):
        print(f"{name}: {read:.0f} of {whole} bytes for {taken['parameter_bytes']}")
        assert read < 0.75 * whole  # above 0.5: loadstone also reads short gaps


def test_experts_of_two_ranks(folders: dict[str, Path]) -> None:
    """Each rank reads only its experts. On some CPUs vLLM crashes after the load."""
    folder = folders["qwen3_moe"]
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    expected = served(folder, generates=False, **options)
    found = served(folder, generates=False, load_format="loadstone", **options)
    assert found.held == expected.held and found.held[0] != found.held[1]
    sizes = {name: tensor.nbytes for name, tensor in loadstone.load_file(folder).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for read in found.read:
        assert read < 1.02 * (sum(sizes.values()) - experts / 2)


def drafting(folder: Path, method: str) -> dict[str, Any]:
    return {"speculative_config": {"model": str(folder), "method": method,
                                   "num_speculative_tokens": 2}}  # fmt: skip


def test_a_model_that_drafts_for_another(folders: dict[str, Path]) -> None:
    """Options that name files and changes apply to the target model, not to the drafter."""
    options = drafting(folders["llama-tied"], "draft_model")
    wanted = {"model_loader_extra_config": {"weights": str(folders["llama"])}}
    found = served(folders["llama"], load_format="loadstone", **options, **wanted)
    assert_same(found, served(folders["llama"], **options))
    assert found.held[0] != found.held[1]


def test_a_drafter_without_embeddings_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    """EAGLE shares the target model's embeddings; any other missing tensor is an error."""
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    layer = "model.layers.0."
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in loadstone.load_file(folders["llama"]).items()
        if name.startswith(layer) and "input_layernorm" not in name
    }
    state["fc.weight"] = torch.randn(128, 256).bfloat16()
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    options = drafting(tmp_path, "eagle")
    found = served(folders["llama"], load_format="loadstone", **options)
    expected = served(folders["llama"], **options)
    for each in (found, expected):
        del each.held[1]["model.embed_tokens.weight"]  # uninitialised and unused
    assert_same(found, expected)
    del state["fc.weight"]
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    done = serve(folders["llama"], load_format="loadstone", **options)
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "[audit.unaccounted]" in text and "'model.fc.weight'" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_looks_at_images(ranks: int, tmp_path: Path) -> None:
    """The prompt has an image, so the vision model, connector and language model all run."""
    folder = image_models.make(tmp_path, SIZES)
    options = {"has_image": True, "tensor_parallel_size": ranks}
    found = served(folder, load_format="loadstone", **options)
    assert_same(found, served(folder, **options))
    assert any("vision_model" in name for name in found.held[0])


def test_the_memory_of_a_large_model(tmp_path: Path) -> None:
    """For a model of 2 GB, loadstone needs less than 128 MiB in addition to the parameters."""
    values = SIZES | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = transformers.LlamaConfig(**values | heads, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="1GB")
    del model
    size = loadstone.inspect(tmp_path).total_bytes
    assert size > 1.9e9
    options = {"load_format": "loadstone"}
    for name, how in (("vLLM's own loader", {}), ("loadstone", options)):
        taken = served(tmp_path, **how).taken[0]
        extra = taken["peak_bytes"] - taken["parameter_bytes"]
        print(f"{name}: {extra / 1e6:.0f} MB in addition to the model, {taken['seconds']:.2f} s")
    assert extra < 128 << 20


def test_a_folder_of_bin_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["llama"], tmp_path)
    torch.save(loadstone.load_file(folder), folder / "pytorch_model.bin")
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    assert_same(served(folder, load_format="loadstone"), served(folders["llama"]))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_gguf_file(name: str, tmp_path: Path) -> None:
    """The tensors equal those of a folder with the values that transformers decodes from the file.

    The config is next to the GGUF file, or in a different folder.
    """
    folder = gguf_models.make(name, tmp_path / "model")
    numbers, extra = tmp_path / "numbers", tmp_path / "extra"
    extra.mkdir()
    path = gguf_models.write(name, loadstone.load_file(folder), extra / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        extra, gguf_file=path.name, dtype=torch.bfloat16
    )
    model.hf_quantizer = model._weight_conversions = None
    model.save_pretrained(numbers)
    for place in (numbers, extra):
        (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    expected = served(numbers)
    found = served(extra, load_format="loadstone")
    assert_same(found, expected)
    assert found.read[0] < 0.6 * loadstone.inspect(numbers).total_bytes  # blocks
    assert found.held != served(folder).held  # control
    elsewhere = {"weights": str(path)}
    assert_same(
        served(folder, load_format="loadstone", model_loader_extra_config=elsewhere), expected
    )


def copied(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("encoding", ["fp8", "nvfp4"])
def test_a_quantized_folder_as_numbers(
    encoding: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The tensors equal those of a folder that loadstone dequantized offline."""
    codes, numbers = tmp_path / "codes", tmp_path / "numbers"
    exclude = ["lm_head.*", ".*embed.*"]
    loadstone.convert(folders["llama"], codes, quantize=encoding, exclude=exclude)
    loadstone.convert(codes, numbers, dequantize=True)
    wanted: dict[str, Any] = {"model_loader_extra_config": {"dequantize": True}}
    text = failed(codes, **wanted)  # the config still makes vLLM build quantized layers
    if encoding == "fp8":  # for nvfp4, vLLM fails earlier, because a CPU has no kernel for it
        assert "[plan.options]" in text and "hf-overrides" in text
    wanted["hf_overrides"] = {"quantization_config": None}
    found = served(codes, load_format="loadstone", **wanted)
    assert_same(found, served(numbers))
    assert found.held != served(folders["llama"]).held  # control


@pytest.mark.parametrize(
    ("encoding", "generates"),
    [("int8-channel", True), ("fp8", False)],  # a CPU has no kernel for fp8
)
def test_quantized_on_the_way(
    encoding: str, generates: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The tensors equal those of a folder that loadstone quantized offline, bit for bit.

    Experts are not tested, because a CPU has no quantized layers for them.
    """
    folder = folders["llama"]
    loadstone.convert(folder, tmp_path, quantize=encoding, style="compressed-tensors")
    expected = served(tmp_path, generates)
    wanted: dict[str, Any] = {"config_format": "loadstone"}
    wanted["hf_overrides"] = {"loadstone_quantize": encoding}
    found = served(folder, generates, load_format="loadstone", **wanted)
    assert_same(found, expected)
    assert found.held != served(folder).held  # control


@pytest.mark.parametrize("way", ["numbers", "elsewhere"])
def test_weights_are_reloaded(way: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """On a reload, vLLM does not call the loader's load_weights.

    The option ``weights`` applies to the first folder only. Quantized folders are not tested: on a
    CPU vLLM 0.32 fails to reload them.
    """
    first, second = folders["llama"], tmp_path / "second"
    second.mkdir()
    changed(first, second, lambda state: state["model.norm.weight"].mul_(-1))
    options: dict[str, Any] = {"load_format": "loadstone"}
    if way == "elsewhere":
        options["model_loader_extra_config"] = {"weights": str(first)}
    found = served(first, **options, reload=str(second))
    if way == "elsewhere":
        del options["model_loader_extra_config"]
    assert found.generated == served(second, **options).generated
    assert found.generated != served(first, **options).generated  # control


def test_what_layers_do_not_take_is_refused(folders: dict[str, Path]) -> None:
    text = failed(folders["llama"], model_loader_extra_config={"quantize": "int8-channel"})
    assert "[plan.options]" in text and "loadstone_quantize" in text


def test_other_loaders_refuse_layers_for_codes_on_the_way(folders: dict[str, Path]) -> None:
    """vLLM's own loader would copy plain values into the tensors for codes."""
    wanted = {"config_format": "loadstone", "hf_overrides": {"loadstone_quantize": "int8-channel"}}
    done = serve(folders["llama"], **wanted)
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "RESULT" not in done.stdout
    assert "[plan.options]" in text and "needs --load-format loadstone" in text


def test_a_hub_id_and_files_beside_it(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader downloads the same files as vLLM's own loader.

    From the model's secondary folder it reads only the files that match the patterns.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import default_loader, get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    folder = folders["llama"]
    fetched = {"download_weights_from_hf": str(folder), "list_filtered_repo_files": [],
               "download_safetensors_index_file_from_hf": None}  # fmt: skip
    for name, result in fetched.items():
        monkeypatch.setattr(default_loader, name, lambda *a, _result=result, **k: _result)
    for name in ("one.pt", "two.pt"):
        torch.save({f"{name}.weight": torch.randn(2, 3)}, tmp_path / name)
    source = default_loader.DefaultModelLoader.Source
    extra = source(str(tmp_path), None, prefix="extra.", allow_patterns_overrides=["one.pt"])
    loader = get_model_loader(LoadConfig(load_format="loadstone"))
    model = torch.nn.Module()
    model.secondary_weights = [extra]
    config = types.SimpleNamespace(
        model="org/tiny", revision=None, dtype=torch.bfloat16, quantization=None,
        runner_type="generate", hf_config=types.SimpleNamespace(),
    )  # fmt: skip
    loader.download_model(config)
    found = dict(loader.get_all_weights(config, model))
    expected = loadstone.load_file(folder)
    expected["extra.one.pt.weight"] = torch.load(tmp_path / "one.pt")["one.pt.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_each_rank_and_each_drafter_writes_a_receipt(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["llama"]
    options = {"load_format": "loadstone", "model_loader_extra_config": {"receipt": str(tmp_path)}}
    held = served(folder, tensor_parallel_size=2, **options).held
    receipts = [Receipt.load(tmp_path / f"receipt-{rank}.json") for rank in range(2)]
    for receipt, digests in zip(receipts, held, strict=True):
        assert receipt.targets.keys() == digests.keys()
        (norm,) = receipt.targets["model.norm.weight"]
        assert norm["sources"] == ["model.norm.weight"]
        read = {each["name"]: each for file in receipt.sources for each in file["tensors"]}
        assert read.keys() == loadstone.load_file(folder).keys()
        assert "ranges" in read["model.layers.0.self_attn.q_proj.weight"]  # a rank reads half of it
    layer = "model.layers.0.self_attn.qkv_proj.weight"
    assert receipts[0].targets[layer][0]["digest"] != receipts[1].targets[layer][0]["digest"]
    served(folder, **options, **drafting(folders["llama-tied"], "draft_model"))
    names = ["receipt-0.json", "receipt-1.json", "receipt-drafter-0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_options_that_nothing_follows_from_are_refused(folders: dict[str, Path]) -> None:
    text = failed(folders["llama"], model_loader_extra_config={"exclude": "lm_head"})
    assert "[plan.options]" in text and "requires quantize" in text


def test_an_adapter_is_merged_on_the_way(folders: dict[str, Path], tmp_path: Path) -> None:
    (lora := tmp_path / "lora").mkdir()
    path = "base_model.model.model.layers.1.self_attn.k_proj"
    factors = {
        f"{path}.lora_A.weight": torch.randn(4, 128),
        f"{path}.lora_B.weight": torch.randn(64, 4),
    }
    loadstone.torch.save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj"]})
    )
    loadstone.merge(folders["llama"], tmp_path / "merged", lora={lora: 0.5})
    options = {"lora": {str(lora): 0.5}, "staging_bytes_max": "100KB"}
    found = served(folders["llama"], load_format="loadstone", model_loader_extra_config=options)
    assert_same(found, served(tmp_path / "merged"))
    assert found.held != served(folders["llama"]).held  # control


def failed(folder: Path, **options: Any) -> str:
    done = serve(folder, load_format="loadstone", **options)
    assert done.returncode != 0 and "RESULT " not in done.stdout
    return done.stdout + done.stderr


def changed(folder: Path, to: Path, change: Any) -> Path:
    """Write the folder's tensors to a single file in ``to``, changed by ``change``."""
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
    # Control: vLLM's own loader does not check, and serves uninitialised memory.
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
