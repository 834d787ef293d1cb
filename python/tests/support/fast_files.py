"""Lists the test files of `make test-fast`: quick ones that cover every part of the package.

conftest.py marks the tests of these files `fast`. The files were chosen by measured durations: a
file of more than ten seconds is listed only if its library has no quicker one. test_checklists.py
checks that the list covers every adapter.
"""

FAST = (
    "cli/test_cli_help",
    "cli/test_cli_merge",
    "cli/test_cli_status",
    "cli/test_cli_voice",
    "adapters/accelerate/test_accelerate_patch",
    "execute/test_audit",
    "adapters/bitsandbytes/test_bitsandbytes_weight",
    "convert/test_casts",
    "project/test_checklists",
    "plan/test_codec_rules",
    "convert/test_convert_quantize",
    "files/test_dcp",
    "plan/test_decisions",
    "convert/test_decode",
    "plan/test_defaults",
    "adapters/diffusers/test_diffusers_missing",
    "project/test_docs",
    "plan/test_extra_state",
    "adapters/test_extras",
    "adapters/llama_cpp/test_llama_cpp",
    "execute/test_load",
    "plan/test_load_hooks",
    "project/test_map",
    "convert/test_merge",
    "execute/test_merge_load",
    "adapters/peft/test_merge_load_adapters",
    "adapters/modelopt/test_modelopt_patch",
    "files/test_names",
    "adapters/accelerate/test_offload_layout",
    "adapters/test_patch",
    "files/test_receipt",
    "adapters/serving/test_sglang",
    "skeleton/test_skeleton",
    "plan/test_strict",
    "files/test_torch_files",
    "tracing/test_tracing",
    "adapters/transformers/test_transformers_files",
    "adapters/transformers/test_transformers_rules",
    "adapters/serving/test_vllm",
)
