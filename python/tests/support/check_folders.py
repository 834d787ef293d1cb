"""Folders for ``loadstone.check``: tiny models, encodings and defects, and what transformers does.

``tools/check_agreement.py`` compares all of them; ``test_check.py`` compares a fixed part.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from readback_foreign import _quiet
from safetensors.torch import load_file, save_file
from transformers_models import randomise_all

import loadstone

BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
}
# Model types, with the class and the fields of the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _EXPERTS),
    "mixtral": ("MixtralForCausalLM", _EXPERTS),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 128, "n_layer": 1, "n_head": 2, "n_positions": 64}),
    "bert": ("BertForMaskedLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 128}),
}
# Encodings with the arguments of `loadstone.convert`.
ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{
        f"{encoding} compressed-tensors": {"quantize": encoding, "style": "compressed-tensors"}
        for encoding in ("fp8", "nvfp4", "mxfp4", "int8-channel")
    },
    "nf4": {"quantize": "nf4"},
    "fp8 modelopt": {"quantize": "fp8", "style": "modelopt"},
}


def write_model(model_type: str, folder: Path) -> Path:
    import transformers

    name, fields = MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **fields})
    config.dtype = BF16
    model = getattr(transformers, name)._from_config(config, dtype=BF16)
    randomise_all(model, seed=5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(0.05 if tensor.dim() > 1 else 1)
    with _quiet():
        model.save_pretrained(folder)
    return folder


def write_encoded(source: Path, encoding: str, folder: Path) -> Path | None:
    """Return the folder; ``None`` if loadstone rejects the encoding for this model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = ENCODINGS[encoding]
    if not options:
        return source
    try:
        loadstone.convert(source, folder, **options)
    except loadstone.Error:
        return None
    return folder


# ---- defects: each changes tensors and config in place; returns False if it does not apply


def _drop_tensor(tensors: Tensors, config: dict[str, Any]) -> bool:
    del tensors[_plain_vector(tensors)]
    return True


def _rename(tensors: Tensors, config: dict[str, Any]) -> bool:
    name = _plain_vector(tensors)
    tensors[name.replace(".weight", ".wieght").replace(".bias", ".baes")] = tensors.pop(name)
    return True


def _plain_vector(tensors: Tensors) -> str:
    return next(n for n in sorted(tensors) if tensors[n].dim() == 1 and tensors[n].dtype is BF16)


def _transpose(tensors: Tensors, config: dict[str, Any]) -> bool:
    """Transpose a matrix that is not square; headers do not reveal a transposed square matrix."""
    for name, tensor in sorted(tensors.items()):
        is_data = name.endswith((".weight", ".weight_packed")) and "embed" not in name
        is_matrix = tensor.dim() == 2 and min(tensor.shape) > 1
        if is_data and is_matrix and tensor.shape[0] != tensor.shape[1]:
            tensors[name] = tensor.t().contiguous()
            return True
    return False


def _scale_dtype(tensors: Tensors, config: dict[str, Any]) -> bool:
    found = [n for n, t in tensors.items() if "scale" in n and t.dtype is torch.float32]
    for name in found:
        tensors[name] = tensors[name].to(BF16)
    return bool(found)


def _empty_lists(tensors: Tensors, config: dict[str, Any]) -> bool:
    section = config.get("quantization_config", {})
    lists = [key for key in ("ignore", "llm_int8_skip_modules") if section.get(key)]
    for key in lists:
        section[key] = []
    return bool(lists)


def _lengthen_lists(tensors: Tensors, config: dict[str, Any]) -> bool:
    """List a quantized layer among those that are not quantized."""
    section = config.get("quantization_config", {})
    lists = [key for key in ("ignore", "llm_int8_skip_modules") if section.get(key)]
    scales = (".weight_scale", ".weight.absmax")
    found = [n.removesuffix(end) for n in sorted(tensors) for end in scales if n.endswith(end)]
    for key in lists if found else ():
        section[key] = [*section[key], found[-1]]
    return bool(lists and found)


def _flip_tie(tensors: Tensors, config: dict[str, Any]) -> bool:
    config["tie_word_embeddings"] = not config.get("tie_word_embeddings", True)
    return True


def _add_tensor(tensors: Tensors, config: dict[str, Any]) -> bool:
    tensors["extra.weight"] = torch.ones(4, dtype=BF16)
    return True


def _wider_dtype(tensors: Tensors, config: dict[str, Any]) -> bool:
    name = _plain_vector(tensors)
    tensors[name] = tensors[name].float() * 1.001
    return True


DEFECTS: dict[str, Callable[[Tensors, dict[str, Any]], bool]] = {
    "none": lambda tensors, config: True,
    "tensor dropped": _drop_tensor,
    "tensor renamed": _rename,
    "tensor transposed": _transpose,
    "scales in bfloat16": _scale_dtype,
    "list emptied": _empty_lists,
    "list lengthened": _lengthen_lists,
    "tie flag flipped": _flip_tie,
    "generation config malformed": lambda tensors, config: True,
    "extra tensor": _add_tensor,
    "vector in float32": _wider_dtype,
    "stale index": lambda tensors, config: True,
}
# Defects that change the values that the files define, so loadstone reads these files again.
_OWN_VALUES = ("scales in bfloat16", "vector in float32")


def write_defect(source: Path, defect: str, folder: Path) -> Path | None:
    """Return a copy with the defect; ``None`` if the defect does not apply."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if not DEFECTS[defect](tensors, config):
        return None
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    file = "model.safetensors"
    if defect == "stale index":
        file = "model-00001-of-00002.safetensors"
        names = dict.fromkeys(tensors, file)
        names[sorted(tensors)[0]] = "model-00002-of-00002.safetensors"
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if defect == "generation config malformed":
        (folder / "generation_config.json").write_text("{")
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    encoding: str
    defect: str

    def __str__(self) -> str:
        return f"{self.model}, {self.encoding}, {self.defect}"


def folders(root: Path, cases: list[Case]) -> Iterator[tuple[Case, Path, Path]]:
    """Yield each case with its folder, and the folder without a defect; skip impossible cases."""
    sources: dict[str, Path] = {}
    for case in cases:
        place = root / case.model / case.encoding
        if case.model not in sources:
            sources[case.model] = write_model(case.model, root / case.model / "source")
        encoded: Path | None = place / "none"
        if case.encoding == "plain":
            encoded = sources[case.model]
        elif not (place / "none").exists():
            encoded = write_encoded(sources[case.model], case.encoding, place / "none")
        if encoded is None:
            continue
        folder = write_defect(encoded, case.defect, place / f"case {case.defect}")
        if folder is not None:
            yield case, folder, encoded


# ---- what transformers really does


def truth(case: Case, folder: Path, original: Path) -> str:
    """Open the folder with transformers, on a CPU, and return the verdict."""
    import transformers

    cls = getattr(transformers, MODELS[case.model][0])
    methods = {"compressed-tensors": [None, transformers.CompressedTensorsConfig(dequantize=True)]}
    config = json.loads((folder / "config.json").read_text())
    method = config.get("quantization_config", {}).get("quant_method", "")
    with _quiet():
        reference = _values(cls, folder) if case.defect in _OWN_VALUES else None
        reference = reference or _values(cls, original)
        assert reference is not None
        try:
            for given in methods.get(method, [None]):
                options = {} if given is None else {"quantization_config": given}
                model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
                if info["missing_keys"]:
                    return "opens wrong"
            if getattr(model, "is_quantized", False):
                model.dequantize()
        except Exception:
            return "does not open"
    state = model.state_dict()
    equal = all(
        state[name].shape == tensor.shape and torch.equal(state[name].to(tensor.dtype), tensor)
        for name, tensor in reference.items()
    )
    return "opens right" if equal and state.keys() == reference.keys() else "opens wrong"


def _values(cls: Any, folder: Path) -> Tensors | None:
    """Return the values that the files define; ``None`` if loadstone rejects the files."""
    load = loadstone.transformers.from_pretrained
    try:
        found: Tensors = load(cls, folder, dtype="auto", dequantize=True).state_dict()
    except loadstone.Error:
        return None
    return found
