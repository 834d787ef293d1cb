"""What is loaded and the layers that vLLM made for it agree, or the load is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from loadstone._errors import make
from loadstone._serving.converted import conversion, quantization_config
from loadstone._serving.options import Changes, Options
from loadstone._vllm.drafter import options_of


def agreed(options: Options, model_config: Any, speculative: Any) -> Options:
    """The options that hold for a model, with the changes that its config asks for.

    Layers were made before: they take codes of one kind, or numbers.

    Args:
        speculative: vLLM's ``SpeculativeConfig`` if this is a drafter.

    Raises:
        PlanError: ``plan.options``: the model's layers take something else.
    """
    options = options_of(options, model_config, speculative)
    asked = Changes.of_overrides(vars(model_config.hf_config))
    if asked.quantize and not options.changes.quantize:
        asked = dataclasses.replace(asked, lora=options.changes.lora)
        options = dataclasses.replace(options, changes=asked)
    if options.changes.quantize:
        _require_codes(options.changes, model_config)
    elif options.dequantize and model_config.quantization is not None:
        _refuse_numbers(model_config)
    return options


def _require_codes(changes: Changes, model_config: Any) -> None:
    wanted = quantization_config(conversion(str(model_config.model), changes))
    found = getattr(model_config.hf_config, "quantization_config", None)
    if isinstance(found, dict) and _holds(found, wanted or {}):  # vLLM adds some fields
        return
    text = json.dumps(changes.quantize)
    raise make(
        "plan.options",
        "the model's layers do not take these codes; add --config-format loadstone "
        f"--hf-overrides '{{\"loadstone_quantize\": {text}}}', with the same style, include "
        "and exclude",
        field="quantize",
        found=json.dumps(found),
        expected=json.dumps(wanted),
        path=str(model_config.model),
    )


def _holds(found: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether all of these fields are there; names of modules in any order, as files have them."""
    names = "ignore"
    others = {key: value for key, value in fields.items() if key != names}
    are_same = sorted(found.get(names, ())) == sorted(fields.get(names, ()))
    return are_same and found | others == found


def _refuse_numbers(model_config: Any) -> None:
    raise make(
        "plan.options",
        "the model's layers take codes, and dequantize asks for numbers; add --hf-overrides "
        "'{\"quantization_config\": null}'",
        field="dequantize",
        found=f"quantization {model_config.quantization}",
        path=str(model_config.model),
    )
