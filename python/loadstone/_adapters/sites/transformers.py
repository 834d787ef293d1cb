"""Patch sites of transformers: of all releases, of 5.0 and later, and of earlier releases."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "transformers",
    "4.57, 5.0 to 5.23",
    """
transformers
    CONFIG_MAPPING
    PreTrainedModel.from_pretrained(pretrained_model_name_or_path, config)
    PreTrainedModel.save_pretrained
    PreTrainedModel.get_init_context(is_quantized)
    PreTrainedModel._from_config
    PreTrainedModel._initialize_missing_keys(self, is_quantized)
    call PreTrainedModel.get_parameter_or_buffer(self, target)
    PreTrainedModel.base_model_prefix
transformers.modeling_utils
    _get_device_map(model, device_map, max_memory, hf_quantizer)
    call _load_parameter_into_model(model, param_name, tensor)
    call is_fsdp_enabled
    [5.1-] log_state_dict_report(model, loading_info)
transformers.integrations.deepspeed
    call is_deepspeed_zero3_enabled
transformers.integrations.peft
    PeftAdapterMixin.load_adapter
    PeftAdapterMixin.add_adapter

[5.0-] transformers
    PreTrainedModel.get_init_context(dtype, is_quantized)
    PreTrainedModel.init_weights(self)
    PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)
    PreTrainedModel._move_missing_keys_from_meta_to_device(self,
        missing_keys, device_map, hf_quantizer)
    [5.1-] call PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)
    [-5.0] call PreTrainedModel._adjust_missing_and_unexpected_keys(self, missing_keys,
        unexpected_keys)
    [5.1-] call PreTrainedModel._get_dtype_plan(self, dtype)
    [-5.0] PreTrainedModel.dtype_plan
    PreTrainedModel.named_non_persistent_buffers
    PreTrainedModel.tie_weights
    [5.1-] call CompressedTensorsConfig(dequantize)
[5.1-] transformers.initialization
    no_tie_weights()
[5.0-] transformers.modeling_utils
    get_hf_quantizer(config, quantization_config, device_map, weights_only, user_agent)
    _get_dtype(dtype, checkpoint_files, config, weights_only, hf_quantizer)
    LoadStateDictConfig(ignore_mismatched_sizes, device_map, disk_offload_folder, offload_buffers,
        dtype, hf_quantizer, device_mesh, weight_mapping)
    [5.16-] call LoadStateDictInfo(missing_keys, unexpected_keys, mismatched_keys, error_msgs,
        conversion_errors, skipped_pp_keys)
    [5.1-5.15] call LoadStateDictInfo(missing_keys, unexpected_keys, mismatched_keys, error_msgs,
        conversion_errors)
    [-5.0] call LoadStateDictInfo(missing_keys, unexpected_keys, mismatched_keys,
        disk_offload_index, error_msgs, conversion_errors)
[5.0-] transformers.core_model_loading
    call WeightConverter.convert(self, layer_name, model, config, hf_quantizer)
    call inherited WeightConverter.add_tensor(self, target_key, source_key, source_pattern, future)
    call WeightRenaming.convert(self, layer_name, model, config, hf_quantizer)
    call WeightRenaming(source_patterns, target_patterns)
    WeightTransform.source_patterns
    WeightTransform.target_patterns
    WeightTransform.quantization_operation
    [5.6-] WeightTransform._was_used
    [5.6-] WeightTransform.was_used(self)
    call build_glob_alternation(globs)
    call revert_weight_conversion(model, state_dict)
    call dot_natural_key(s)
    [5.1-] spawn_materialize(thread_pool, tensor, device, dtype)
    [5.10-] call rename_source_key(source_key, weight_renamings, weight_converters,
        base_model_prefix, meta_state_dict)
    [-5.9] call rename_source_key(source_key, weight_renamings, weight_converters, prefix,
        meta_state_dict)
[5.0-] transformers.conversion_mapping
    call get_model_conversion_mapping(model, key_mapping, hf_quantizer)
    get_checkpoint_conversion_mapping(model_type)
[5.0-] transformers.integrations.accelerate
    call get_device(device_map, param_name, valid_torch_device)
[5.0-] transformers.quantizers.auto
    AUTO_QUANTIZATION_CONFIG_MAPPING
[5.0-] transformers.modeling_gguf_pytorch_utils
    TENSOR_PROCESSORS
    TensorProcessor.process(self, weights, name)
    call load_gguf_checkpoint(gguf_checkpoint_path, return_tensors)
    call get_gguf_hf_weights_map(hf_model, processor)
[5.0-] transformers.quantizers.base
    [5.21-] call HfQuantizer.get_new_dtype(self, converter, param, dtype)
    HfQuantizer.param_needs_quantization(self, model, param_name)
[5.0-] transformers.quantizers.quantizer_bnb_4bit
    Bnb4BitHfQuantizer.validate_environment(kwargs)
    Bnb4BitHfQuantizer.adjust_max_memory(max_memory)
    inherited Bnb4BitHfQuantizer.param_element_size(self, model, param_name, param)
    Bnb4BitHfQuantizer.param_needs_quantization(self, model, param_name)
    Bnb4BitHfQuantizer.get_quantize_ops(self)
[5.0-] transformers.quantizers.quantizer_bnb_8bit
    Bnb8BitHfQuantizer.validate_environment(kwargs)
    Bnb8BitHfQuantizer.adjust_max_memory(max_memory)
    inherited Bnb8BitHfQuantizer.param_element_size(self, model, param_name, param)
    Bnb8BitHfQuantizer.get_quantize_ops(self)
[5.0-] late transformers.trainer
    Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)
    Trainer._load_best_model(self)

[-4.57] transformers
    PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, device_map,
        disk_offload_folder, hf_quantizer, keep_in_fp32_regex, device_mesh)
    call PreTrainedModel._get_key_renaming_mapping(self, checkpoint_keys, key_mapping,
        loading_base_model_from_task_state_dict, loading_task_model_from_base_state_dict)
    PreTrainedModel._move_missing_keys_from_meta_to_cpu(self, missing_keys, dtype, hf_quantizer)
    PreTrainedModel._load_from_tf
    PreTrainedModel._load_from_flax
[-4.57] transformers.modeling_utils
    init_empty_weights
    call _infer_parameter_dtype(model, param_name, empty_param, keep_in_fp32_regex)
    _load_state_dict_into_meta_model(model, state_dict)
    load_shard_file(args)
    load_shard_files_with_threadpool(args_list)
""",
    first="4.57",
)
