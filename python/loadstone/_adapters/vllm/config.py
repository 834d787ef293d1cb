"""The config format: vLLM makes layers for codes that the checkpoint does not have yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.transformers_utils.config import HFConfigParser

from loadstone._adapters.serving.converted import conversion, quantization_config
from loadstone._adapters.serving.options import Changes


class LoadstoneConfigParser(HFConfigParser):  # type: ignore[misc]
    """Reads ``config.json``, and says what the offline conversion's would.

    The conversion is named by overrides: ``loadstone_quantize`` and others.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        """The config as a dict and as an object; vLLM applies the overrides afterwards."""
        fields, config = super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
        overrides = kwargs.get("hf_overrides")
        changes = Changes.of_overrides(overrides if isinstance(overrides, dict) else {})
        if changes.quantize:
            fields["quantization_config"] = quantization_config(conversion(str(model), changes))
        return fields, config
