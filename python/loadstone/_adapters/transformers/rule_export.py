"""Find rules for a model type in models of two sizes, and prove them on both.

The models are on meta. Each checkpoint is a sparse file: a header, and a hole instead of weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import core_model_loading as library

from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error, listed, new_error
from loadstone._execute.plan import plan
from loadstone._plan import general_rules as general
from loadstone._skeleton.skeleton import skeleton

_DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers",
    "decoder_layers", "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STAGES = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
# The model is only planned, never loaded.
_UNLIMITED = {"cpu": "unlimited"}
# Pairs (layers, experts). In models that mix kinds of layers, eight layers contain every kind.
_SIZES = ((8, 16), (9, 20))
_AUTO = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM", "AutoModel",
)  # fmt: skip


def export_rules(model_type: str, config: str | None = None) -> list[dict[str, Any]]:
    """Return rules for checkpoints of a model type, of any depth and number of experts.

    ``config`` is a folder with a ``config.json``, for widths other than the library's defaults.
    """
    base_config = _read_config(model_type, config)
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        samples = [
            Sample(base_config, size, Path(folder, f"{index}.safetensors"))
            for index, size in enumerate(_SIZES)
        ]
        rules = _find_rules(samples[0])
        for sample in samples:
            require_same(sample, rules)
    return rules


class Sample:
    """A model of one size, its checkpoint without weights, and its traced recipes' boxes."""

    def __init__(self, base_config: Any, size: tuple[int, int], file: Path) -> None:
        try:
            config = resize(base_config, *size)
            with skeleton():
                self.model = model_class(config)(config)
        except Error:
            raise
        except Exception as reason:  # a configuration may raise anything
            message = (
                f"transformers cannot build a {base_config.model_type} with the sizes that "
                "loadstone "
                f"tried: {type(reason).__name__}: {' '.join(str(reason).split())}. Pass --config, "
                "a folder with the config.json of a checkpoint"
            )
            raise new_error("plan.options", message, field="model-type") from None
        saved = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        state = {k: v for k, v in self.model.state_dict().items() if k in saved}  # a tie only once
        state = library.revert_weight_conversion(self.model, state)
        write_header(state, file)
        self.file = file
        traced = plan(self.model, file, rules="transformers", max_memory=_UNLIMITED)
        traced.require_ok()
        self.boxes = general.boxes_of(traced.to_json())
        self.sources = _shapes(state)
        self.targets = _shapes(self.model.state_dict())

    def differing_targets(self, rules: list[dict[str, Any]]) -> list[str]:
        boxes = general.boxes_of(
            plan(self.model, self.file, rules=rules, max_memory=_UNLIMITED).to_json()
        )
        names = sorted(self.boxes.keys() | boxes.keys())
        return [name for name in names if boxes.get(name) != self.boxes.get(name)]


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def require_same(sample: Sample, rules: list[dict[str, Any]]) -> None:
    differing = sample.differing_targets(rules)
    if differing:
        message = (
            f"the library's conversion of {type(sample.model).__name__} cannot be expressed in "
            f"rules that hold for any depth: {len(differing)} of {len(sample.targets)} tensors do "
            f"not fit: {listed(differing, 5)}. Save recipes for one checkpoint: save_recipes()"
        )
        raise new_error("plan.rules", message, field="model-type")


def _find_rules(sample: Sample) -> list[dict[str, Any]]:
    """Try one proposal per family at a time; keep a proposal that gives the traced boxes."""
    families = general.families_of(sample.boxes)
    proposals = {
        index: family.proposals(sample.sources, sample.targets)
        for index, family in enumerate(families)
    }
    chosen: dict[int, dict[str, Any]] = {}
    while proposals := {index: rules for index, rules in proposals.items() if rules}:
        tried = {index: rules.pop(0) for index, rules in proposals.items()}
        rules_by_family = chosen | tried
        rules = [rules_by_family[index] for index in sorted(rules_by_family)]
        differing = set(sample.differing_targets(rules))
        for index, rule in tried.items():
            members = families[index].members
            if differing.isdisjoint(name for member in members for name in member.targets):
                chosen[index] = rule
                del proposals[index]
    return [chosen[index] for index in sorted(chosen) if not general.is_kept(chosen[index])]


def write_header(state: dict[str, Any], file: Path) -> None:
    """Write a safetensors file with a hole in place of the weights."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in state.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def _read_config(model_type: str, folder: str | None) -> Any:
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        message = f"transformers {transformers.__version__} has no model type '{model_type}'"
        raise new_error("plan.options", message, field="model-type", found=model_type)
    if folder is None:
        return known[model_type]()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type != model_type:
        message = f"{folder}: config.json is of another model type"
        raise new_error(
            "plan.options", message, field="config", found=config.model_type, expected=model_type
        )
    return config


def model_class(config: Any) -> Any:
    """Return the library's class that most checkpoints of this configuration use."""
    names: list[str] = list(config.architectures or ())
    if len(names) == 1 and hasattr(transformers, names[0]):
        return getattr(transformers, names[0])
    for auto in _AUTO:
        mapping: Any = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            classes: Any = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple | list) else classes
    message = "the library has no automatic class for this model type: pass --config"
    raise new_error("plan.options", message, field="model-type", found=config.model_type)


def resize(config: Any, layers: int, experts: int) -> Any:
    """Change the depth and the number of experts in every part of a configuration."""
    fields, dropped = config.to_dict(), {}
    for part in _sections(fields):
        lengths = {part[key] for key in _DEPTHS if isinstance(part.get(key), int)}
        # The library computes these again: lists with one item per layer, stages of a backbone.
        for key in [key for key, value in part.items() if _is_per_layer(key, value, lengths)]:
            dropped[key] = part.pop(key)
        for key in _STAGES:
            part.pop(key, None)
        part.update({key: layers for key in _DEPTHS if isinstance(part.get(key), int)})
        part.update({key: experts for key in _EXPERTS if isinstance(part.get(key), int)})
    resized = type(config).from_dict(fields)
    for key, value in dropped.items():  # used if the library has no default for the list
        if getattr(resized, key, value) is None:
            setattr(resized, key, (value * layers)[:layers])
    return resized


def _is_per_layer(key: str, value: Any, lengths: set[int]) -> bool:
    return isinstance(value, list) and "layer" in key and len(value) in lengths


def _sections(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from _sections(value)
