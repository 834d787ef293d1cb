"""Lists fields of PEFT's configs that do not affect merged values."""

from __future__ import annotations

import pytest

peft = pytest.importorskip("peft")


# Fields that only training uses, and lists of modules, which the file's tensors imply.
WITHOUT_INFLUENCE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "bias",
    "modules_to_save", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
