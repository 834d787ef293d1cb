"""Patch sites of accelerate."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "accelerate",
    "1.6 to 1.15",
    """
accelerate
    Accelerator.is_fsdp2
    Accelerator.prepare(args)
    load_checkpoint_and_dispatch(model, checkpoint, device_map, max_memory,
        no_split_module_classes, offload_folder, offload_buffers, dtype, offload_state_dict,
        skip_keys, preload_module_classes, force_hooks, strict)
    load_checkpoint_in_model
accelerate.big_modeling
    call dispatch_model(model, device_map, main_device, state_dict, offload_dir, offload_index,
        offload_buffers, skip_keys, preload_module_classes, force_hooks)
    load_checkpoint_and_dispatch
    load_checkpoint_in_model
accelerate.hooks
    AlignDevicesHook(execution_device, offload, weights_map, offload_buffers, place_submodules,
        tied_params_map)
    add_hook_to_module(module, hook, append)
    set_module_tensor_to_device(module, tensor_name, device)
accelerate.utils
    call find_tied_parameters(model)
    call get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero)
    call get_max_memory(max_memory)
    call infer_auto_device_map(model, max_memory, no_split_module_classes, dtype, offload_buffers)
    load_checkpoint_in_model
    call named_module_tensors(module, include_buffers, recurse, remove_non_persistent)
accelerate.utils.bnb
    load_checkpoint_in_model
accelerate.utils.modeling
    call check_tied_parameters_on_same_device(tied_params, device_map)
    load_checkpoint_in_model(model, checkpoint, device_map, offload_folder, dtype,
        offload_state_dict, offload_buffers, keep_in_fp32_modules, offload_8bit_bnb, strict)
    logger
""",
)
