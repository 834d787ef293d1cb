"""A merge that changes one name of a tie, for every class of transformers that ties an embedding:
the other name keeps its value, or the merge is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import loadstone

ROWS, WIDTH = 64, 16


def classes() -> dict[str, tuple[str, str]]:
    """Classes with their head and the embedding that it is tied to."""
    found = {}
    for name in dir(transformers):
        cls = getattr(transformers, name, None)
        if not inspect.isclass(cls) or not issubclass(cls, transformers.PreTrainedModel):
            continue
        ties = getattr(cls, "_tied_weights_keys", None)
        for head, root in (ties if isinstance(ties, dict) else {}).items():
            if head.endswith("weight") and "embed" in root and "embed" not in head:
                found[name] = (head, root.removesuffix("$"))
    return found


CLASSES = classes()
# Without a tie nothing is refused and nothing is split.
CONFIGS = {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}


def write(folder: Path, name: str, root: str, config: dict[str, object]) -> torch.Tensor:
    """A checkpoint that holds the embedding alone, and an adapter of it."""
    embedding = torch.randn(ROWS, WIDTH)
    save_file({root: embedding}, folder / "model.safetensors")
    fields = {"architectures": [name], "vocab_size": ROWS, **config}
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


@pytest.mark.parametrize("declared", CONFIGS)
@pytest.mark.parametrize("name", CLASSES)
def test_the_head_keeps_its_value_or_the_merge_is_refused(
    name: str, declared: str, tmp_path: Path
) -> None:
    head, root = CLASSES[name]
    embedding = write(tmp_path, name, root, CONFIGS[declared])
    try:
        loadstone.merge(tmp_path, tmp_path / "out", lora=tmp_path / "adapter")
    except loadstone.Error as error:
        assert error.code == "merge.tie" and declared == "tied"
        assert root in str(error)
        return
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(merged[root], embedding)
    if declared == "tied":
        assert torch.equal(merged[head], embedding)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
    else:
        assert set(merged) == {root}


def test_most_heads_are_known(tmp_path: Path) -> None:
    """The control: of language models the head is written."""
    assert len(CLASSES) > 250
    assert CLASSES["LlamaForCausalLM"] == ("lm_head.weight", "model.embed_tokens.weight")
