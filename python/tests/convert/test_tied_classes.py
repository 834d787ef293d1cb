"""A merge that changes one name of a tie, for every transformers class that ties an embedding: the
other name keeps its value, or loadstone rejects the merge and names the embedding."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

import loadstone

ROWS, WIDTH = 64, 16
MEMBER = "tie_word_embeddings"


# Names of word embeddings, and similar names of other tensors.
WORDS = re.compile(r"(embed\w*|shared|wte|w|tokens_embed|embed_in)\.weight")
OTHERS = re.compile(r"bbox_embed|class_embed|patch_embed|audio_tokens|codec")


def classes() -> dict[str, tuple[str, str]]:
    """Return both names of a tied word embedding by class; a file may contain only the second."""
    found = {}
    for name in dir(transformers):
        cls = getattr(transformers, name, None)
        if not inspect.isclass(cls) or not issubclass(cls, transformers.PreTrainedModel):
            continue
        ties = getattr(cls, "_tied_weights_keys", None)
        for pair in (ties if isinstance(ties, dict) else {}).items():
            first, second = (each.removeprefix("^").removesuffix("$") for each in pair)
            if not WORDS.search(second):
                first, second = second, first
            if WORDS.search(second) and not OTHERS.search(first + second):
                found[f"{name} {first}"] = (first, second)
    return found


CLASSES = classes()
# Without a tie, nothing is rejected or split. Without the field, the model type's default applies.
CONFIGS = {"tied": {MEMBER: True}, "untied": {MEMBER: False}}


def type_of(name: str) -> str | None:
    """Return the model's type if it ties by default."""
    config = getattr(transformers, name.split()[0]).config_class
    return config.model_type if getattr(config, MEMBER, False) else None


TYPES = Path(__file__).parents[3] / "src" / "convert" / "tied_head.cpp"


def write(folder: Path, name: str, root: str, config: dict[str, object]) -> torch.Tensor:
    """Write a checkpoint with only the embedding, and an adapter for it."""
    embedding = torch.randn(ROWS, WIDTH)
    save_file({root: embedding}, folder / "model.safetensors")
    fields = {"architectures": [name.split()[0]], "vocab_size": ROWS, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    module = f"base_model.model.{root.removesuffix('.weight')}"
    product = {
        f"{module}.lora_embedding_A": torch.randn(2, ROWS),
        f"{module}.lora_embedding_B": torch.randn(WIDTH, 2),
    }
    (folder / "adapter").mkdir()
    save_file(product, folder / "adapter" / "adapter_model.safetensors")
    declared = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["embed"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(declared))
    return embedding


@pytest.mark.parametrize(
    ("name", "declared"),
    [(name, declared) for name in CLASSES for declared in CONFIGS]
    + [(name, "by type") for name in CLASSES if type_of(name)],
)
def test_the_head_keeps_its_value_or_the_merge_is_refused(
    name: str, declared: str, tmp_path: Path
) -> None:
    head, root = CLASSES[name]
    config = {"model_type": type_of(name)} if declared == "by type" else CONFIGS[declared]
    embedding = write(tmp_path, name, root, config)
    try:
        loadstone.merge(tmp_path, tmp_path / "out", lora=tmp_path / "adapter")
    except loadstone.Error as error:
        assert error.code == "merge.tie" and declared != "untied"
        assert root in str(error)
        return
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(merged[root], embedding)
    if declared != "untied":
        assert torch.equal(merged[head], embedding)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
    else:
        assert set(merged) == {root}


def test_the_classes_are_those_of_the_library() -> None:
    """Control: the list has tied heads, and embeddings that an encoder and a decoder share."""
    assert len(CLASSES) > 350
    assert CLASSES["LlamaForCausalLM lm_head.weight"][1] == "model.embed_tokens.weight"
    assert CLASSES["T5Model encoder.embed_tokens.weight"][1] == "shared.weight"
    assert CLASSES["GPT2LMHeadModel lm_head.weight"][1] == "transformer.wte.weight"
    assert CLASSES["OpenAIGPTDoubleHeadsModel lm_head.weight"][1] == (
        "transformer.tokens_embed.weight"
    )


def test_the_table_has_the_types_that_the_library_ties() -> None:
    """save_pretrained() omits the field if it equals the default of the model's type."""
    tied = {name for name, cls in CONFIG_MAPPING.items() if getattr(cls, MEMBER, None) is True}
    text = TYPES.read_text().partition("tied_types =")[2].partition(";")[0]
    table = set("".join(re.findall(r'"([^"]*)"', text)).split())
    assert {"gemma", "gpt2", "whisper"} <= table and "llama" not in table
    assert table == tied
