"""Writes GGUF files of ``diffusers_models`` in the original names, and loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy
import torch
from diffusers_layouts import State, unchanged
from diffusers_models import CASES, Case, by_name, library_converted, with_meta, write_config
from diffusers_models import differences as differences_of_values

import loadstone
import loadstone.diffusers
from loadstone._model.walk import walk

Kind = gguf.GGMLQuantizationType
PLAIN = (Kind.F16, Kind.Q8_0, Kind.Q4_0)
# Byte offsets of the F16 scales in a block, for types that gguf-py cannot quantize to.
SCALES = {Kind.Q4_K: (0, 2), Kind.Q2_K: (80, 82), Kind.Q6_K: (208,)}


@dataclasses.dataclass
class Tensors:
    """The tensors of a file.

    Attributes:
        data: arrays as gguf-py writes them: packed rows, or values.
        kinds: the GGUF type of each tensor.
    """

    data: dict[str, Any]
    kinds: dict[str, Kind]

    def dequantized(self) -> State:
        """Return the values that gguf-py decodes, in float32."""
        return {
            name: torch.from_numpy(gguf.quants.dequantize(data, self.kinds[name]).copy())
            for name, data in self.data.items()
        }

    def write(self, file: Path, architecture: str = "test") -> str:
        writer = gguf.GGUFWriter(file, architecture)
        for name, data in self.data.items():
            writer.add_tensor(name, data, raw_dtype=self.kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(file)


def packed(
    state: State, choose: Callable[[int], Kind], seed: int = 0, scale: float = 0.02
) -> Tensors:
    """Pack each matrix in the type that ``choose(index)`` returns; vectors stay F32.

    Tensors that do not fit the type become F16, as in published files.

    Args:
        scale: the largest scale of random blocks.
    """
    made = Tensors({}, {})
    generator = numpy.random.default_rng(seed)
    for index, (name, tensor) in enumerate(state.items()):
        array = tensor.detach().float().numpy()
        kind = choose(index) if array.ndim == 2 else Kind.F32
        if array.ndim > 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Kind.F16
        if kind in SCALES:
            made.data[name] = random_blocks(array.shape, kind, generator, scale)
        else:
            made.data[name] = gguf.quants.quantize(numpy.ascontiguousarray(array), kind)
        made.kinds[name] = kind
    return made


def random_blocks(shape: tuple[int, ...], kind: Kind, generator: Any, scale: float = 0.02) -> Any:
    """Return valid blocks: random bytes, and small finite scales."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = shape[0] * shape[1] // elements
    made = generator.integers(0, 256, (blocks, size), dtype=numpy.uint8)
    for offset in SCALES[kind]:
        scales = generator.uniform(-scale, scale, (blocks, 1)).astype(numpy.float16)
        made[:, offset : offset + 2] = scales.view(numpy.uint8)
    return made.reshape(shape[0], shape[1] // elements * size)


def mixed(index: int) -> Kind:
    """Choose a type for a matrix, varied as in files named K_M."""
    return (Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.Q4_K, Kind.F32)[index % 5]


def _wider(name: str, changes: dict[str, Any]) -> Case:
    case = by_name(name)
    return dataclasses.replace(case, name=f"{name}_256", changes=case.changes | changes)


# Configuration changes that make each row 256 elements long, which is one block of the K types.
_WIDE_WAN = {"attention_head_dim": 64, "ffn_dim": 256, "text_dim": 256, "freq_dim": 256}
_WIDE_IMAGE = _WIDE_WAN | {"image_dim": 256, "added_kv_proj_dim": 256}
BLOCK_CASES = [
    _wider("wan_t2v", _WIDE_WAN),
    _wider(
        "sd35",
        {
            "attention_head_dim": 64, "joint_attention_dim": 256, "caption_projection_dim": 256,
            "pooled_projection_dim": 256,
        },
    ),
    _wider("z_image", {"dim": 256, "cap_feat_dim": 256, "axes_dims": [16, 24, 24]}),
    _wider(
        "qwen_image",
        {"attention_head_dim": 64, "joint_attention_dim": 256, "axes_dims_rope": [16, 24, 24]},
    ),
]  # fmt: skip
# Cases in addition to ``CASES``. Only the sweep runs them.
MORE_BLOCK_CASES = [
    *(_wider(name, _WIDE_IMAGE) for name in ("wan_i2v", "wan_animate", "chrono_edit")),
    *(_wider(name, _WIDE_WAN) for name in ("wan_ti2v", "wan_vace", "skyreels_v2")),
    _wider("ltx", {"attention_head_dim": 64, "cross_attention_dim": 256, "caption_channels": 256}),
    _wider(
        "sana",
        {
            "attention_head_dim": 64, "cross_attention_head_dim": 64, "cross_attention_dim": 256,
            "caption_channels": 256,
        },
    ),
    _wider(
        "auraflow",
        {"attention_head_dim": 64, "joint_attention_dim": 256, "caption_projection_dim": 256},
    ),
    _wider(
        "cosmos", {"attention_head_dim": 64, "text_embed_dim": 256, "adaln_lora_dim": 256},
    ),
    _wider(
        "hidream",
        {
            "attention_head_dim": 64, "caption_channels": [256, 256], "text_emb_dim": 256,
            "axes_dims_rope": [32, 32],
        },
    ),
    _wider(
        "mochi",
        {
            "num_attention_heads": 4, "attention_head_dim": 64, "pooled_projection_dim": 256,
            "text_embed_dim": 256, "time_embed_dim": 256,
        },
    ),
    _wider("sd15_unet", {"cross_attention_dim": 256}),
    _wider(
        "sdxl_unet", {"cross_attention_dim": 256, "projection_class_embeddings_input_dim": 256},
    ),
]  # fmt: skip
FIRST_LAST_CASE = _wider("wan_flf2v", _WIDE_IMAGE)
# A VAE under diffusers' names. In the original layout, its only matrices would be convolutions.
VAE_CASE = dataclasses.replace(
    _wider("autoencoder_kl", {"block_out_channels": [16, 32, 256]}), layout=unchanged
)
# Cases with models of the published width. They are large, so one file per case has all types.
WIDE_CASES = [case for case in CASES if case.is_wide]


class File:
    """A GGUF file of a case, with its configuration and its tensors."""

    def __init__(self, folder: Path, case: Case, choose: Any) -> None:
        self.case = case
        folder.mkdir(exist_ok=True)
        model = case.build()
        self.tensors: Tensors = packed(case.original(model), choose)
        self.path = self.tensors.write(folder / "model.gguf")
        self.config = write_config(model, folder / "config")

    def load(self, **options: Any) -> Any:
        return loadstone.diffusers.from_single_file(
            self.case.cls, self.path, config=self.config, **options
        )

    def library_load(self, **options: Any) -> Any:
        return self.case.cls.from_single_file(self.path, config=self.config, **options)

    def reference(self) -> Any:
        """Return the model with gguf-py's decoded values, renamed by diffusers' converter."""
        with with_meta():
            empty = self.case.construct()
        values = library_converted(self.case, self.tensors.dequantized(), empty)
        expected = self.case.construct()
        names = expected.state_dict()
        expected.load_state_dict({name: values[name] for name in names})
        return expected


def quantization(dtype: torch.dtype = torch.bfloat16, *excluded: str) -> Any:
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    if excluded:
        config.modules_to_not_convert = list(excluded)
    return config


def differences(found: Any, expected: Any) -> list[str]:
    """Return differences as ``diffusers_models`` does, and those of tensors in block formats.

    diffusers dequantizes into tensors that are not parameters; loadstone must make parameters.
    """
    lines = differences_of_values(found, expected)
    theirs = {slot.name: slot.tensor for slot in walk(expected)}
    for slot in walk(found):
        if slot.kind == "parameter" and not isinstance(slot.tensor, torch.nn.Parameter):
            lines.append(f"{slot.name}: not a parameter")
        if block_format(slot.tensor) != block_format(theirs.get(slot.name)):
            lines.append(f"{slot.name}: different block format")
    return lines


def block_format(tensor: Any) -> Any:
    is_packed = isinstance(tensor, diffusers.quantizers.gguf.utils.GGUFParameter)
    return tensor.quant_type if is_packed else None


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:20])
    assert loadstone.audit(found).ok
