"""Writes GPTQ, AWQ and compressed-tensors as small checkpoints, with their decoded values.

``PACKED`` is a table like ``codec_files.CODECS``. ``REFUSED`` lists changes that make a checkpoint
contradict itself, so that readers disagree about the values or cannot decode them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_compressed
import packed_gptq
import torch
from codec_checkpoint import Tensors, Written
from safetensors.torch import load_file, save_file

PACKED: dict[str, Callable[[Path], Written]] = {
    **packed_gptq.WRITERS,
    **packed_compressed.WRITERS,
}

Config = dict[str, Any]
Change = Callable[[Tensors, Config], None]
MODULE = "model.layers.0.q_proj"


@dataclasses.dataclass(frozen=True)
class Refused:
    """A change of a checkpoint after which loadstone must refuse to decode it.

    Attributes:
        codec: a name in ``PACKED``.
        change: a function that changes the tensors and ``quantization_config``.
        code: code of the expected error.
    """

    codec: str
    change: Change
    code: str


def write_refused(case: Refused, folder: Path) -> Written:
    file = PACKED[case.codec](folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    case.change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return dataclasses.replace(file, stored=tensors)


def without(suffix: str) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        del tensors[MODULE + suffix]

    return change


def replaced(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        tensors[MODULE + suffix] = make(tensors[MODULE + suffix]).contiguous()

    return change


def configured(**members: Any) -> Change:
    return lambda tensors, config: config.update(members)


def weights(**members: Any) -> Change:
    """Return a change of fields in the only group of compressed-tensors' config."""
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(members)


def last_is(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return make


def all_are(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def half_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2]


GPTQ, ASYM, ACT = "gptq-4-v1-g32-sym", "gptq-4-v1-all", "gptq-4-v1-g128-sym-act"
CT, CT_ASYM, CT_ACT = "packed-4-g32", "packed-4-g32-asym", "packed-4-g128-act"
REFUSED: dict[str, Refused] = {
    # Components that are missing, or have a different size.
    "gptq without zero points": Refused(GPTQ, without(".qzeros"), "q.scale_missing"),
    "gptq without scales": Refused(GPTQ, without(".scales"), "q.scale_missing"),
    "gptq in another order, untold": Refused(ACT, without(".g_idx"), "q.scale_missing"),
    "packed in another order, untold": Refused(CT_ACT, without(".weight_g_idx"), "q.scale_missing"),
    "gptq with an order of bytes": Refused(
        GPTQ, replaced(".g_idx", lambda order: order.to(torch.int16)), "q.scale_shape"
    ),
    "gptq in wide words": Refused(
        GPTQ, replaced(".qweight", lambda words: words.to(torch.int64)), "plan.encoding"
    ),
    "gptq with too few scales": Refused(GPTQ, replaced(".scales", half_of), "q.scale_shape"),
    "gptq with too few zero points": Refused(GPTQ, replaced(".qzeros", half_of), "q.scale_shape"),
    "gptq with too few inputs": Refused(GPTQ, replaced(".g_idx", half_of), "q.scale_shape"),
    "awq without zero points": Refused("awq-g32", without(".qzeros"), "q.scale_missing"),
    "awq with too few scales": Refused("awq-g32", replaced(".scales", half_of), "q.scale_shape"),
    "packed without a shape": Refused(CT, without(".weight_shape"), "q.scale_missing"),
    "packed without scales": Refused(CT, without(".weight_scale"), "q.scale_missing"),
    "packed of another shape": Refused(CT, replaced(".weight_shape", last_is(264)), "q.shape"),
    "packed of a huge shape": Refused(CT, replaced(".weight_shape", all_are(1 << 40)), "q.shape"),
    "packed of a negative shape": Refused(CT, replaced(".weight_shape", last_is(-8)), "q.shape"),
    "packed with too few zero points": Refused(
        CT_ASYM, replaced(".weight_zero_point", half_of), "q.scale_shape"
    ),
    # Indices of groups that do not exist.
    "gptq of a group beyond": Refused(ACT, replaced(".g_idx", last_is(2)), "q.index_range"),
    "gptq of a group below 0": Refused(ACT, replaced(".g_idx", last_is(-1)), "q.index_range"),
    "packed of a group beyond": Refused(
        CT_ACT, replaced(".weight_g_idx", last_is(2)), "q.index_range"
    ),
    "packed of groups half unset": Refused(
        CT_ACT, replaced(".weight_g_idx", last_is(-1)), "q.index_range"
    ),
    # Zero points that different readers interpret differently.
    "gptq with all ones": Refused(ASYM, replaced(".qzeros", last_is(-1)), "q.zero_point"),
    "gptq of version 2 by its zeros": Refused(
        GPTQ, replaced(".qzeros", all_are(-0x77777778)), "plan.config_mismatch"
    ),
    # Configs that contradict the tensors.
    "gptq of other bits": Refused(GPTQ, configured(bits=8), "plan.config_mismatch"),
    "gptq of other groups": Refused(GPTQ, configured(group_size=64), "plan.config_mismatch"),
    "gptq in an order that is denied": Refused(
        ACT, configured(desc_act=False), "plan.config_mismatch"
    ),
    "awq of other bits": Refused("awq-g32", configured(bits=8), "plan.config_mismatch"),
    "awq of other groups": Refused("awq-g32", configured(group_size=64), "plan.config_mismatch"),
    "awq that is called gptq": Refused(
        "awq-g32", configured(quant_method="gptq"), "plan.config_mismatch"
    ),
    "gptq that is called awq": Refused(
        GPTQ, configured(quant_method="awq"), "plan.config_mismatch"
    ),
    "packed of other bits": Refused(CT, weights(num_bits=8), "plan.config_mismatch"),
    "packed of other groups": Refused(CT, weights(group_size=64), "plan.config_mismatch"),
    "packed and symmetric with zero points": Refused(
        CT_ASYM, weights(symmetric=True), "plan.config_mismatch"
    ),
    "packed and not symmetric without": Refused(CT, weights(symmetric=False), "q.scale_missing"),
    # Layouts of other programs.
    "gptq in planes": Refused(GPTQ, configured(checkpoint_format="gptq_p"), "plan.encoding"),
    "gptq for marlin": Refused(GPTQ, configured(checkpoint_format="marlin"), "plan.encoding"),
    "awq for vectors": Refused("awq-g32", configured(version="gemv"), "plan.encoding"),
    "awq for vectors, fast": Refused("awq-g32", configured(version="gemv_fast"), "plan.encoding"),
}
