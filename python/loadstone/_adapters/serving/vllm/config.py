"""Reject a load whose tensors do not match the layers that vLLM created.

With loadstone's config format, vLLM creates layers for codes that the checkpoint does not have yet.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vllm.transformers_utils.config import HFConfigParser

from loadstone._adapters.serving.converted import plan_conversion, quantization_config
from loadstone._adapters.serving.options import ConversionOptions, Options
from loadstone._adapters.serving.vllm.drafter import options_for
from loadstone._base.errors import new_error


def checked_options(options: Options, model_config: Any, speculative: Any) -> Options:
    """Return a model's options, with the changes that its config requests.

    Raises ``plan.options`` if the model's layers expect a different encoding. ``speculative`` is
    vLLM's ``SpeculativeConfig`` if the model is a drafter.
    """
    options = options_for(options, model_config, speculative)
    requested = ConversionOptions.from_overrides(vars(model_config.hf_config))
    if requested.quantize and not options.changes.quantize:
        if (
            options.dequantize
            or options.receipt
            or options.changes != ConversionOptions(lora=options.changes.lora)
        ):
            _refuse("the options of the loader contradict loadstone_quantize", model_config)
        requested = dataclasses.replace(requested, lora=options.changes.lora)
        options = dataclasses.replace(options, changes=requested)
    if options.changes.quantize:
        _require_same_codes(options.changes, model_config)
    elif model_config.quantization is not None and (options.dequantize or options.changes.lora):
        _refuse(
            "the model's layers need codes, but these options decode the weights; add "
            "--hf-overrides "
            "'{\"quantization_config\": null}'",
            model_config,
        )
    return options


class LoadstoneConfigParser(HFConfigParser):  # type: ignore[misc]
    """Adds the quantization config of the conversion that ``loadstone_*`` overrides specify."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        fields, config = super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
        overrides = kwargs.get("hf_overrides")
        changes = ConversionOptions.from_overrides(overrides if isinstance(overrides, dict) else {})
        if changes.quantize:
            fields["quantization_config"] = quantization_config(
                plan_conversion(str(model), changes)
            )
        return fields, config


def refusing_other_loaders(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_model`` to reject other loaders for layers with loadstone's codes.

    Other loaders would silently copy plain values into these layers.
    """

    @functools.wraps(load_model)
    def checked(self: Any, vllm_config: Any, model_config: Any, *args: Any, **options: Any) -> Any:
        quantize = ConversionOptions.from_overrides(vars(model_config.hf_config)).quantize
        if quantize and self.load_config.load_format not in ("loadstone", "dummy"):
            _refuse("loadstone_quantize needs --load-format loadstone", model_config)
        return load_model(self, vllm_config, model_config, *args, **options)

    return checked


def _require_same_codes(changes: ConversionOptions, model_config: Any) -> None:
    wanted = quantization_config(plan_conversion(str(model_config.model), changes))
    quantization = getattr(model_config.hf_config, "quantization_config", None)
    # The model's config may have more fields, which vLLM adds.
    if isinstance(quantization, dict) and _has_fields(quantization, wanted or {}):
        return
    text = json.dumps(changes.quantize)
    raise new_error(
        "plan.options",
        "the model's layers have a different quantization; add --config-format loadstone "
        f"--hf-overrides '{{\"loadstone_quantize\": {text}}}', with the same style, include "
        "and exclude",
        field="quantize",
        found=json.dumps(quantization),
        expected=json.dumps(wanted),
        path=str(model_config.model),
    )


def _has_fields(config: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Return whether a config has all fields; the order of module names does not matter."""
    names = "ignore"
    others = {key: value for key, value in fields.items() if key != names}
    are_same = sorted(config.get(names, ())) == sorted(fields.get(names, ()))
    return are_same and config | others == config


def _refuse(message: str, model_config: Any) -> NoReturn:
    raise new_error(
        "plan.options",
        message,
        field="model_loader_extra_config",
        found=f"quantization {model_config.quantization}",
        path=str(model_config.model),
    )
