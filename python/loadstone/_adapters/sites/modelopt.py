"""Patch sites of ModelOpt."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "modelopt",
    "0.46 and 0.47",
    """
modelopt.torch.export.quant_utils
    call get_activation_scaling_factor(module)
modelopt.torch.export.registry
    ExportModuleRegistry
modelopt.torch.export.unified_export_hf
    call _export_quantized_weight(sub_module, dtype, weight_name)
modelopt.torch.quantization
    call CompressConfig(compress, quant_gemm)
    call compress(model, config)
    call quantize(model, config)
modelopt.torch.quantization.nn
    TensorQuantizer.is_enabled
    TensorQuantizer.fake_quant
    TensorQuantizer.num_bits
    TensorQuantizer.axis
    TensorQuantizer.block_sizes
    TensorQuantizer.pre_quant_scale
    TensorQuantizer.rotate_is_enabled
    TensorQuantizer.is_mx_format
    TensorQuantizer.is_nvfp4_dynamic
    TensorQuantizer.dequantize
modelopt.torch.quantization.plugins.accelerate
    init_empty_weights
    call init_quantized_weights(quant_cfg, gpu_mem_percentage, quant_gemm)
    infer_auto_device_map(model, max_memory)
    load_checkpoint_and_dispatch(model, checkpoint, device_map)
modelopt.torch.quantization.plugins.huggingface
    _QuantFusedExperts._first_proj_attr
    _QuantFusedExperts._get_expert_idx_from_first_proj
    _QuantFusedExperts.iter_weights_for_calibration
modelopt.torch.quantization.qtensor
    FP8QTensor
    INT4QTensor
    INT8QTensor
    MXFP4QTensor
    MXFP8QTensor
    NVFP4QTensor
modelopt.torch.quantization.qtensor.base_qtensor
    call QTensorWrapper(qtensor, metadata)
accelerate
    call dispatch_model(model, device_map)
transformers
    AutoConfig.from_pretrained
    AutoModelForCausalLM.from_pretrained
    PretrainedConfig
    PreTrainedModel
""",
)
