"""Patch sites of diffusers."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "diffusers",
    "0.35 to 0.42",
    """
diffusers
    ModelMixin
diffusers.configuration_utils
    ConfigMixin.from_config(config)
    ConfigMixin.load_config(pretrained_model_name_or_path)
late diffusers.loaders.single_file
    FromSingleFileMixin.from_single_file(pretrained_model_link_or_path)
    _download_diffusers_model_config_from_hub(pretrained_model_name_or_path)
    load_single_file_sub_model(name, checkpoint)
    create_diffusers_clip_model_from_ldm(cls, checkpoint)
    create_diffusers_t5_model_from_checkpoint(cls, checkpoint)
diffusers.loaders.single_file_model
    FromOriginalModelMixin.from_single_file(pretrained_model_link_or_path_or_dict)
    SINGLE_FILE_LOADABLE_CLASSES
    init_empty_weights
    load_model_dict_into_meta(model, state_dict, dtype, hf_quantizer, device_map, unexpected_keys)
    dispatch_model(model, device_map)
    [0.36-] _determine_device_map(model, device_map, max_memory)
    _get_mapping_function_kwargs(mapping_fn)
    call _get_single_file_loadable_mapping_class(cls)
    _should_convert_state_dict_to_diffusers(model_state_dict, checkpoint_state_dict)
diffusers.loaders.single_file_utils
    DIFFUSERS_DEFAULT_PIPELINE_PATHS
    call infer_diffusers_model_type(checkpoint)
    init_empty_weights
    load_model_dict_into_meta(model, state_dict, dtype, hf_quantizer, device_map, unexpected_keys)
    load_state_dict(checkpoint_file)
diffusers.loaders.peft
    PeftAdapterMixin.load_lora_adapter
    PeftAdapterMixin.add_adapter
diffusers.models.modeling_utils
    ModelMixin.from_pretrained(pretrained_model_name_or_path)
    ModelMixin.save_pretrained
    ModelMixin.to
    call ModelMixin._fix_state_dict_keys_on_load(self, state_dict)
    ModelMixin._load_pretrained_model(model, state_dict, resolved_model_file, hf_quantizer, dtype,
        keep_in_fp32_modules, device_map, offload_folder)
    ModelMixin._set_default_torch_dtype(dtype)
    _determine_device_map(model, device_map, max_memory)
    dispatch_model(model, device_map, skip_keys)
    load_state_dict(checkpoint_file)
    call no_init_weights
late diffusers.pipelines.pipeline_loading_utils
    ALL_IMPORTABLE_CLASSES
    dispatch_model
    call get_class_obj_and_candidates(library_name, class_name, importable_classes, pipelines,
        is_pipeline_module, component_name, cache_dir)
    remove_hook_from_module
    [0.40-] call _load_empty_model(library_name, class_name, importable_classes, pipelines,
        is_pipeline_module, name, dtype, cached_folder)
    [-0.39] call _load_empty_model(library_name, class_name, importable_classes, pipelines,
        is_pipeline_module, name, torch_dtype, cached_folder)
late diffusers.pipelines.pipeline_utils
    DiffusionPipeline.from_pretrained(pretrained_model_name_or_path)
    SUPPORTED_DEVICE_MAP
    load_sub_model(device_map, max_memory, offload_folder, name)
    _get_final_device_map(device_map, pipeline_class, passed_class_obj, init_dict)
diffusers.quantizers.auto
    call DiffusersAutoQuantizer.from_dict(quantization_config_dict)
diffusers.quantizers.bitsandbytes.bnb_quantizer
    BnB4BitDiffusersQuantizer.validate_environment
    BnB4BitDiffusersQuantizer.update_device_map(self, device_map)
    BnB4BitDiffusersQuantizer.adjust_target_dtype(self, target_dtype)
    BnB4BitDiffusersQuantizer.adjust_max_memory(self, max_memory)
    BnB4BitDiffusersQuantizer._process_model_before_weight_loading(self, model, device_map)
    BnB8BitDiffusersQuantizer.validate_environment
    BnB8BitDiffusersQuantizer.update_device_map(self, device_map)
    BnB8BitDiffusersQuantizer.adjust_target_dtype(self, target_dtype)
    BnB8BitDiffusersQuantizer.adjust_max_memory(self, max_memory)
    BnB8BitDiffusersQuantizer._process_model_before_weight_loading(self, model, device_map)
with gguf diffusers.quantizers.gguf.utils
    call GGUFParameter.__new__(cls, data, requires_grad, quant_type)
diffusers.utils.torch_utils
    call get_device
accelerate
    init_empty_weights
accelerate.big_modeling
    dispatch_model(model, device_map, offload_dir, offload_index, skip_keys)
accelerate.utils
    call get_balanced_memory(model, max_memory, no_split_module_classes, low_zero)
    call get_max_memory(max_memory)
    call infer_auto_device_map(model, max_memory, no_split_module_classes, special_dtypes)
""",
)
