"""Cases to measure: each prepares (imports, skeleton) and returns the work to time.

At the end of each case all tensors are in private memory that has been written to. A loader that
returns views of a mapped file has not loaded yet, so the case copies its views.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = Callable[[], Any]

# Rules that map per-expert files to fused parameters: they stack gate and up, then join them.
EXPERT_RULES = [
    {
        "op": "stack_concat",
        "sources": [
            r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w1\.weight",
            r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w3\.weight",
        ],
        "targets": ["$1.mlp.experts.gate_up_proj"],
        "dims": [0, 1],
    },
    {
        "op": "stack",
        "sources": [r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w2\.weight"],
        "targets": ["$1.mlp.experts.down_proj"],
        "dim": 0,
    },
    {
        "op": "rename",
        "sources": [r"(.*)\.block_sparse_moe\.gate\.weight"],
        "targets": ["$1.mlp.gate.weight"],
    },
]


def _model_class(folder: Path) -> Any:
    import transformers

    return getattr(transformers, _config(folder).architectures[0])


def _config(folder: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


def _skeleton(folder: Path, dtype: Any = None) -> Any:
    import torch

    import loadstone

    with loadstone.skeleton():
        return _model_class(folder)._from_config(_config(folder), dtype=dtype or torch.bfloat16)


def loadstone_model(folder: Path) -> Work:
    """Plan, load and audit a model of the library."""
    import loadstone

    model = _skeleton(folder)
    rules = EXPERT_RULES if "experts" in folder.name else None
    return lambda: (loadstone.load(model, folder, rules=rules), model)


def loadstone_float32(folder: Path) -> Work:
    """Plan, load and audit, with a cast from bf16 to f32."""
    import torch

    import loadstone

    model = _skeleton(folder, torch.float32)
    return lambda: (loadstone.load(model, folder), model)


def loadstone_as_is(folder: Path) -> Work:
    """Load every tensor of the file unchanged, to compare with the case that fuses experts."""
    import torch  # noqa: F401  (excludes its import from the time)

    import loadstone.torch

    return lambda: loadstone.torch.load_file(folder)


def loadstone_from_pretrained(folder: Path) -> Work:
    """Run transformers' function on loadstone, which traces the recipes in each run."""
    return _from_pretrained(folder, "bfloat16")


def loadstone_from_pretrained_float32(folder: Path) -> Work:
    """Run transformers' function on loadstone with dtype=float32."""
    return _from_pretrained(folder, "float32")


def _quantized(kind: str) -> dict[str, Any]:
    """Return from_pretrained's arguments for one of bitsandbytes' formats; {} for no format."""
    if not kind:
        return {}
    import bitsandbytes  # noqa: F401  (excludes its import from the time)
    import transformers

    options: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        encoding, _, nested = kind.partition(", ")
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": encoding}
        options["bnb_4bit_use_double_quant"] = bool(nested)
    return {"quantization_config": transformers.BitsAndBytesConfig(**options)}


def quantized(load: Callable[[Path, str, str], Work], kind: str) -> Callable[[Path], Work]:
    """Return the case for one of bitsandbytes' formats."""
    return lambda folder: load(folder, "bfloat16", kind)


def _from_pretrained(folder: Path, dtype: str, kind: str = "") -> Work:
    import torch
    import transformers

    import loadstone.transformers

    transformers.utils.logging.disable_progress_bar()
    model_class, options = _model_class(folder), _quantized(kind)
    cache = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = cache.name

    def work() -> Any:
        model = loadstone.transformers.from_pretrained(
            model_class, folder, dtype=getattr(torch, dtype), **options
        )
        return model, cache  # `cache` is deleted with the process

    return work


def safetensors_clone(folder: Path) -> Work:
    """Run safetensors' load_file for each shard, and copy its views."""
    from safetensors.torch import load_file

    def work() -> Any:
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update({name: view.clone() for name, view in load_file(file).items()})
        return tensors

    return work


def transformers_private(folder: Path) -> Work:
    """Run from_pretrained, and copy views of the file afterwards."""
    return _transformers(folder, "bfloat16")


def transformers_views(folder: Path) -> Work:
    """Run from_pretrained only, which reads no data yet unless it casts."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class = _model_class(folder)
    return lambda: model_class.from_pretrained(folder)


def transformers_float32(folder: Path) -> Work:
    """Run from_pretrained with dtype=float32."""
    return _transformers(folder, "float32")


def _transformers(folder: Path, dtype: str, kind: str = "") -> Work:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class, options = _model_class(folder), _quantized(kind)

    def work() -> Any:
        model = model_class.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
        return _made_private(model)

    return work


def accelerate_private(folder: Path) -> Work:
    """Run load_checkpoint_in_model, and copy views of the file afterwards."""
    import accelerate
    import torch

    model_class, config = _model_class(folder), _config(folder)

    def work() -> Any:
        with accelerate.init_empty_weights():
            model = model_class(config)
        accelerate.load_checkpoint_in_model(
            model, str(folder), device_map={"": "cpu"}, dtype=torch.bfloat16
        )
        return _made_private(model)

    return work


def _made_private(model: Any) -> Any:
    """Copy each tensor that is a view of a mapped file to private memory."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].endswith(".safetensors"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            maps.append((begin, end))
    for tensor in [*model.parameters(), *model.buffers()]:
        if any(begin <= tensor.data_ptr() < end for begin, end in maps):
            tensor.data = tensor.data.clone()
    return model


def _packed(folder: Path, kind: str, resident: bool) -> Work:
    """Load a ModelOpt model, packed by loadstone during the load or by ModelOpt in memory."""
    import modelopt.torch.quantization as mtq
    import transformers

    import loadstone.modelopt

    transformers.utils.logging.disable_progress_bar()
    auto, config = transformers.AutoModelForCausalLM, getattr(mtq, f"{kind.upper()}_DEFAULT_CFG")
    if not resident:
        return lambda: loadstone.modelopt.load(auto, folder, config)

    def work() -> Any:
        model = auto.from_pretrained(folder)
        mtq.quantize(model, config)
        mtq.compress(model)  # all except the experts
        return model

    return work


def packed(kind: str, *, resident: bool) -> Callable[[Path], Work]:
    """Return the case for one of ModelOpt's formats."""
    return lambda folder: _packed(folder, kind, resident)


CASES: dict[str, Callable[[Path], Work]] = {
    "loadstone": loadstone_model,
    "loadstone, to f32": loadstone_float32,
    "loadstone, as it is": loadstone_as_is,
    "loadstone.transformers": loadstone_from_pretrained,
    "loadstone.transformers, to f32": loadstone_from_pretrained_float32,
    "safetensors load_file + clone": safetensors_clone,
    "transformers from_pretrained": transformers_private,
    "transformers, to f32": transformers_float32,
    "transformers, views of the file": transformers_views,
    "accelerate load_checkpoint_in_model": accelerate_private,
}
QUANTIZED = ("nf4", "nf4, nested", "fp4", "int8")
for _kind in QUANTIZED:
    CASES[f"loadstone.transformers, to {_kind}"] = quantized(_from_pretrained, _kind)
    CASES[f"transformers, to {_kind}"] = quantized(_transformers, _kind)
PACKED = ("fp8", "nvfp4")
for _kind in PACKED:
    CASES[f"loadstone.modelopt, to {_kind}"] = packed(_kind, resident=False)
    CASES[f"ModelOpt in memory, to {_kind}"] = packed(_kind, resident=True)
