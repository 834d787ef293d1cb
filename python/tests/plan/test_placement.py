"""Tests device maps with nested paths, tensors apart from their module, and GGUF blocks on disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch as safetensors_torch
import torch

import loadstone
import loadstone.accelerate
import loadstone.diffusers
import loadstone.transformers
from loadstone._model.walk import walk
from loadstone._plan.placement import expanded, gathered, require_device, require_paths

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from diffusers_gguf import BLOCK_CASES, File, Kind, mixed, quantization  # noqa: E402  # noqa: E402
from diffusers_models import Case, by_name, write_single_file  # noqa: E402


class Block(torch.nn.Module):
    """Two layers and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.first = torch.nn.Linear(3, 3)
        self.act = torch.nn.ReLU()
        self.second = torch.nn.Linear(3, 3)


def tower() -> torch.nn.Module:
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.ones(1))
    model.blocks = torch.nn.ModuleList([Block(), Block()])
    model.head = torch.nn.Linear(3, 3)
    return model


# --- maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"": "cpu"}, {"": "cpu"}),
        ({"blocks": "cpu", "head": "disk"}, {"blocks": "cpu", "head": "disk"}),
        (
            {"": "cpu", "blocks.1": "disk"},
            {"scale": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"},
        ),
        (
            {"": "disk", "blocks.0": "cpu", "head": "cpu"},
            {"scale": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"},
        ),
        (
            {"": "cuda:1", "blocks.1": "disk", "head": "cpu"},
            {"scale": "cuda:1", "blocks.0": "cuda:1", "blocks.1": "disk", "head": "cpu"},
        ),
        (
            {"blocks": "disk", "blocks.1.first": "cpu", "head": 0},
            {
                "blocks.0": "disk", "blocks.1.table": 0, "blocks.1.mean": 0,
                "blocks.1.first": "cpu", "blocks.1.second": "disk", "head": 0,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_paths_inside_one_another(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert expanded(tower(), given) == wanted


def test_tensors_apart_from_their_module() -> None:
    """``gathered`` puts a split layer on disk whole, and keeps a block's own tensors in memory."""
    given = {
        "scale": "cpu", "blocks.0": "cpu", "blocks.1.table": "disk", "blocks.1.mean": "disk",
        "blocks.1.first.weight": "cpu", "blocks.1.first.bias": "disk", "blocks.1.second": "disk",
        "head": "disk",
    }  # fmt: skip
    assert gathered(tower(), given) == {
        "scale": "cpu", "blocks.0": "cpu", "blocks.1.table": "cpu", "blocks.1.mean": "cpu",
        "blocks.1.first": "disk", "blocks.1.second": "disk", "head": "disk",
    }  # fmt: skip
    whole = {"scale": "cpu", "blocks": "cpu", "head.weight": "cpu", "head.bias": "cpu"}
    assert gathered(tower(), whole) == whole


def test_paths_of_nothing_and_places_that_are_none() -> None:
    require_paths(tower(), {"": "cpu", "blocks.1.first.bias": "cpu", "blocks.0.mean": "cpu"})
    with pytest.raises(loadstone.PlanError, match=r"unet\.bloks\.1.*'blocks\.1'") as raised:
        require_paths(tower(), {"bloks.1": "disk"}, "unet")
    assert raised.value.code == "plan.device_map"
    for device in ("cpu", "disk", "cuda:3", 0, torch.device("cpu")):
        require_device(device, "unet")
    for device in ("dsik", None, 1.5):
        with pytest.raises(loadstone.PlanError, match="'unet'"):
            require_device(device, "unet")


def test_a_mistyped_module_is_an_error_and_one_without_tensors_is_not(tmp_path: Path) -> None:
    safetensors_torch.save_file(tower().state_dict(), tmp_path / "model.safetensors")

    def planned(device_map: dict[str, str]) -> loadstone.Plan:
        return loadstone.plan(tower(), tmp_path, device_map=device_map)

    with pytest.raises(loadstone.PlanError, match=r"'bloks\.1' is not a module") as raised:
        planned({"": "cpu", "bloks.1": "cpu"}).require_ok()
    assert raised.value.code == "plan.device_map"
    planned({"": "cpu", "blocks.0.act": "cpu", "blocks.1": "cpu"}).require_ok()

    # accelerate ignores unknown paths, and so does its adapter.
    given = {"": "cpu", "bloks.1": "cpu"}
    accelerate.load_checkpoint_in_model(tower(), tmp_path, device_map=given)
    loadstone.accelerate.load_checkpoint_in_model(tower(), tmp_path, device_map=given)


# --- the libraries' models -----------------------------------------------------------------------

# A map, a tensor that it puts on disk, and one that it keeps in memory.
MAPS: list[tuple[dict[str, Any], str, str]] = [
    ({"": "cpu", "encoder.layers.1": "disk"}, "layers.1.mlp.fc1", "layers.0.mlp.fc1"),
    ({"": "disk", "encoder.layers.1": "cpu"}, "layers.0.mlp.fc1", "layers.1.mlp.fc1"),
    (
        {"": "disk", "encoder.layers.0": "cpu", "encoder.layers.0.mlp": "disk"},
        "layers.0.mlp.fc1",
        "layers.0.self_attn.q_proj",
    ),
]


def text_encoder() -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.CLIPTextModel(config).eval()


def by_transformers(folder: Path, device_map: dict[str, Any]) -> Any:
    return loadstone.transformers.from_pretrained(
        transformers.CLIPTextModel, folder, device_map=device_map, offload_folder=folder / "off"
    )


def by_accelerate(folder: Path, device_map: dict[str, Any]) -> Any:
    with loadstone.skeleton():
        model = transformers.CLIPTextModel(text_encoder().config).eval()
    return loadstone.accelerate.load_checkpoint_and_dispatch(
        model, folder, device_map=device_map, offload_folder=folder / "off"
    )


@pytest.mark.parametrize("load", [by_transformers, by_accelerate])
@pytest.mark.parametrize(("device_map", "on_disk", "in_memory"), MAPS, ids=["one", "rest", "deep"])
def test_a_text_encoder(
    tmp_path: Path,
    device_map: dict[str, Any],
    on_disk: str,
    in_memory: str,
    load: Callable[[Path, dict[str, Any]], Any],
) -> None:
    model = text_encoder()
    model.save_pretrained(tmp_path)
    found = load(tmp_path, dict(device_map))
    assert loadstone.audit(found).ok
    on_meta = {slot.name for slot in walk(found) if slot.tensor.is_meta}
    assert f"encoder.{on_disk}.weight" in on_meta
    assert f"encoder.{in_memory}.weight" not in on_meta
    words = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(found(words).last_hidden_state, model(words).last_hidden_state)


def test_the_libraries_cannot_dispatch_them(tmp_path: Path) -> None:
    text_encoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="on the meta device"):
        transformers.CLIPTextModel.from_pretrained(
            tmp_path, device_map=dict(MAPS[0][0]), offload_folder=tmp_path / "off"
        )


def wan_inputs(dtype: torch.dtype = torch.float32, text: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(1, 16, 1, 4, 4, generator=generator).to(dtype),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 4, text, generator=generator).to(dtype),
    }


def outputs(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(**inputs).sample
    return made


WAN_MAPS = [
    {"": "cpu", "blocks.1": "disk"},
    {"": "disk", "blocks.0.attn1": "cpu"},
    {"": "disk"},
    "disk",
]


def of_diffusers(kind: str, case: Case, model: Any, tmp_path: Path, **options: Any) -> Any:
    """Load the model through a file, or through its folder."""
    if kind == "file":
        file, config = write_single_file(case, model, tmp_path / "model.safetensors")
        return loadstone.diffusers.from_single_file(case.cls, file, config=config, **options)
    model.save_pretrained(tmp_path / "model")
    return loadstone.diffusers.from_pretrained(case.cls, tmp_path / "model", **options)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("device_map", WAN_MAPS, ids=str)
def test_a_model_of_diffusers(tmp_path: Path, device_map: Any, kind: str) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    found = of_diffusers(kind, case, model, tmp_path, **options)
    assert loadstone.audit(found).ok
    on_meta = {slot.name for slot in walk(found) if slot.tensor.is_meta}
    inner = {name for name in model.state_dict() if name.startswith("blocks.1.")}
    assert inner <= on_meta
    assert (on_meta == set(model.state_dict())) == (device_map in ("disk", {"": "disk"}))
    for _ in range(2):
        assert torch.equal(outputs(found, **wan_inputs()), outputs(model, **wan_inputs()))
        assert {slot.name for slot in walk(found) if slot.tensor.is_meta} == on_meta


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_memory_for_a_part_of_a_model(tmp_path: Path, kind: str) -> None:
    """A map computed for the limit puts some modules on disk."""
    case = by_name("wan_t2v")
    model = case.build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    options: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": int(size * 0.8)}}
    options["offload_folder"] = tmp_path / "offload"
    found = of_diffusers(kind, case, model, tmp_path, **options)
    assert set(found.hf_device_map.values()) == {"cpu", "disk"}
    held = sum(value.nbytes for value in found.parameters() if not value.is_meta)
    assert 0 < held <= size * 0.8
    assert loadstone.audit(found).ok
    assert torch.equal(outputs(found, **wan_inputs()), outputs(model, **wan_inputs()))


def test_a_wrong_path_of_a_model(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    file, config = write_single_file(case, case.build(), tmp_path / "model.safetensors")
    for places in ({"": "cpu", "block.1": "disk"}, {"": "cpu", "blocks.2": "disk"}):
        with pytest.raises(loadstone.PlanError, match="no module or tensor of this path") as raised:
            loadstone.diffusers.from_single_file(case.cls, file, config=config, device_map=places)
        assert raised.value.code == "plan.device_map"


# --- blocks on disk ------------------------------------------------------------------------------

BLOCKS: list[Callable[[int], Any]] = [lambda _: Kind.Q8_0, lambda _: Kind.Q6_K, mixed]
BLOCK_INPUTS = wan_inputs(torch.bfloat16, text=256)


@pytest.mark.parametrize("choose", BLOCKS, ids=["q8_0", "q6_k", "mixed"])
@pytest.mark.parametrize("device_map", WAN_MAPS[:3], ids=str)
def test_blocks_on_disk(tmp_path: Path, choose: Any, device_map: dict[str, Any]) -> None:
    file = File(tmp_path, BLOCK_CASES[0], choose)
    whole = file.load(quantization_config=quantization())
    found = file.load(
        quantization_config=quantization(), device_map=device_map, offload_folder=tmp_path / "off"
    )
    assert loadstone.audit(found).ok
    packed = {slot.name: slot for slot in walk(whole) if hasattr(slot.tensor, "quant_type")}
    on_meta = {slot.name: slot.tensor for slot in walk(found) if slot.tensor.is_meta}
    assert packed.keys() & on_meta.keys() >= {"blocks.1.ffn.net.0.proj.weight"}
    for name in packed.keys() & on_meta.keys():
        assert on_meta[name].quant_type == packed[name].tensor.quant_type
    wanted = outputs(whole, **BLOCK_INPUTS)
    for _ in range(3):
        assert torch.equal(outputs(found, **BLOCK_INPUTS), wanted)
        assert {slot.name for slot in walk(found) if slot.tensor.is_meta} == on_meta.keys()


def test_blocks_on_disk_are_given_back_after_the_forward_pass(tmp_path: Path) -> None:
    file = File(tmp_path, BLOCK_CASES[0], mixed)
    found = file.load(
        quantization_config=quantization(),
        device_map={"": "cpu", "blocks.1": "disk"},
        offload_folder=tmp_path / "off",
    )
    brought: dict[str, Any] = {}
    whole = file.load(quantization_config=quantization()).state_dict()
    names = [name for name, value in whole.items() if hasattr(value, "quant_type")]
    for name in names:
        module = found.get_submodule(name.removesuffix(".weight"))
        library = type(module).forward

        def seen(
            *inputs: Any, _name: str = name, _module: Any = module, _run: Any = library
        ) -> Any:
            data = _module.weight.as_tensor()
            assert torch.equal(data, whole[_name].as_tensor())
            assert _module.weight.quant_type == whole[_name].quant_type
            brought[_name] = weakref.ref(_module.weight)
            return _run(_module, *inputs)

        module._old_forward = seen
    with torch.no_grad():
        found(**BLOCK_INPUTS)
    assert brought.keys() == set(names)
    alive = {name for name, seen_once in brought.items() if seen_once() is not None}
    assert alive == {name for name in names if not name.startswith("blocks.1.")}


def test_hooks_lose_the_format_of_the_librarys_own_class(tmp_path: Path) -> None:
    """accelerate's hooks lose the GGUF type of diffusers' parameters, so loadstone has its own."""
    from accelerate.utils import set_module_tensor_to_device

    file = File(tmp_path, BLOCK_CASES[0], mixed)
    found = file.load(quantization_config=quantization())
    layer = found.blocks[1].ffn.net[2]
    with pytest.raises(KeyError):
        set_module_tensor_to_device(layer, "weight", "cpu", value=layer.weight.as_tensor())
