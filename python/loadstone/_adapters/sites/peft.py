"""Patch sites of PEFT."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "peft",
    "0.21",
    """
peft
    PeftModel.from_pretrained(model, model_id)
peft.tuners.tuners_utils
    BaseTuner.inject_adapter(self, model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)
    BaseTunerLayer._get_base_layer_device_and_dtype(self, base_layer)
    BaseTunerLayer.get_base_layer(self)
    BaseTunerLayer.merge(self, safe_merge, adapter_names)
    BaseTunerLayer.unmerge(self)
    BaseTunerLayer.merged_adapters
peft.utils.transformers_weight_conversion
    build_peft_weight_mapping(weight_conversions, adapter_name, peft_config)
    convert_peft_config_for_transformers(peft_config, model, conversions)
transformers
    PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)
transformers.modeling_utils
    LoadStateDictConfig(device_map, weight_mapping)
transformers.core_model_loading
    call WeightRenaming(source_patterns, target_patterns)
""",
    first="0.21",  # earlier releases match the table, but their functions behave differently
)
