"""Tests pipelines with device maps, and files that contain several components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadstone
import loadstone.diffusers
from loadstone import _core
from loadstone._model.walk import walk

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import diffusers_pipelines as tiny  # noqa: E402
from diffusers_pipelines import assert_real  # noqa: E402

MODELS = ("unet", "vae", "text_encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pipeline as a folder and as one file, and its configs alone."""
    made = tmp_path_factory.mktemp("pipeline")
    pipe = tiny.stable_diffusion(made / "whole")
    tiny.write(tiny.stable_diffusion_keys(pipe), made / "one.safetensors")
    tiny.without_weights(made / "whole", made / "configs")
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """Load the pipeline with all components on the CPU; tests only read it."""
    return of_folder(folder)


@pytest.fixture(scope="module")
def wanted(whole: Any) -> torch.Tensor:
    made: torch.Tensor = tiny.picture(whole)
    return made


def of_folder(folder: Path, **options: Any) -> Any:
    return loadstone.diffusers.from_pretrained(
        diffusers.DiffusionPipeline, folder / "whole", **options
    )


def of_file(folder: Path, **options: Any) -> Any:
    return loadstone.diffusers.from_single_file(
        diffusers.StableDiffusionPipeline,
        folder / "one.safetensors",
        config=str(folder / "configs"),
        local_files_only=True,
        **options,
    )


Loader = Callable[..., Any]
both = pytest.mark.parametrize("load", [of_folder, of_file], ids=["folder", "file"])


def on_meta(pipe: Any) -> set[str]:
    """Return the parameters on meta, by their path in the pipeline."""
    return {
        f"{name}.{slot.name}"
        for name in MODELS
        for slot in walk(getattr(pipe, name))
        if slot.tensor.is_meta
    }


def parameters(pipe: Any, *paths: str) -> set[str]:
    names = {
        f"{name}.{each}" for name in MODELS for each, _ in getattr(pipe, name).named_parameters()
    }
    return {name for name in names if name.startswith(tuple(f"{path}." for path in paths))}


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("data is read")

    monkeypatch.setattr(_core, "execute", refuse)


# --- maps over components ------------------------------------------------------------------------

# A map, the offloaded parts of the pipeline, and the map that the pipeline reports.
MAPS: dict[str, tuple[Any, tuple[str, ...], Any]] = {
    "components": (
        {"unet": "cpu", "text_encoder": "disk", "vae": "cpu"},
        ("text_encoder",),
        {"unet": "cpu", "text_encoder": "disk", "vae": "cpu"},
    ),
    "some": (
        {"vae": "disk"},
        ("vae",),
        {"unet": "cpu", "text_encoder": "cpu", "vae": "disk"},
    ),
    "inside": (
        {"unet.mid_block": "disk", "unet": "cpu"},
        ("unet.mid_block",),
        {"unet": "cpu", "unet.mid_block": "disk", "text_encoder": "cpu", "vae": "cpu"},
    ),
    "nested": (
        {
            "unet": {"up_blocks.0": "disk", "": "cpu"},
            "text_encoder": {"": "disk", "encoder.layers.0": "cpu"},
        },
        ("unet.up_blocks.0", "text_encoder.encoder.layers.1", "text_encoder.final_layer_norm",
         "text_encoder.embeddings"),
        {
            "unet": "cpu", "unet.up_blocks.0": "disk", "vae": "cpu",
            "text_encoder": "disk", "text_encoder.encoder.layers.0": "cpu",
        },
    ),
    "both": (
        {"unet.mid_block": {"attentions.0": "disk", "": "cpu"}, "": "disk"},
        ("unet.down_blocks", "unet.up_blocks", "unet.conv_in", "unet.conv_out",
         "unet.conv_norm_out", "unet.time_embedding", "unet.mid_block.attentions.0", "vae",
         "text_encoder"),
        {
            "unet": "disk", "unet.mid_block": "cpu", "unet.mid_block.attentions.0": "disk",
            "vae": "disk", "text_encoder": "disk",
        },
    ),
    "rest": (
        {"": "disk", "unet": torch.device("cpu")},
        ("vae", "text_encoder"),
        {"unet": torch.device("cpu"), "vae": "disk", "text_encoder": "disk"},
    ),
    "all_on_disk": ("disk", MODELS, dict.fromkeys(MODELS, "disk")),
    "cpu": ("cpu", (), "cpu"),
    "device": (torch.device("cpu"), (), "cpu"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "load"),
    [*((name, of_folder) for name in MAPS), *((name, of_file) for name in ("some", "nested"))],
    ids=[*MAPS, "some_of_a_file", "nested_of_a_file"],
)
def test_maps(folder: Path, tmp_path: Path, wanted: torch.Tensor, name: str, load: Loader) -> None:
    device_map, on_disk, told = MAPS[name]
    pipe = load(folder, device_map=device_map, offload_folder=tmp_path)
    assert_real(pipe)
    assert on_meta(pipe) == parameters(pipe, *on_disk)
    assert pipe.hf_device_map == told
    assert torch.equal(tiny.picture(pipe), wanted)
    assert torch.equal(tiny.picture(pipe), wanted)
    assert on_meta(pipe) == parameters(pipe, *on_disk)


def test_the_library_takes_no_maps(folder: Path) -> None:
    with pytest.raises(ValueError, match="must be a string"):
        diffusers.DiffusionPipeline.from_pretrained(folder / "whole", device_map={"unet": "cpu"})


@pytest.mark.parametrize(
    ("strategy", "load"),
    [("balanced", of_folder), ("sequential", of_folder), ("auto", of_file)],
    ids=["balanced", "sequential", "auto_of_a_file"],
)
def test_room_for_a_part(
    folder: Path, tmp_path: Path, whole: Any, wanted: torch.Tensor, strategy: str, load: Loader
) -> None:
    size = sum(each.nbytes for name in MODELS for each in getattr(whole, name).parameters())
    room = int(size * 0.7)
    pipe = load(folder, device_map=strategy, max_memory={"cpu": room}, offload_folder=tmp_path)
    held = {
        path: each.nbytes
        for name in MODELS
        for path, each in getattr(pipe, name).named_parameters(prefix=name)
        if not each.is_meta
    }
    assert 0.3 * size < sum(held.values()) <= room
    assert_real(pipe)
    assert set(pipe.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(tiny.picture(pipe), wanted)


@pytest.mark.parametrize(
    ("strategy", "load"), [("balanced", of_folder), ("auto", of_file)], ids=["folder", "file"]
)
def test_room_for_all(folder: Path, wanted: torch.Tensor, strategy: str, load: Loader) -> None:
    """On a machine without an accelerator, diffusers applies no device map."""
    pipe = load(folder, device_map=strategy)
    assert pipe.hf_device_map is None
    assert not on_meta(pipe)
    assert_real(pipe)
    assert torch.equal(tiny.picture(pipe.to("cpu")), wanted)


WRONG: list[tuple[Any, str, str]] = [
    ({"unt": "cpu"}, "plan.device_map", "'unt'; expected .*unet"),
    ({"tokenizer": "cpu"}, "plan.device_map", "it is not a model.*'tokenizer'"),
    ({"unet.mid": "disk"}, "plan.device_map", "'unet.mid'; expected .*'mid_block'"),
    ({"unet": {"mid": "cpu"}}, "plan.device_map", "UNet2DConditionModel.*'unet.mid'"),
    ({"text_encoder.encoder.layers.2": "disk"}, "plan.device_map", "layers.1"),
    ({"unet.conv_in.bias": "disk"}, "plan.device_map", "without its module"),
    ({"unet": "dsk"}, "plan.device_map", "'unet': unknown device 'dsk'; did you mean 'disk'"),
    ({"unet": None}, "plan.device_map", "'unet': unknown device 'None'"),
    ({"unet.mid_block": "cpu", "unet": {"mid_block": "disk"}}, "plan.device_map", "path twice"),
    ("dsk", "plan.device_map", "unknown device 'dsk'; did you mean 'disk'"),
    ({"vae": "disk"}, "plan.offload_folder", "on disk; found vae"),
]


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(("device_map", "code", "message"), WRONG, ids=map(str, range(len(WRONG))))
def test_maps_that_are_wrong(folder: Path, device_map: Any, code: str, message: str) -> None:
    with pytest.raises(loadstone.PlanError, match=message) as raised:
        of_folder(folder, device_map=device_map)
    assert raised.value.code == code


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("at", [0, 2, -1])
def test_maps_that_are_wrong_for_a_file(folder: Path, at: int) -> None:
    device_map, code, message = WRONG[at]
    with pytest.raises(loadstone.PlanError, match=message) as raised:
        of_file(folder, device_map=device_map)
    assert raised.value.code == code


# --- other arguments of the library ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_map", "load"),
    [(None, of_folder), ({"text_encoder": "disk"}, of_folder), ({"vae": "disk"}, of_file)],
    ids=["plain", "mapped", "file"],
)
def test_a_component_that_is_given(
    folder: Path, tmp_path: Path, wanted: torch.Tensor, device_map: Any, load: Loader
) -> None:
    unet = of_folder(folder).unet
    pipe = load(folder, unet=unet, device_map=device_map, offload_folder=tmp_path)
    assert pipe.unet is unet
    assert_real(pipe)
    assert torch.equal(tiny.picture(pipe), wanted)
    with torch.no_grad():
        unet.conv_out.bias.add_(1)
    assert not torch.equal(tiny.picture(pipe), wanted)  # control


@both
def test_a_component_that_is_given_is_not_placed(folder: Path, load: Loader) -> None:
    unet = of_folder(folder).unet
    with pytest.raises(loadstone.PlanError, match=r"'unet'") as raised:
        load(folder, unet=unet, device_map={"unet": "cpu"})
    assert raised.value.code == "plan.device_map"


@pytest.mark.parametrize(
    ("device_map", "load"),
    [(None, of_folder), ({"unet": "disk"}, of_folder), ({"unet": "disk"}, of_file)],
    ids=["plain", "mapped", "file"],
)
def test_a_component_that_is_left_out(
    folder: Path, tmp_path: Path, whole: Any, device_map: Any, load: Loader
) -> None:
    without = {"text_encoder": None, "tokenizer": None}
    pipe = load(folder, device_map=device_map, offload_folder=tmp_path, **without)
    assert pipe.text_encoder is None
    assert_real(pipe)
    words = torch.randn(2, 1, 16, 32, generator=torch.Generator().manual_seed(1))
    made = [
        each(
            prompt_embeds=words[0], negative_prompt_embeds=words[1], num_inference_steps=2,
            height=16, width=16, output_type="pt", generator=torch.Generator().manual_seed(4),
        ).images
        for each in (pipe, whole)
    ]  # fmt: skip
    assert torch.equal(*made)


DTYPES: list[Any] = [
    torch.bfloat16,
    {"unet": torch.bfloat16, "default": torch.float16},
    {"text_encoder": torch.float16},
]


@pytest.mark.parametrize(
    ("argument", "at", "device_map"),
    [
        ("torch_dtype", 0, None), ("torch_dtype", 1, {"vae": "disk"}), ("dtype", 1, None),
        ("torch_dtype", 2, None),
    ],
    ids=["one", "default_mapped", "default", "some"],
)  # fmt: skip
def test_dtypes(folder: Path, tmp_path: Path, device_map: Any, at: int, argument: str) -> None:
    options = {argument: DTYPES[at]}
    library = diffusers.DiffusionPipeline.from_pretrained(folder / "whole", **options)
    pipe = of_folder(folder, device_map=device_map, offload_folder=tmp_path, **options)
    assert_real(pipe)
    for name in MODELS:
        expected = getattr(library, name).state_dict()
        for key, tensor in getattr(pipe, name).state_dict().items():
            assert tensor.dtype == expected[key].dtype, (name, key)
            assert tensor.is_meta or torch.equal(tensor, expected[key]), (name, key)


def test_variants(folder: Path, tmp_path: Path, whole: Any) -> None:
    """Components without the variant load their plain files."""
    pipe = of_folder(folder, torch_dtype=torch.float16)
    pipe.save_pretrained(tmp_path / "whole", variant="fp16")
    whole.vae.save_pretrained(tmp_path / "whole" / "vae")  # plain files next to the variant's
    for device_map in (None, {"unet": "disk"}):
        found = of_folder(
            tmp_path, variant="fp16", torch_dtype=torch.float16, device_map=device_map,
            offload_folder=tmp_path / "off",
        )  # fmt: skip
        assert_real(found)
        sources = loadstone.audit(found.vae).provenance["decoder.conv_in.bias"]
        assert "fp16" in sources.sources[0].shard
        assert torch.equal(found.vae.decoder.conv_in.bias, pipe.vae.decoder.conv_in.bias)
    with pytest.raises(ValueError, match="no weights of the variant 'other'"):
        of_folder(folder, variant="other")


# --- under a patch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nested"])
def test_a_patch_takes_maps(folder: Path, tmp_path: Path, wanted: torch.Tensor, name: str) -> None:
    device_map, on_disk, told = MAPS[name]
    with loadstone.patch("diffusers", "transformers"):
        one = diffusers.DiffusionPipeline.from_pretrained(
            folder / "whole", device_map=device_map, offload_folder=tmp_path / "one"
        )
        two = diffusers.StableDiffusionPipeline.from_single_file(
            str(folder / "one.safetensors"), config=str(folder / "configs"), local_files_only=True,
            device_map=device_map, offload_folder=tmp_path / "two",
        )  # fmt: skip
        three = diffusers.AutoPipelineForText2Image.from_pretrained(
            folder / "whole", device_map=device_map, offload_folder=tmp_path / "three"
        )
    for pipe in (one, two, three):
        assert pipe.hf_device_map == told
        assert on_meta(pipe) == parameters(pipe, *on_disk)
        assert_real(pipe)
        assert torch.equal(tiny.picture(pipe), wanted)
