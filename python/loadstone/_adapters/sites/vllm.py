"""Patch sites of vLLM, whose builds have different package names."""

from __future__ import annotations

from loadstone._adapters.sites import Sites

SITES = Sites(
    "vllm",
    "0.32",
    """
vllm.logger
    init_logger(name)
vllm.model_executor.layers.quantization.kv_cache
    BaseKVCacheMethod
vllm.model_executor.model_loader
    _LOAD_FORMAT_TO_MODEL_LOADER
    call register_model_loader(load_format)
vllm.model_executor.model_loader.base_loader
    BaseModelLoader.load_model(self, vllm_config, model_config, prefix)
vllm.model_executor.model_loader.default_loader
    DefaultModelLoader.__init__(self, load_config)
    DefaultModelLoader.download_model(self, model_config)
    DefaultModelLoader.get_all_weights(self, model_config, model)
    DefaultModelLoader.load_weights(self, model, model_config)
    DefaultModelLoader._get_weights_iterator(self, source)
    DefaultModelLoader._init_ep_weight_filter(self, model_config)
    DefaultModelLoader._prepare_weights(self, model_name_or_path, subfolder, revision)
vllm.model_executor.model_loader.ep_weight_filter
    call should_skip_weight(weight_name, local_expert_ids)
vllm.transformers_utils.config
    HFConfigParser.parse(self, model, trust_remote_code, revision, code_revision)
    call register_config_parser(config_format)
""",
)
