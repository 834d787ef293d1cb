"""Patch sites of SGLang."""

from __future__ import annotations

from loadstone._adapters.sites import Sites

SITES = Sites(
    "sglang",
    "0.5.23",
    """
sglang.srt.layers.quantization.kv_cache
    BaseKVCacheMethod
sglang.srt.model_loader.loader
    get_model_loader(load_config, model_config)
    DefaultModelLoader.__init__(self, load_config)
    DefaultModelLoader.load_model(self, model_config, device_config)
    DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
    DefaultModelLoader._filter_mtp_weights(weights_iterator, prefix, draft_model_idx)
    DefaultModelLoader._get_weights_iterator(self, source)
    DefaultModelLoader._prepare_weights(self, model_name_or_path, revision)
""",
)
