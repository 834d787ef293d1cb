"""Library adapters, one folder each, and their registration."""

from loadstone._base.adapters import LibraryAdapter, register

register(
    LibraryAdapter("torch"),  # has no table of sites, because loadstone uses only public names
    LibraryAdapter(
        "transformers",
        is_patchable=True,
        recipes="loadstone.transformers:trace",
        rules="loadstone._adapters.transformers.rule_export:export_rules",
        check="loadstone._adapters.transformers.check:check",
        skeleton_builder="loadstone.transformers:skeleton_builder",
        tie_list="all_tied_weights_keys",
        tie_option="tie_word_embeddings",
    ),
    LibraryAdapter(
        "diffusers",
        is_patchable=True,
        recipes="loadstone.diffusers:trace",
        skeleton_builder="loadstone.diffusers:skeleton_builder",
        uninitialized="loadstone._adapters.saving:tensors_of_disk_groups",
        skipped_attributes=("_diffusers_hook",),
        tensor_classes=(
            "diffusers.quantizers.gguf.utils.GGUFParameter",
            "diffusers.quantizers.bfl.utils.BFLQuantizedParameter",
        ),
    ),
    LibraryAdapter(
        "accelerate",
        is_patchable=True,
        offloaded="loadstone._adapters.accelerate_hooks:offloaded_values",
        skipped_attributes=("_hf_hook",),
    ),
    LibraryAdapter(
        "bitsandbytes",
        is_patchable=True,
        extend="loadstone._adapters.bitsandbytes.selection:extend",
        quantized_layers="loadstone._adapters.bitsandbytes.selection",
        is_supported="loadstone._adapters.sites:is_supported",
        components="loadstone._adapters.bitsandbytes.parameters:components_of",
        not_held="loadstone._adapters.bitsandbytes.audit_reasons:reasons",
        tensor_classes=(
            "bitsandbytes.nn.modules.Params4bit",
            "bitsandbytes.nn.modules.Int8Params",
            "loadstone.bitsandbytes.Params4bit",
            "loadstone.bitsandbytes.Int8Params",
        ),
        filled_modules=("bitsandbytes.nn.modules",),
    ),
    LibraryAdapter(
        "modelopt",
        is_patchable=True,
        tensor_classes=(
            "modelopt.torch.quantization.qtensor.base_qtensor.QTensorWrapper",
            "loadstone.modelopt.PackedExperts",
        ),
    ),
    LibraryAdapter(
        "peft",
        is_patchable=True,
        wrapper_attributes=("base_layer", "original_module"),
    ),
    LibraryAdapter(
        "vllm",
        no_canary="a tiny load takes a server and minutes; `make test-vllm` runs one",
    ),
    # test_sglang.py checks SGLang's table of sites, and test_serving.py checks vLLM's.
    LibraryAdapter(
        "sglang",
        no_canary="even a tiny load needs a server and a GPU",
    ),
    LibraryAdapter(  # test_llama_cpp.py checks the table of sites
        "llama_cpp",
        no_canary="its converter is a folder that `--converter` names, and no package installs it",
        check="loadstone._adapters.llama_cpp.check:check",
        gguf="loadstone._adapters.llama_cpp.model_folder:conversion",
    ),
)
