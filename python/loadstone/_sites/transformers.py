"""Where loadstone enters transformers."""

from loadstone._sites import Sites

SITES = Sites(
    "transformers",
    "5.1 to 5.23",
    """
transformers
    PreTrainedModel.from_pretrained(pretrained_model_name_or_path, config)
    PreTrainedModel.get_init_context(dtype, is_quantized)
    PreTrainedModel.init_weights(self)
    PreTrainedModel._from_config
    PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)
    PreTrainedModel._move_missing_keys_from_meta_to_device(self,
        missing_keys, device_map, hf_quantizer)
    PreTrainedModel._initialize_missing_keys(self, is_quantized)
    call PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)
    call PreTrainedModel._get_dtype_plan(self, dtype)
    call PreTrainedModel.get_parameter_or_buffer(self, target)
    PreTrainedModel.named_non_persistent_buffers
    PreTrainedModel.base_model_prefix
transformers.modeling_utils
    LoadStateDictConfig(ignore_mismatched_sizes, device_map, disk_offload_folder, offload_buffers,
        dtype, dtype_plan, hf_quantizer, device_mesh, weight_mapping)
    _get_device_map(model, device_map, max_memory, hf_quantizer)
    call _load_parameter_into_model(model, param_name, tensor)
transformers.core_model_loading
    call WeightConverter.convert(self, layer_name, model, config, hf_quantizer, loading_info)
    call inherited WeightConverter.add_tensor(self, target_key, source_key, source_pattern, future)
    call WeightRenaming.convert(self, layer_name, model, config, hf_quantizer, loading_info)
    call WeightRenaming(source_patterns, target_patterns)
    WeightTransform.source_patterns
    WeightTransform.target_patterns
    WeightTransform.quantization_operation
    [5.6-] WeightTransform._was_used
    [5.6-] WeightTransform.was_used(self)
    call build_glob_alternation(globs)
    call dot_natural_key(s)
    [5.10-] call rename_source_key(source_key, weight_renamings, weight_converters,
        base_model_prefix, meta_state_dict)
    [-5.9] call rename_source_key(source_key, weight_renamings, weight_converters, prefix,
        meta_state_dict)
    [5.16-] call set_param_for_module(model, target_name, param_value, loading_info,
        hf_quantizer)
    [-5.15] call set_param_for_module(model, target_name, param_value, loading_info,
        distributed_operation, hf_quantizer)
transformers.conversion_mapping
    call get_model_conversion_mapping(model, key_mapping, hf_quantizer)
    get_checkpoint_conversion_mapping(model_type)
transformers.utils.loading_report
    [5.16-] call LoadStateDictInfo(missing_keys, unexpected_keys, mismatched_keys, error_msgs,
        conversion_errors, skipped_pp_keys)
    [-5.15] call LoadStateDictInfo(missing_keys, unexpected_keys, mismatched_keys, error_msgs,
        conversion_errors)
transformers.integrations.accelerate
    call get_device(device_map, param_name, valid_torch_device)
transformers.integrations.deepspeed
    call is_deepspeed_zero3_enabled
transformers.integrations.fsdp
    call is_fsdp_enabled
transformers.integrations.peft
    PeftAdapterMixin.load_adapter
    PeftAdapterMixin.add_adapter
transformers.quantizers.base
    [5.21-] call HfQuantizer.get_new_dtype(self, converter, param, dtype)
    HfQuantizer.param_needs_quantization(self, model, param_name)
transformers.quantizers.quantizer_bnb_4bit
    Bnb4BitHfQuantizer.validate_environment(kwargs)
    Bnb4BitHfQuantizer.adjust_max_memory(max_memory)
    inherited Bnb4BitHfQuantizer.param_element_size(self, model, param_name, param)
    Bnb4BitHfQuantizer.param_needs_quantization(self, model, param_name)
    Bnb4BitHfQuantizer.get_quantize_ops(self)
transformers.quantizers.quantizer_bnb_8bit
    Bnb8BitHfQuantizer.validate_environment(kwargs)
    Bnb8BitHfQuantizer.adjust_max_memory(max_memory)
    inherited Bnb8BitHfQuantizer.param_element_size(self, model, param_name, param)
    Bnb8BitHfQuantizer.get_quantize_ops(self)
late transformers.trainer
    Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)
    Trainer._load_best_model(self)
""",
)
