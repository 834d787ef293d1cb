"""Patch sites of bitsandbytes."""

from loadstone._adapters.sites import Sites

SITES = Sites(
    "bitsandbytes",
    "0.50",
    """
bitsandbytes
    call matmul(A, B, out, state, threshold, bias)
bitsandbytes.functional
    call QuantState(absmax, shape, code, blocksize, quant_type, dtype, offset, state2)
    call create_dynamic_map(signed, max_exponent_bits, total_bits)
    dequantize_4bit(A, quant_state, absmax, out, blocksize, quant_type)
    call dequantize_blockwise(A, quant_state)
    call get_4bit_type(typename, device)
    call _convert_weight_packed_for_cpu(qweight, quant_state)
    call _convert_weight_packed_for_cpu_inverse(packed_weight, quant_state)
bitsandbytes.nn
    inherited Embedding4bit._apply
    Embedding4bit._save_to_state_dict
    Embedding4bit.forward
    inherited Embedding8bit._apply
    Embedding8bit._save_to_state_dict
    Embedding8bit.forward
    call Int8Params(data, requires_grad, has_fp16_weights, CB, SCB)
    Int8Params.__deepcopy__
    Int8Params.cpu
    Int8Params.cuda
    inherited Int8Params.detach
    Int8Params.to
    Int8Params.xpu
    call Linear4bit(input_features, output_features, bias, compute_dtype, compress_statistics,
        quant_type, quant_storage, device)
    inherited Linear4bit._apply
    Linear4bit._save_to_state_dict
    Linear4bit.forward
    call Linear8bitLt(input_features, output_features, bias, has_fp16_weights, threshold, device)
    inherited Linear8bitLt._apply
    Linear8bitLt._save_to_state_dict
    Linear8bitLt.forward
    call Params4bit(data, requires_grad, quant_state, blocksize, compress_statistics, quant_type,
        quant_storage, module, bnb_quantized)
    Params4bit.__deepcopy__
    Params4bit.cpu
    Params4bit.cuda
    inherited Params4bit.detach
    Params4bit.to
    Params4bit.xpu
bitsandbytes.nn.modules
    call fix_4bit_weight_quant_state_from_module(module)
""",
    first="0.50",
)
