"""Tests diffusers models and pipelines whose weights bitsandbytes quantizes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from offload_folders import raw_value, written
from pairs import pairs

pytest.importorskip("bitsandbytes")
diffusers = pytest.importorskip("diffusers")

import bitsandbytes as bnb  # noqa: E402
import bitsandbytes_checkpoints  # noqa: E402
from bitsandbytes_checkpoints import raw  # noqa: E402
from diffusers.quantizers.bitsandbytes import bnb_quantizer  # noqa: E402
from diffusers_models import by_name, write_single_file  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers_models import by_name as encoder_by_name  # noqa: E402
from transformers_models import randomise_all  # noqa: E402

import loadstone  # noqa: E402
import loadstone.diffusers  # noqa: E402
from loadstone._model.walk import walk  # noqa: E402

QUANTIZERS = (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer)
KINDS: dict[str, dict[str, Any]] = {
    **{kind: bitsandbytes_checkpoints.KINDS[kind] for kind in ("nf4", "nf4 nested", "fp4")},
    "int8": {"load_in_8bit": True, "llm_int8_skip_modules": ["proj_out"]},
}
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": [4, 6, 6],
}  # diffusers' converter of Flux files requires this width
MAP = {"": "cpu", "blocks.1": "disk"}
ROWS = [*(("wan_t2v", kind) for kind in KINDS), ("flux", "nf4"), ("qwen_image", "int8")]


def config(kind: str, **changes: Any) -> Any:
    return diffusers.BitsAndBytesConfig(**KINDS[kind] | changes)


def plain(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    case = by_name(name)
    if name == "flux":
        case = dataclasses.replace(case, changes=case.changes | FLUX)
    case.build(dtype=dtype).save_pretrained(folder)
    return folder


def quantized(name: str, kind: str, folder: Path, shard: str = "10GB") -> Path:
    """Write a checkpoint that diffusers quantized with bitsandbytes and saved."""
    model = library(name, plain(name, folder / "plain"), quantization_config=config(kind))
    model.save_pretrained(folder / "quantized", max_shard_size=shard)
    return folder / "quantized"


def ours(name: str, folder: Path, **options: Any) -> Any:
    options.setdefault("torch_dtype", torch.bfloat16)
    return loadstone.diffusers.from_pretrained(by_name(name).cls, folder, **options)


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Let diffusers quantize on the CPU, by skipping its check for a GPU."""
    with contextlib.ExitStack() as stack:
        for owner in QUANTIZERS:
            for name, value in (
                ("validate_environment", lambda *_, **__: None),
                ("update_device_map", lambda _, places: places or {"": "cpu"}),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


def library(name: str, folder: Path, **options: Any) -> Any:
    options.setdefault("torch_dtype", torch.bfloat16)
    with without_checks():
        return by_name(name).cls.from_pretrained(folder, **options)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {slot.name: slot.tensor for slot in walk(model)}


def nested(name: str) -> bool:
    """Return true if the tensor depends on the mean of the scales, whose rounding varies."""
    places = ("quant_state.absmax", "quant_state.offset", "quant_state.state2.absmax")
    return name.endswith(places)


def assert_equal(found: Any, expected: Any, *, is_nested: bool = False) -> None:
    """Compare all tensors; ``is_nested`` skips those that depend on the mean of scales."""
    mine, theirs = tensors(found), tensors(expected)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert tensor.requires_grad == other.requires_grad, name
        if not (is_nested and nested(name)):
            assert torch.equal(raw(tensor), raw(other)), name
    for (path, one), (_, other_module) in zip(
        found.named_modules(), expected.named_modules(), strict=True
    ):
        assert type(one) is type(other_module), path
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method"):
        assert getattr(found, flag, None) == getattr(expected, flag, None), flag


def layers_of(model: torch.nn.Module) -> list[Any]:
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return [module for module in model.modules() if isinstance(module, kinds)]


def run(model: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    made = {
        "hidden_states": torch.randn(1, 16, 1, 4, 4, generator=draw).bfloat16(),
        "encoder_hidden_states": torch.randn(
            1, 5, model.config.text_dim, generator=draw
        ).bfloat16(),
        "timestep": torch.tensor([7]),
    }
    with torch.no_grad():
        result: torch.Tensor = model(**made, return_dict=False)[0]
    return result


SCALES = {
    "nf4": "blocks.1.ffn.net.2.weight.quant_state.absmax",
    "int8": "blocks.1.ffn.net.2.weight.SCB",
}

# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_a_model_is_as_bitsandbytes_quantizes_it(name: str, kind: str, tmp_path: Path) -> None:
    folder = plain(name, tmp_path)
    model = ours(name, folder, quantization_config=config(kind))
    expected = library(name, folder, quantization_config=config(kind))
    assert len(layers_of(model)) == len(layers_of(expected)) > 5
    assert_equal(model, expected, is_nested=kind == "nf4 nested")
    loadstone.audit(model).require_real()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_numbers_are_cast_before_they_are_quantized(
    dtype: torch.dtype | None, kind: str, tmp_path: Path
) -> None:
    """Without a dtype, diffusers casts to float16 before it quantizes."""
    folder = plain("wan_t2v", tmp_path, torch.float32)
    options = {"quantization_config": config(kind), "torch_dtype": dtype}
    model = ours("wan_t2v", folder, **options)
    assert_equal(model, library("wan_t2v", folder, **options))
    rounded = tensors(ours("wan_t2v", folder, quantization_config=config(kind)))
    assert not torch.equal(raw(rounded[SCALES[kind]]), raw(tensors(model)[SCALES[kind]]))


@pytest.mark.parametrize("shard", ["10GB", "40KB"], ids=["whole", "shards"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_is_loaded_as_it_is(kind: str, shard: str, tmp_path: Path) -> None:
    folder = quantized("wan_t2v", kind, tmp_path, shard)
    assert len(list(folder.glob("*.safetensors"))) > (1 if shard == "40KB" else 0)
    model = ours("wan_t2v", folder)
    assert_equal(model, library("wan_t2v", folder))
    assert len(layers_of(model)) > 5
    loadstone.audit(model).require_real()
    model.save_pretrained(tmp_path / "again")
    held = load_file(next((tmp_path / "again").glob("*.safetensors")))
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(raw(held[name]), raw(tensor)), name


@pytest.mark.parametrize("is_stored", [False, True], ids=["on the fly", "stored"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_on_disk_stays_quantized(kind: str, is_stored: bool, tmp_path: Path) -> None:
    if is_stored:
        folder, options = quantized("wan_t2v", kind, tmp_path), {}
    else:
        folder, options = plain("wan_t2v", tmp_path), {"quantization_config": config(kind)}
    whole = ours("wan_t2v", folder, **options)
    size = weight_of(whole).nbytes
    expected = run(loadstone.bitsandbytes.heal(whole))
    offload = tmp_path / "offload"
    model = ours("wan_t2v", folder, device_map=dict(MAP), offload_folder=offload, **options)
    weight = model.blocks[1].ffn.net[2].weight
    assert weight.is_meta and not model.blocks[0].ffn.net[2].weight.is_meta
    name = "blocks.1.ffn.net.2.weight"
    assert (name in written(offload)) != is_stored  # stored codes are read from the checkpoint
    assert is_stored or len(raw_value(offload, name)) == size
    assert loadstone.audit(model).ok
    for _ in range(2):
        assert torch.equal(run(model), expected)
        assert model.blocks[1].ffn.net[2].weight.is_meta


def weight_of(model: Any) -> Any:
    return model.blocks[1].ffn.net[2].weight


def test_the_library_refuses_both(tmp_path: Path) -> None:
    """Control: without loadstone, diffusers rejects a CPU and a map with disk, even afterwards."""
    folder, cls = plain("wan_t2v", tmp_path), by_name("wan_t2v").cls
    before = [dict(vars(owner)) for owner in QUANTIZERS]
    ours("wan_t2v", folder, quantization_config=config("nf4"))
    assert [dict(vars(owner)) for owner in QUANTIZERS] == before
    with pytest.raises(RuntimeError, match="No GPU found"):
        cls.from_pretrained(folder, quantization_config=config("nf4"))
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        pytest.raises(ValueError, match="dispatched on the CPU or the disk"),
    ):
        cls.from_pretrained(folder, quantization_config=config("nf4"), device_map=dict(MAP))


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_librarys_own_call_is_advised_for(kept: bool, tmp_path: Path) -> None:
    """The error's advice works for unquantized weights and for shards in torch's format."""
    model = by_name("wan_t2v").build(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, safe_serialization=kept, max_shard_size="50KB")
    given = {"quantization_config": config("int8", llm_int8_has_fp16_weight=kept)}
    given["use_safetensors"] = kept
    with pytest.raises(loadstone.Error, match="call the class's own from_pretrained"):
        ours("wan_t2v", tmp_path, **given)
    found = library("wan_t2v", tmp_path, **given)
    layer = found.get_submodule("blocks.1.ffn.net.2")
    assert isinstance(layer, bnb.nn.Linear8bitLt)
    assert layer.weight.dtype == (torch.bfloat16 if kept else torch.int8)


def test_under_a_patch_the_librarys_own_call_does_it(tmp_path: Path) -> None:
    folder, cls = plain("wan_t2v", tmp_path), by_name("wan_t2v").cls
    expected = ours("wan_t2v", folder, quantization_config=config("nf4"))
    options = {"quantization_config": config("nf4"), "torch_dtype": torch.bfloat16}
    with loadstone.patch("diffusers", "transformers", "bitsandbytes", "accelerate"):
        model = cls.from_pretrained(folder, **options)
        placed = cls.from_pretrained(
            folder, device_map=dict(MAP), offload_folder=tmp_path / "offload", **options
        )
    assert_equal(loadstone.bitsandbytes.heal(model), loadstone.bitsandbytes.heal(expected))
    assert loadstone.audit(model).ok
    assert weight_of(placed).is_meta
    assert torch.equal(run(placed), run(model))


def test_a_computed_map_counts_quantized_bytes(tmp_path: Path) -> None:
    folder = plain("wan_t2v", tmp_path)
    whole = ours("wan_t2v", folder, quantization_config=config("nf4"))
    size = sum(tensor.nbytes for tensor in tensors(whole).values())
    options = {"quantization_config": config("nf4"), "offload_folder": tmp_path / "offload"}
    room = int(size * 1.02)
    model = ours("wan_t2v", folder, device_map="sequential", max_memory={"cpu": room}, **options)
    assert set(model.hf_device_map.values()) == {"cpu"}
    room = int(size * 0.8)
    model = ours("wan_t2v", folder, device_map="sequential", max_memory={"cpu": room}, **options)
    held = sum(tensor.nbytes for tensor in tensors(model).values() if not tensor.is_meta)
    assert "disk" in model.hf_device_map.values()
    assert 0.2 * size < held <= room


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        ("nf4", "absmax short", "q.scale_shape"),
        ("nf4", "absmax gone", "q.scale_missing"),
        ("int8", "SCB short", "q.scale_shape"),
        ("nf4", "weight gone", "plan.missing"),
    ],
)
def test_damage_is_refused_by_name(kind: str, change: str, code: str, tmp_path: Path) -> None:
    folder = quantized("wan_t2v", kind, tmp_path)
    file = next(folder.glob("*.safetensors"))
    held = load_file(file)
    path = "blocks.1.ffn.net.2"
    name = {"absmax": "weight.absmax", "weight": "weight"}.get(change.split()[0], "SCB")
    if change == "weight gone":
        held = {key: each for key, each in held.items() if not key.startswith(f"{path}.weight")}
    elif change.endswith("gone"):
        del held[f"{path}.{name}"]
    else:
        held[f"{path}.{name}"] = held[f"{path}.{name}"][:-1].clone()
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(loadstone.Error, match=rf"{path}\.") as caught:
        ours("wan_t2v", folder)
    assert caught.value.code == code


def test_a_single_file_is_quantized_on_its_way(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    model = case.build(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "folder")
    file, folder = write_single_file(case, model, tmp_path / "model.safetensors")
    found = loadstone.diffusers.from_single_file(
        case.cls, file, config=folder, quantization_config=config("nf4"), torch_dtype=torch.bfloat16
    )
    expected = ours("wan_t2v", tmp_path / "folder", quantization_config=config("nf4"))
    assert_equal(found, expected)
    assert loadstone.audit(found).ok


# --- pipelines -----------------------------------------------------------------------------------


def wan_pipeline(folder: Path) -> Path:
    """Write a Wan pipeline with a T5 encoder of transformers."""
    import transformers

    small = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    encoder = transformers.T5EncoderModel(transformers.T5Config(**small, num_heads=4)).eval()
    vae = diffusers.AutoencoderKLWan(base_dim=16, z_dim=16, num_res_blocks=1)
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=randomise_all(encoder, 1).bfloat16(),
        vae=randomise_all(vae, 2).eval().bfloat16(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=by_name("wan_t2v").build(dtype=torch.bfloat16),
    )
    pipe.save_pretrained(folder)
    return folder


def qwen_pipeline(folder: Path) -> Path:
    """Write a Qwen-Image pipeline with a Qwen2.5-VL encoder of transformers."""
    changes = {"joint_attention_dim": 64}
    case = by_name("qwen_image")
    case = dataclasses.replace(case, changes=case.changes | changes)
    latents = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = diffusers.AutoencoderKLQwenImage(base_dim=16, z_dim=4, num_res_blocks=1, **latents)
    pipe = diffusers.QwenImagePipeline(
        tokenizer=None,
        text_encoder=encoder_by_name("qwen2_5_vl").build(dtype=torch.bfloat16),
        vae=randomise_all(vae, 2).eval().bfloat16(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=case.build(dtype=torch.bfloat16),
    )
    pipe.save_pretrained(folder)
    return folder


PIPELINES = {
    "wan": (diffusers.WanPipeline, wan_pipeline),
    "qwen": (diffusers.QwenImagePipeline, qwen_pipeline),
}
PARTS = ["transformer", "text_encoder"]


def by_backend(kind: str) -> Any:
    backend = "bitsandbytes_8bit" if kind == "int8" else "bitsandbytes_4bit"
    return diffusers.PipelineQuantizationConfig(
        quant_backend=backend, quant_kwargs=dict(KINDS[kind]), components_to_quantize=PARTS
    )


def by_mapping(kind: str) -> Any:
    import transformers

    return diffusers.PipelineQuantizationConfig(
        quant_mapping={
            "transformer": config(kind),
            "text_encoder": transformers.BitsAndBytesConfig(**KINDS[kind]),
        }
    )


def pipeline(name: str, folder: Path, **options: Any) -> Any:
    options = {"torch_dtype": torch.bfloat16, "tokenizer": None} | options
    return loadstone.diffusers.from_pretrained(PIPELINES[name][0], folder, **options)


def module_at(pipe: Any, path: str) -> Any:
    name, _, inner = path.partition(".")
    return getattr(pipe, name).get_submodule(inner)


def made_by(pipe: Any) -> torch.Tensor:
    """Run one step of the pipeline, from token ids to pixels."""
    pipe.set_progress_bar_config(disable=True)
    ids = torch.arange(8, 14)[None]
    with torch.no_grad():
        words = pipe.text_encoder(input_ids=ids, output_hidden_states=True)
    embeds = words.hidden_states[-1]
    options: dict[str, Any] = {"prompt_embeds": embeds, "num_inference_steps": 1}
    if isinstance(pipe, diffusers.WanPipeline):
        options |= {"guidance_scale": 1.0, "num_frames": 1}
    else:
        options |= {"prompt_embeds_mask": torch.ones_like(ids)}
    pixels = pipe(
        **options, height=16, width=16, output_type="pt",
        generator=torch.Generator().manual_seed(4), return_dict=False,
    )[0]  # fmt: skip
    found: torch.Tensor = pixels
    assert torch.isfinite(found.float()).all()
    return found


INSIDE = {"wan": "transformer.blocks.1", "qwen": "transformer.transformer_blocks.1"}
FORMS = pairs(list(PIPELINES), list(KINDS), ["transformer", "inside"], [by_backend, by_mapping])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the pipelines once; tests only read them."""
    parent = tmp_path_factory.mktemp("pipelines")
    return {name: make(parent / name) for name, (_, make) in PIPELINES.items()}


@pytest.mark.parametrize(("name", "kind", "place", "form"), FORMS)
def test_a_pipeline_partly_on_disk_makes_the_same(
    name: str, kind: str, place: str, form: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[name]
    place = INSIDE[name] if place == "inside" else place
    whole = pipeline(name, folder, quantization_config=form(kind))
    for part in PARTS:
        assert len(layers_of(getattr(whole, part))) > 5
        loadstone.audit(getattr(whole, part)).require_real()
    assert not layers_of(whole.vae)
    expected = made_by(loadstone.bitsandbytes.heal(whole))
    pipe = pipeline(
        name,
        folder,
        quantization_config=form(kind),
        device_map={"text_encoder": "disk", place: "disk", "": "cpu"},
        offload_folder=tmp_path / "offload",
    )
    brought = layers_of(pipe.text_encoder) + layers_of(module_at(pipe, place))
    assert len(brought) > 10
    assert all(each.weight.is_meta for each in brought)
    assert all(loadstone.audit(getattr(pipe, part)).ok for part in PARTS)
    for _ in range(2):
        assert torch.equal(made_by(pipe), expected)
    assert all(each.weight.is_meta for each in brought)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_under_a_patch(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    cls, folder = PIPELINES[name][0], folders[name]
    expected = made_by(
        loadstone.bitsandbytes.heal(pipeline(name, folder, quantization_config=by_backend("nf4")))
    )
    options = {"torch_dtype": torch.bfloat16, "tokenizer": None}
    places = {"device_map": {"text_encoder": "disk", INSIDE[name]: "disk", "": "cpu"}}
    with pytest.raises(RuntimeError, match="No GPU found"):  # control: without the patch
        cls.from_pretrained(folder, quantization_config=by_backend("nf4"), **options)
    with loadstone.patch("diffusers", "transformers", "bitsandbytes", "accelerate"):
        pipe = cls.from_pretrained(
            folder,
            quantization_config=by_backend("nf4"),
            offload_folder=tmp_path / "offload",
            **places,
            **options,
        )
    assert all(each.weight.is_meta for each in layers_of(pipe.text_encoder))
    assert torch.equal(made_by(pipe), expected)
