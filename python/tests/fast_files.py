"""The tests of `make test-fast`: what is quick and leaves no part of the package out.

One decision for all: conftest.py marks the tests of these files `fast`. They were chosen from
measured durations: a file of more than ten seconds is here only where a library has no quicker one.
test_checklists.py holds that every adapter is in one of them.
"""

FAST = (
    "cli/test_cli_help",
    "cli/test_cli_merge",
    "cli/test_cli_status",
    "cli/test_cli_voice",
    "test_accelerate_patch",
    "test_audit",
    "test_bitsandbytes_unit",
    "test_casts",
    "test_checklists",
    "test_codec_rules",
    "test_convert_quantize",
    "test_dcp",
    "test_decisions",
    "test_decode",
    "test_defaults",
    "test_diffusers_missing",
    "test_docs",
    "test_extra_state",
    "test_extras",
    "test_llama_cpp",
    "test_load",
    "test_load_hooks",
    "test_map",
    "test_merge",
    "test_merge_load",
    "test_merge_load_adapters",
    "test_modelopt_patch",
    "test_names",
    "test_offload_layout",
    "test_patch",
    "test_receipt",
    "test_sglang",
    "test_skeleton",
    "test_strict",
    "test_torch_files",
    "test_tracing",
    "test_transformers_files",
    "test_transformers_rules",
    "test_vllm",
)
