"""Adapters that change one of two tied names, against the model that peft trains."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import write_peft
from pairs import pairs
from safetensors.torch import load_file, save_file
from tie_doors import DOORS, merged_numbers
from tied_models import CONFIG, EMBEDDING, HEAD, blank, llama
from transformers import LlamaForCausalLM

import loadstone

peft = pytest.importorskip("peft")

TOKENS = torch.arange(10)[None]

# Options of LoraConfig. The adapters "equal" and "equal products" change both names equally.
TRAINED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "equal": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "product": {"target_modules": ["q_proj", "embed_tokens"]},
    "product of the head": {"target_modules": ["q_proj", "lm_head"]},
    "equal products": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "neither": {"target_modules": ["q_proj"]},
}
SPLIT = TRAINED.keys() - {"equal", "equal products", "neither"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


MADE = tempfile.TemporaryDirectory(prefix="loadstone-ties-")


def trained(folder: Path, which: str) -> torch.Tensor:
    """Write a base and an adapter; return the logits of the trained model."""
    made, found = _trained(which)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return found


@functools.cache
def _trained(which: str) -> tuple[Path, torch.Tensor]:
    folder, model = Path(MADE.name, which), llama()
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **TRAINED[which])
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    wrapped.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder, logits(wrapped)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-4 * wanted.abs().max())


@pytest.mark.parametrize("which", TRAINED)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_the_result_is_the_trained_model(door: str, which: str, tmp_path: Path) -> None:
    wanted = trained(tmp_path, which)
    model = DOORS[door](tmp_path, "split")
    assert close(logits(model), wanted)
    is_split = which in SPLIT
    assert (model.lm_head.weight is model.model.embed_tokens.weight) != is_split
    assert model.config.tie_word_embeddings != is_split


@pytest.mark.parametrize("which", ["embedding", "head", "product", "product of the head"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_both_names_change_if_that_is_asked_for(door: str, which: str, tmp_path: Path) -> None:
    wanted = trained(tmp_path, which)
    model = DOORS[door](tmp_path, "keep")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    # Control: the comparison detects that this model differs from the trained one.
    assert not close(logits(model), wanted)


@pytest.mark.parametrize(
    ("door", "which", "tie"), pairs(list(DOORS), ["equal", "equal products"], ["split", "keep"])
)
@pytest.mark.filterwarnings("ignore")
def test_equal_changes_of_both_names_keep_the_tie(
    door: str, which: str, tie: str, tmp_path: Path
) -> None:
    wanted = trained(tmp_path, which)
    model = DOORS[door](tmp_path, tie)
    assert close(logits(model), wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("tie", ["split", "keep"])
def test_products_that_differ_in_one_element_are_two(tie: str, tmp_path: Path) -> None:
    trained(tmp_path, "equal products")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("lm_head.lora_B.weight"))
    tensors[name][-1, -1] += 1
    save_file(tensors, path)
    if tie == "keep":
        with pytest.raises(loadstone.Error, match="two products for one weight"):
            merged_numbers(tmp_path, tie)
        return
    model = merged_numbers(tmp_path, tie)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("which", ["product", "product of the head"])
def test_peft_merges_a_product_into_both_names(which: str, tmp_path: Path) -> None:
    """peft's merged model differs from the trained model; see docs/found-elsewhere.md."""
    wanted = trained(tmp_path, which)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert not close(logits(merged), wanted)
    assert close(logits(merged_numbers(tmp_path, "split")), wanted)


@pytest.mark.parametrize("which", ["embedding", "head"])
def test_peft_saves_the_same_tensors(which: str, tmp_path: Path) -> None:
    trained(tmp_path, which)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "peft")
    loadstone.merge(tmp_path / "base", tmp_path / "out", lora=tmp_path / "adapter")
    found, wanted = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "peft"))
    assert found.keys() == wanted.keys()
    for name in (EMBEDDING, HEAD):
        assert torch.equal(found[name], wanted[name])


def test_one_warning_names_both(tmp_path: Path) -> None:
    trained(tmp_path, "embedding")
    report = loadstone.merge(
        tmp_path / "base", tmp_path / "out", lora=tmp_path / "adapter", dry_run=True
    )
    found = [each for each in report.findings if each.code == "merge.tie"]
    assert len(found) == 1 and found[0].severity == "warning"
    assert EMBEDDING in found[0].message and HEAD in found[0].message
    done = run(
        "merge", tmp_path / "base", "--lora", tmp_path / "adapter", "-o", tmp_path / "o", "--strict"
    )
    assert done.returncode != 0 and "--tie keep" in done.stderr


def test_a_file_with_both_names(tmp_path: Path) -> None:
    wanted = trained(tmp_path, "embedding")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, path, {"format": "pt"})
    assert close(logits(merged_numbers(tmp_path, "split")), wanted)
    loadstone.merge(tmp_path / "base", tmp_path / "kept", lora=tmp_path / "adapter", tie="keep")
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    assert torch.equal(kept[EMBEDDING], kept[HEAD])
    assert not torch.equal(kept[EMBEDDING], tensors[EMBEDDING])


def test_two_values_are_refused_where_names_stay_tied(tmp_path: Path) -> None:
    trained(tmp_path, "both")
    with pytest.raises(
        loadstone.PlanError, match="already changed that tensor to different values"
    ):
        loadstone.merge(tmp_path / "base", tmp_path / "o", lora=tmp_path / "adapter", tie="keep")


def test_an_unknown_head_is_refused(tmp_path: Path) -> None:
    save_file({"text.tokens.weight": torch.ones(40, 16)}, tmp_path / "model.safetensors")
    config = {**CONFIG, "architectures": ["NewForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_peft(tmp_path / "a", {"text.tokens.weight": torch.zeros(40, 16)})
    with pytest.raises(loadstone.PlanError, match="whose name is unknown"):
        loadstone.merge(tmp_path, tmp_path / "o", lora=tmp_path / "a")
    loadstone.merge(tmp_path, tmp_path / "o", lora=tmp_path / "a", tie="keep")
    assert load_file(tmp_path / "o" / "model.safetensors")["text.tokens.weight"].sum() == 0
    # Control: without a tie the merge succeeds.
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    loadstone.merge(tmp_path, tmp_path / "p", lora=tmp_path / "a")


def test_configs_of_parts_are_untied_too(tmp_path: Path) -> None:
    name = "model.language_model.embed_tokens.weight"
    save_file({name: torch.ones(40, 16)}, tmp_path / "model.safetensors")
    config = {
        "architectures": ["NewForConditionalGeneration"],
        "text_config": {"vocab_size": 40, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_peft(tmp_path / "a", {name: torch.zeros(40, 16)})
    loadstone.merge(tmp_path, tmp_path / "o", lora=tmp_path / "a")
    written = json.loads((tmp_path / "o" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert written["text_config"] == {"vocab_size": 40, "tie_word_embeddings": False}
    tensors = load_file(tmp_path / "o" / "model.safetensors")
    assert tensors[name].sum() == 0 and tensors[HEAD].sum() == 40 * 16


def test_a_server_reads_the_config_of_the_base(tmp_path: Path) -> None:
    from loadstone._adapters.serving.converted import plan_conversion
    from loadstone._adapters.serving.options import ConversionOptions

    trained(tmp_path, "embedding")
    changes = ConversionOptions(lora={str(tmp_path / "adapter"): 1.0})
    with pytest.raises(loadstone.PlanError, match="config of the base") as caught:
        plan_conversion(str(tmp_path / "base"), changes)
    assert caught.value.code == "merge.tie"


# --- bases with both names ------------------------------------------------------------------------


def hold_both(folder: Path) -> torch.Tensor:
    """Store the embedding under both names; return it."""
    state = load_file(folder / "base" / "model.safetensors")
    state[HEAD] = state[EMBEDDING].clone()
    save_file(state, folder / "base" / "model.safetensors", {"format": "pt"})
    return state[EMBEDDING]


@pytest.mark.parametrize("which", ["product", "product of the head", "embedding", "head"])
@pytest.mark.parametrize("door", DOORS)
def test_keep_changes_both_names_that_a_base_holds(which: str, door: str, tmp_path: Path) -> None:
    trained(tmp_path, which)
    before = hold_both(tmp_path)
    model = DOORS[door](tmp_path, "keep")
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert torch.equal(embedding, head) and not torch.equal(embedding, before)


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_split_of_names_that_a_base_holds_stays(prefix: str, tmp_path: Path) -> None:
    """Both names stay separate, even with a prefix, and transformers does not tie them again."""
    trained(tmp_path, "product of the head")
    hold_both(tmp_path)
    path = tmp_path / "base" / "model.safetensors"
    renamed = {prefix + name: tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})
    model = llama(seed=8)
    loadstone.load(model, path, lora=tmp_path / "adapter", strip_prefix=prefix or ())
    head = model.lm_head.weight.detach().clone()
    assert not torch.equal(head, model.model.embed_tokens.weight)
    model.tie_weights()
    assert torch.equal(model.lm_head.weight, head)


@pytest.mark.parametrize(
    ("start", "name", "away"), pairs([blank, llama], [EMBEDDING, HEAD, ""], ["disk", "meta"])
)
def test_split_names_have_tensors_of_their_own_wherever_they_are(
    start: Callable[[], Any], name: str, away: str, tmp_path: Path
) -> None:
    trained(tmp_path, "product of the head")
    places = {"": "cpu", name.removesuffix(".weight"): away}
    model = start()
    loadstone.load(
        model,
        tmp_path / "base",
        lora=tmp_path / "adapter",
        device_map=places,
        offload_folder=tmp_path / "offload",
    )
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert embedding is not head
    assert [embedding.is_meta, head.is_meta] == [name in ("", EMBEDDING), name in ("", HEAD)]
    assert loadstone.audit(model).ok
