"""GGUF files of the models of ``diffusers_models``, in the original names, and their loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy
import torch
from diffusers_layouts import State
from diffusers_models import Case, by_name, library_converted, write_config
from diffusers_models import differences as differences_of_values

import loadstone
import loadstone.diffusers
from loadstone._skeleton_walk import walk

Kind = gguf.GGMLQuantizationType
PLAIN = (Kind.F16, Kind.Q8_0, Kind.Q4_0)
# Where the F16 scales of a block lie: gguf-py does not quantize to these types.
SCALES = {Kind.Q4_K: (0, 2), Kind.Q2_K: (80, 82), Kind.Q6_K: (208,)}


@dataclasses.dataclass
class Tensors:
    """What a file holds.

    Attributes:
        data: arrays as gguf-py takes them: packed rows, or numbers.
        kinds: of each tensor.
    """

    data: dict[str, Any]
    kinds: dict[str, Kind]

    def dequantized(self) -> State:
        """The numbers that the file stands for, by gguf-py in float32."""
        return {
            name: torch.from_numpy(gguf.quants.dequantize(data, self.kinds[name]).copy())
            for name, data in self.data.items()
        }

    def write(self, file: Path) -> str:
        writer = gguf.GGUFWriter(file, "test")
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
    """Matrices whose rows are whole blocks as ``choose(running number)`` says, the rest F32.

    Matrices that do not fit become F16, as in files that people publish.

    Args:
        scale: the largest of random blocks.
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
    """Valid blocks: any bytes, and scales that are small finite numbers."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = shape[0] * shape[1] // elements
    made = generator.integers(0, 256, (blocks, size), dtype=numpy.uint8)
    for offset in SCALES[kind]:
        scales = generator.uniform(-scale, scale, (blocks, 1)).astype(numpy.float16)
        made[:, offset : offset + 2] = scales.view(numpy.uint8)
    return made.reshape(shape[0], shape[1] // elements * size)


def mixed(index: int) -> Kind:
    """As files named K_M are."""
    return (Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.Q4_K, Kind.F32)[index % 5]


def _wider(name: str, changes: dict[str, Any]) -> Case:
    case = by_name(name)
    return dataclasses.replace(case, name=f"{name}_256", changes=case.changes | changes)


# Rows of 256 numbers, which is a block of the K types.
BLOCK_CASES = [
    _wider("wan_t2v", {"attention_head_dim": 64, "ffn_dim": 256, "text_dim": 256, "freq_dim": 256}),
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


class File:
    """A GGUF file of a case, its configuration, and what it holds."""

    def __init__(self, folder: Path, case: Case, choose: Any) -> None:
        self.case = case
        self.model = case.build()
        self.tensors: Tensors = packed(case.original(self.model), choose)
        self.path = self.tensors.write(folder / "model.gguf")
        self.config = write_config(self.model, folder / "config")

    def load(self, **options: Any) -> Any:
        return loadstone.diffusers.from_single_file(
            self.case.cls, self.path, config=self.config, **options
        )

    def library_load(self, **options: Any) -> Any:
        return self.case.cls.from_single_file(self.path, config=self.config, **options)

    def reference(self) -> Any:
        """A model with the numbers of gguf-py, through the library's converter in float32."""
        values = library_converted(self.case, self.tensors.dequantized(), self.model)
        expected = self.case.build()
        names = expected.state_dict()
        expected.load_state_dict({name: values[name] for name in names})
        return expected


def quantization(dtype: torch.dtype = torch.bfloat16, *excluded: str) -> Any:
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    if excluded:
        config.modules_to_not_convert = list(excluded)
    return config


def differences(found: Any, expected: Any) -> list[str]:
    """As those of ``diffusers_models``, with the block format of parameters.

    What the library dequantizes it leaves as tensors that are no parameters; ours are.
    """
    lines = differences_of_values(found, expected)
    theirs = {slot.name: slot.tensor for slot in walk(expected)}
    for slot in walk(found):
        if slot.kind == "parameter" and not isinstance(slot.tensor, torch.nn.Parameter):
            lines.append(f"{slot.name}: not a parameter")
        if block_format(slot.tensor) != block_format(theirs.get(slot.name)):
            lines.append(f"{slot.name}: another block format")
    return lines


def block_format(tensor: Any) -> Any:
    is_packed = isinstance(tensor, diffusers.quantizers.gguf.utils.GGUFParameter)
    return tensor.quant_type if is_packed else None


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:20])
    assert loadstone.audit(found).ok
