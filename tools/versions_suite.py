"""Compare loads through loadstone with a library's own loads, for one release.

Run by ``versions.py`` with the release in PYTHONPATH. Prints one line of JSON with the result of
each cell: "equal" (all tensors have the same bytes), "refused" (loadstone rejects the release
because its functions differ from the adapter's table), "own" (the patch left the library alone, and
the result is unchanged), or the problem.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import loadstone
from loadstone._adapters.sites import sites_of

PLACES = {"a": "cpu", "b": "disk"}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
BERT = {"num_attention_heads": 4, "intermediate_size": 64}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def difference(found: Any, expected: Any) -> str:
    """Return the first difference in dtype or bytes between two models, or ""."""
    left, right = state_of(found), state_of(expected)
    if left.keys() != right.keys():
        return f"names differ: {sorted(left.keys() ^ right.keys())[:3]}"
    for name, value in left.items():
        other = right[name]
        if value.is_meta != other.is_meta or value.dtype != other.dtype:
            return f"{name}: {value.dtype} {value.device}, the library {other.dtype} {other.device}"
        if not value.is_meta and not torch.equal(raw(value), raw(other)):
            return f"{name}: other bytes"
    return ""


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the state without ModelOpt's calibration, whose dtype may differ."""
    return {name: each for name, each in model.state_dict().items() if not name.endswith("_amax")}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def outcome(library: str, make: Callable[[], Any], expected: Any, use: Any = None) -> str:
    """Return the result of one cell; `use` makes a forward pass, whose results are compared."""
    try:
        found = make()
    except loadstone.Error as error:
        return "refused" if error.code == "plan.options" else f"{error}"[:200]
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"[:200]
    wrong = difference(found, expected)
    if not wrong and use is not None and not torch.equal(use(found), use(expected)):
        wrong = "another result"
    is_own = bool(sites_of(library).lacking())
    if not wrong and not is_own and not loadstone.audit(found).ok:
        wrong = "not proved by the audit"
    return wrong or ("own" if is_own else "equal")


def doors(
    library: str,
    direct: Callable[[], Any],
    own: Callable[[], Any],
    use: Any = None,
    table: str = "",
) -> dict[str, str]:
    """Try both entry points. `table` is the library whose sites apply, if it is not `library`."""

    def patched() -> Any:
        with loadstone.patch(library):
            return own()

    expected = own()
    return {
        "direct": outcome(table or library, direct, expected, use),
        "patch": outcome(table or library, patched, expected, use),
    }


def transformers_models(library: Any) -> dict[str, Callable[[], Any]]:
    tied = library.LlamaConfig(**SMALL, tie_word_embeddings=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return {
        "llama": lambda: library.LlamaForCausalLM(library.LlamaConfig(**SMALL)),
        "mixtral": lambda: library.MixtralForCausalLM(
            library.MixtralConfig(**SMALL, num_local_experts=4)
        ),
        "qwen3_moe": lambda: library.Qwen3MoeForCausalLM(
            library.Qwen3MoeConfig(**SMALL, **experts, head_dim=8)
        ),
        "tied": lambda: library.LlamaForCausalLM(tied),
        "base": lambda: library.LlamaModel(library.LlamaConfig(**SMALL)),
        "t5": lambda: library.T5ForConditionalGeneration(
            library.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        "bert": lambda: library.BertForMaskedLM(
            library.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, **BERT)
        ),
        "llava": lambda: library.LlavaForConditionalGeneration(
            library.LlavaConfig(
                vision_config=library.CLIPVisionConfig(**VISION),
                text_config=library.LlamaConfig(**SMALL),
                image_token_index=63,
            )
        ),
    }


def transformers_cells() -> dict[str, dict[str, str]]:
    import transformers as library

    folders = {}
    for name, make in transformers_models(library).items():
        folders[name] = tempfile.mkdtemp()
        sharded = {"max_shard_size": "20KB"} if name == "qwen3_moe" else {}
        randomised(make()).save_pretrained(folders[name], **sharded)
    bf16, f16 = ({"dtype": each} for each in (torch.bfloat16, torch.float16))
    resting = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")
    disk = {"device_map": {**dict.fromkeys(resting, "cpu"), "model.layers.1": "disk"}}
    causal = library.AutoModelForCausalLM
    other = {"ignore_mismatched_sizes": True, "vocab_size": 72}

    cells = {}
    for name in ("llama", "mixtral", "qwen3_moe", "tied"):
        for variant, extra in (("", {}), (" bf16", bf16), (" disk", disk)):
            cells[name + variant] = of_folder(causal, folders[name], extra)
    cells |= {
        "head without base": of_folder(causal, folders["base"]),
        "base without head": of_folder(library.AutoModel, folders["llama"]),
        "classifier": of_folder(library.AutoModelForSequenceClassification, folders["llama"]),
        "other shapes": of_folder(causal, folders["llama"], other),
        "t5 f16": of_folder(library.T5ForConditionalGeneration, folders["t5"], f16),
        "bert": of_folder(library.BertForMaskedLM, with_old_names(folders["bert"], "LayerNorm")),
        "llava": of_folder(library.LlavaForConditionalGeneration, folders["llava"]),
    }
    return cells


def of_folder(cls: Any, folder: str, extra: dict[str, Any] | None = None) -> dict[str, str]:
    """Compare loads of a folder into a class of transformers, through both entry points."""

    def arguments() -> dict[str, Any]:
        disk = {"offload_folder": tempfile.mkdtemp()} if "device_map" in (extra or {}) else {}
        torch.manual_seed(1)  # makes initialised tensors equal in all loads
        return {**(extra or {}), **disk}

    is_causal = cls.__name__ == "AutoModelForCausalLM"
    return doors(
        "transformers",
        lambda: loadstone.transformers.from_pretrained(cls, folder, **arguments()),
        lambda: cls.from_pretrained(folder, **arguments()),
        (lambda model: model(torch.arange(5)[None]).logits) if is_causal else None,
    )


def with_old_names(folder: str, module: str) -> str:
    """Return a checkpoint in which a module's weight and bias are named gamma and beta."""
    from safetensors.torch import load_file, save_file

    file = Path(folder, "model.safetensors")
    old = {f"{module}.weight": f"{module}.gamma", f"{module}.bias": f"{module}.beta"}
    tensors = {}
    for name, value in load_file(file).items():
        end = next((each for each in old if name.endswith(each)), "")
        tensors[name.removesuffix(end) + old.get(end, "")] = value
    save_file(tensors, file, {"format": "pt"})
    return folder


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(16, 32)
        self.b = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def accelerate_cells() -> dict[str, dict[str, str]]:
    import accelerate as library

    folder = Path(tempfile.mkdtemp())
    from safetensors.torch import save_file

    save_file(randomised(Net()).state_dict(), folder / "model.safetensors")

    def load(function: Any, **extra: Any) -> Any:
        with library.init_empty_weights():
            model = Net()
        return function(model, str(folder / "model.safetensors"), **extra)

    def cells_of(extra: Callable[[], dict[str, Any]]) -> dict[str, str]:
        def ours() -> Any:
            function = loadstone.accelerate.load_checkpoint_and_dispatch
            return load(function, **extra())

        def own() -> Any:
            return load(library.load_checkpoint_and_dispatch, **extra())

        return doors("accelerate", ours, own, lambda model: model(torch.ones(1, 16)))

    return {
        "in memory": cells_of(lambda: {"device_map": {"": "cpu"}}),
        "disk": cells_of(lambda: {"device_map": PLACES, "offload_folder": tempfile.mkdtemp()}),
        "auto": cells_of(lambda: {"device_map": "auto", "offload_folder": tempfile.mkdtemp()}),
    }


def diffusers_cells() -> dict[str, dict[str, str]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests" / "support"))
    from diffusers_models import by_name, write_single_file

    ours = loadstone.diffusers

    def cells(name: str) -> dict[str, dict[str, str]]:
        case = by_name(name)
        model = randomised(case.construct())
        folder = Path(tempfile.mkdtemp())
        model.save_pretrained(folder / "model")
        file, config = write_single_file(case, model, folder / "file" / "model.safetensors")
        return {
            f"{name} folder": doors(
                "diffusers",
                lambda: ours.from_pretrained(case.cls, folder / "model"),
                lambda: case.cls.from_pretrained(folder / "model"),
            ),
            f"{name} file": doors(
                "diffusers",
                lambda: ours.from_single_file(case.cls, file, config=config),
                lambda: case.cls.from_single_file(file, config=config),
            ),
        }

    return cells("wan_t2v") | cells("sana")


def bitsandbytes_cells() -> dict[str, dict[str, str]]:
    import transformers as library

    folder = tempfile.mkdtemp()
    shape = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
    randomised(library.LlamaForCausalLM(library.LlamaConfig(**shape))).save_pretrained(folder)
    kinds = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "int8": {"load_in_8bit": True},
    }
    auto = library.AutoModelForCausalLM

    def cell(fields: dict[str, Any]) -> dict[str, str]:
        def arguments() -> dict[str, Any]:
            config = library.BitsAndBytesConfig(**fields)
            return {"quantization_config": config, "device_map": {"": "cpu"}}

        return doors(
            "transformers",
            lambda: loadstone.transformers.from_pretrained(auto, folder, **arguments()),
            lambda: auto.from_pretrained(folder, **arguments()),
            table="bitsandbytes",
        )

    return {name: cell(fields) for name, fields in kinds.items()}


def modelopt_cells() -> dict[str, dict[str, str]]:
    import modelopt.torch.quantization as library
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp()
    shape = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
    model = randomised(LlamaForCausalLM(LlamaConfig(**shape))).to(torch.bfloat16)
    model.save_pretrained(folder)
    cells = {}
    for name, config in (("fp8", library.FP8_DEFAULT_CFG), ("nvfp4", library.NVFP4_DEFAULT_CFG)):

        def own(config: Any = config) -> Any:
            found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            library.quantize(found, config)
            library.compress(found)
            return found

        def direct(config: Any = config) -> Any:
            with loadstone.modelopt.init_quantized_weights(config):
                return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

        expected = own()
        cells[name] = {"direct": outcome("modelopt", direct, expected)}
    return cells


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # all temporary files are deleted with this folder
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
        cells = globals()[f"{sys.argv[1]}_cells"]()
    print("\n" + json.dumps(cells))


if __name__ == "__main__":
    main()
