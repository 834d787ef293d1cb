"""Adapters of libraries: a folder each, their patching, and the parts that they register."""

from loadstone import _core
from loadstone._base.adapters import Adapter, register

register(
    Adapter(
        "transformers",
        recipes="loadstone.transformers:trace",
        rules="loadstone._adapters.transformers.rule_export:export_rules",
        skeleton_builder="loadstone.transformers:skeleton_builder",
    ),
    Adapter(
        "diffusers",
        recipes="loadstone.diffusers:trace",
        skeleton_builder="loadstone.diffusers:skeleton_builder",
        tensor_classes=(
            "diffusers.quantizers.gguf.utils.GGUFParameter",
            "diffusers.quantizers.bfl.utils.BFLQuantizedParameter",
        ),
        gguf_rank_max=_core.GGUF_RANK_MOST,
    ),
    Adapter(
        "bitsandbytes",
        extend="loadstone._adapters.bitsandbytes.choosing:extend",
        quantizer="loadstone._adapters.bitsandbytes.choosing",
        is_supported="loadstone._adapters.sites:is_supported",
        components="loadstone._adapters.bitsandbytes.parameters:components_of",
        not_held="loadstone._adapters.bitsandbytes.accounts:reasons",
        tensor_classes=(
            "bitsandbytes.nn.modules.Params4bit",
            "bitsandbytes.nn.modules.Int8Params",
            "loadstone._adapters.bitsandbytes.parameters.Params4bit",
            "loadstone._adapters.bitsandbytes.parameters.Int8Params",
        ),
        filled_modules=("bitsandbytes.nn.modules",),
    ),
    Adapter("llama_cpp", gguf="loadstone._adapters.llama_cpp.model_folder:conversion"),
    Adapter(
        "modelopt",
        tensor_classes=(
            "modelopt.torch.quantization.qtensor.base_qtensor.QTensorWrapper",
            "loadstone._adapters.modelopt.experts.PackedExperts",
        ),
    ),
)
