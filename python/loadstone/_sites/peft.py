"""Where loadstone enters PEFT."""

from loadstone._sites import Sites

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
transformers
    PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)
transformers.modeling_utils
    LoadStateDictConfig(device_map)
""",
    first="0.21",  # the two before have these places, and do other things in them
)
