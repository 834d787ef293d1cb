"""transformers models larger than the memory allowed: on disk, run with accelerate's hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import assert_same_state, library_load
from offload_folders import written
from transformers_models import by_name, write_checkpoint

import loadstone

pytest.importorskip("transformers")
ours = loadstone.transformers.from_pretrained
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def disk_map(model: torch.nn.Module) -> dict[str, str]:
    """Every layer on disk, the rest on the cpu."""
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
    whole = ours(case.cls, folder)
    places = disk_map(whole)
    model = ours(case.cls, folder, device_map=places, offload_folder=str(tmp_path / "offload"))
    assert model.model.layers[0].self_attn.o_proj.weight.is_meta
    assert torch.equal(outputs(model), outputs(whole))
    audit = loadstone.audit(model)
    assert audit.ok, str(audit)
    assert set(audit.not_held.values()) == {"offloaded"}
    names = written(tmp_path / "offload")
    if name == "llama":
        assert not names  # nothing changes: the checkpoint's own file is read
    else:  # fused experts, and nothing else
        assert names
        assert all(".experts." in each for each in names), names


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
    """A computed map: half of the model fits, the rest goes to disk."""
    case = by_name(name)
    folder = write_checkpoint(case, tmp_path / "model", "public")
    whole = ours(case.cls, folder)
    size = sum(parameter.nbytes for parameter in whole.parameters())
    options = {"device_map": "auto", "max_memory": {"cpu": size // 2}}
    library = library_load(case.cls, folder, offload_folder=str(tmp_path / "theirs"), **options)
    model = ours(case.cls, folder, offload_folder=str(tmp_path / "offload"), **options)
    assert model.hf_device_map == library.model.hf_device_map
    assert "disk" in model.hf_device_map.values()
    in_memory = sum(each.nbytes for each in model.parameters() if not each.is_meta)
    assert in_memory <= size // 2
    inputs = {"decoder_input_ids": TOKENS} if name == "t5" else {}
    with torch.no_grad():
        found = model(TOKENS, **inputs).logits
        assert torch.equal(found, whole(TOKENS, **inputs).logits)
    assert loadstone.audit(model).ok


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
