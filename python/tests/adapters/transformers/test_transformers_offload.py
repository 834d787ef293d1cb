"""Tests transformers models with layers on disk, run with accelerate's hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_state, library_load
from offload_folders import written
from pairs import pairs
from safetensors.torch import load_file, save_file
from transformers_models import by_name, write_checkpoint

import loadstone

pytest.importorskip("transformers")
ours = loadstone.transformers.from_pretrained
TOKENS = torch.arange(12).reshape(2, 6)


def disk_map(model: torch.nn.Module) -> dict[str, str]:
    """Return a device map with every layer on disk, and all other modules on the CPU."""
    places = {name: "cpu" for name, _ in model.named_parameters()}
    inner = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    layers = {f"model.layers.{index}": "disk" for index in range(len(model.model.layers))}
    assert places
    return {**inner, **layers, "lm_head": "cpu"}


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", ["mixtral", "llama", "qwen3_moe", "qwen2_moe"])
def test_layers_on_disk_run_as_on_the_cpu(name: str, tmp_path: Path):
    case = by_name(name)
    folder = write_checkpoint(case, tmp_path / "model", "public")
    in_memory_model = ours(case.cls, folder)
    places = disk_map(in_memory_model)
    model = ours(case.cls, folder, device_map=places, offload_folder=str(tmp_path / "offload"))
    assert model.model.layers[0].self_attn.o_proj.weight.is_meta
    assert torch.equal(outputs(model), outputs(in_memory_model))
    audit = loadstone.audit(model)
    assert audit.ok, str(audit)
    assert set(audit.not_held.values()) == {"offloaded"}
    names = written(tmp_path / "offload")
    if name == "llama":
        assert not names  # without conversions, the values are read from the checkpoint
    else:  # only the fused experts are written
        assert names
        assert all(".experts." in name for name in names), names


def test_state_equals_the_librarys(tmp_path: Path):
    case = by_name("mixtral")
    folder = write_checkpoint(case, tmp_path / "model", "public")
    places = disk_map(case.build())
    library = library_load(
        case.cls, folder, device_map=places, offload_folder=str(tmp_path / "theirs")
    )
    model, info = ours(
        case.cls, folder, device_map=places, offload_folder=str(tmp_path / "ours"),
        output_loading_info=True,
    )  # fmt: skip
    assert_same_state(model, library.model, info, library.info)
    assert torch.equal(outputs(model), outputs(library.model))


def test_a_cast_on_disk_needs_no_folder(tmp_path: Path):
    case = by_name("llama")
    folder = write_checkpoint(case, tmp_path / "model", "public")
    places = disk_map(case.build())
    model = ours(case.cls, folder, device_map=places, dtype=torch.float32)
    assert torch.equal(outputs(model), outputs(ours(case.cls, folder, dtype=torch.float32)))


def test_fused_experts_on_disk_need_a_folder(tmp_path: Path):
    case = by_name("mixtral")
    folder = write_checkpoint(case, tmp_path / "model", "public")
    with pytest.raises(loadstone.PlanError, match="offload_folder"):
        ours(case.cls, folder, device_map=disk_map(case.build()))


@pytest.mark.parametrize("name", ["mixtral", "llama", "t5"])
def test_twice_the_memory_allowed(name: str, tmp_path: Path):
    """In the computed map, half of the model fits into memory; the other half goes to disk."""
    case = by_name(name)
    folder = write_checkpoint(case, tmp_path / "model", "public")
    in_memory_model = ours(case.cls, folder)
    size = sum(parameter.nbytes for parameter in in_memory_model.parameters())
    options = {"device_map": "auto", "max_memory": {"cpu": size // 2}}
    library = library_load(case.cls, folder, offload_folder=str(tmp_path / "theirs"), **options)
    model = ours(case.cls, folder, offload_folder=str(tmp_path / "offload"), **options)
    assert model.hf_device_map == library.model.hf_device_map
    assert "disk" in model.hf_device_map.values()
    in_memory = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    assert in_memory <= size // 2
    inputs = {"decoder_input_ids": TOKENS} if name == "t5" else {}
    with torch.no_grad():
        logits = model(TOKENS, **inputs).logits
        assert torch.equal(logits, in_memory_model(TOKENS, **inputs).logits)
    assert loadstone.audit(model).ok


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}])
@pytest.mark.parametrize("is_patched", [False, True])
def test_limits_of_a_load_whose_map_is_not_computed(
    device_map: object, is_patched: bool, tmp_path: Path
):
    case = by_name("llama")
    folder = write_checkpoint(case, tmp_path / "model", "public")

    def loaded(limit: object) -> torch.nn.Module:
        options = {"device_map": device_map, "max_memory": {"cpu": limit}}
        if not is_patched:
            return ours(case.cls, folder, **options)
        with loadstone.patch("transformers"):
            return case.cls.from_pretrained(folder, **options)

    with pytest.raises(loadstone.PlanError, match=r"its limit is 1\.0 kB") as caught:
        loaded(1000)
    assert caught.value.code == "plan.over_budget"
    assert loadstone.audit(loaded("1GiB")).ok


EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def tied(folder: Path, saved_as: str) -> Path:
    """Write a Llama with a tied embedding, whose file has one of the tie's names, or both."""
    torch.manual_seed(0)
    model = by_name("llama").build()
    config = model.config
    config.tie_word_embeddings = True
    model = type(model)(config)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    value = state.pop(f"{EMBEDDING}.weight")
    if saved_as != "head":
        state[f"{EMBEDDING}.weight"] = value
    if saved_as != "embedding":
        state[f"{HEAD}.weight"] = value * 2 if saved_as == "different" else value.clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def load_tied(door: str, folder: Path, on_disk: tuple[str, ...], **options: Any) -> Any:
    cls = by_name("llama").cls
    inner = ("embed_tokens", "layers", "norm", "rotary_emb")
    places = dict.fromkeys([*(f"model.{name}" for name in inner), HEAD], "cpu")
    places |= dict.fromkeys(on_disk, "disk")
    if door == "direct":
        return ours(cls, folder, device_map=places, **options)
    with loadstone.patch("transformers"):
        return cls.from_pretrained(folder, device_map=places, **options)


@pytest.mark.parametrize(
    ("on_disk", "saved_as", "door"),
    pairs(
        [
            (EMBEDDING,),
            (HEAD,),
            (EMBEDDING, HEAD),
            (EMBEDDING, "model.layers"),
            (HEAD, "model.norm"),
        ],
        ["embedding", "head", "both", "different"],
        ["direct", "patch"],
    ),
)
def test_ties_wherever_their_modules_are(
    on_disk: tuple[str, ...], saved_as: str, door: str, tmp_path: Path
):
    folder = tied(tmp_path / "model", saved_as)
    in_memory_model = ours(by_name("llama").cls, folder)
    model = load_tied(door, folder, on_disk, offload_folder=str(tmp_path / "offload"))
    for _ in range(2):
        assert loadstone.audit(model).ok
        assert torch.equal(outputs(model), outputs(in_memory_model))


@pytest.mark.parametrize("rule", ["keep_tied_in_memory", "add_tensor"])
def test_a_tie_that_is_not_completed_is_found(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from loadstone._adapters.transformers import load

    folder = tied(tmp_path / "model", "embedding")
    monkeypatch.setattr(load, rule, lambda *arguments: None)
    with pytest.raises((KeyError, ValueError)):
        outputs(load_tied("direct", folder, (EMBEDDING,), offload_folder=str(tmp_path / "offload")))


@pytest.mark.parametrize("module", [EMBEDDING, HEAD])
def test_a_tie_with_a_module_on_disk_needs_a_folder(module: str, tmp_path: Path):
    folder = tied(tmp_path / "model", "embedding")
    with pytest.raises(loadstone.PlanError, match=f"{module}.weight") as caught:
        load_tied("direct", folder, (module,))
    assert caught.value.code == "plan.offload_folder"


def test_an_offloaded_model_can_be_saved_again(tmp_path: Path):
    case = by_name("mixtral")
    folder = write_checkpoint(case, tmp_path / "model", "public")
    model = ours(
        case.cls, folder, device_map=disk_map(case.build()), offload_folder=str(tmp_path / "off")
    )
    model.save_pretrained(tmp_path / "again")
    assert_same_state(
        case.cls.from_pretrained(tmp_path / "again"), ours(case.cls, tmp_path / "again"), None, None
    )
    again, first = ours(case.cls, tmp_path / "again"), ours(case.cls, folder)
    for key, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
