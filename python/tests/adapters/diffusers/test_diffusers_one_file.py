"""Tests files with several components of a pipeline, including transformers' text encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_folders import written

import loadstone
import loadstone.diffusers
from loadstone import _core

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import diffusers_pipelines as tiny  # noqa: E402
from diffusers_ltx import ltx_pipeline  # noqa: E402
from diffusers_pipelines import assert_real  # noqa: E402


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("data is read")

    monkeypatch.setattr(_core, "execute", refuse)


FILES: dict[str, tuple[Any, Any]] = {
    "1.5": (tiny.stable_diffusion, tiny.stable_diffusion_keys),
    "xl": (tiny.stable_diffusion_xl, tiny.stable_diffusion_xl_keys),
    "3": (tiny.stable_diffusion_3, tiny.stable_diffusion_3_keys),
}


class OneFile:
    """A pipeline of tiny models, and a file with all of its components."""

    def __init__(self, folder: Path, name: str) -> None:
        make, self.keys = FILES[name]
        self.pipe = make(folder / "whole")
        self.state = self.keys(self.pipe)
        self.file = tiny.write(self.state, folder / "one.safetensors")
        self.options: dict[str, Any] = {
            "config": tiny.without_weights(folder / "whole", folder / "configs"),
            "local_files_only": True,
        }
        if name == "3":
            self.options["tokenizer_3"] = None
        self.models = {
            each: model
            for each, model in self.pipe.components.items()
            if isinstance(model, torch.nn.Module)
        }

    def load(self, **options: Any) -> Any:
        return loadstone.diffusers.from_single_file(
            type(self.pipe), self.file, **self.options, **options
        )

    def drop(self, *keys: str) -> None:
        kept = {key: tensor for key, tensor in self.state.items() if key not in keys}
        assert len(kept) == len(self.state) - len(keys)
        tiny.write(kept, Path(self.file))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, None) for name in FILES), ("xl", torch.float16), ("3", torch.float16),
     ("3", torch.bfloat16)],
    ids=[*FILES, "xl_f16", "3_f16", "3_bf16"],
)  # fmt: skip
def test_components_of_one_file(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    one = OneFile(tmp_path, name)
    pipe = one.load(**({} if dtype is None else {"torch_dtype": dtype}))
    assert_real(pipe)
    for component, model in one.models.items():
        found = getattr(pipe, component)
        assert type(found) is type(model)
        assert not found.training
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype else set()
        kept = kept if dtype == torch.float16 or hasattr(model, "save_config") else set()
        for key, tensor in model.state_dict().items():
            value = found.state_dict()[key]
            is_cast = dtype is not None and not kept & set(key.split("."))
            assert torch.equal(value, tensor.to(dtype) if is_cast else tensor), (component, key)
            assert value.dtype == (dtype if is_cast else tensor.dtype), (component, key)
    if name == "3":
        third = pipe.text_encoder_3
        assert third.encoder.embed_tokens.weight is third.shared.weight
        origin = loadstone.audit(pipe.text_encoder).provenance["text_projection.weight"].origin
        assert origin == "constant"
    elif dtype is None:
        assert torch.equal(tiny.picture(pipe), tiny.picture(one.pipe))


def test_the_librarys_text_encoder_is_left_on_meta(tmp_path: Path) -> None:
    one = OneFile(tmp_path, "3")
    pipe = type(one.pipe).from_single_file(one.file, **one.options)
    assert pipe.text_encoder_3.encoder.embed_tokens.weight.is_meta
    assert pipe.text_encoder_3.training


@pytest.mark.parametrize("name", FILES)
def test_components_of_one_file_on_disk(tmp_path: Path, name: str) -> None:
    one = OneFile(tmp_path, name)
    last = sorted(each for each in one.models if each.startswith("text_encoder"))[-1]
    denoiser = "transformer" if name == "3" else "unet"
    pipe = one.load(device_map={last: "disk", denoiser: "disk"}, offload_folder=tmp_path / "off")
    assert_real(pipe)
    parts = {each.name for each in (tmp_path / "off").iterdir() if written(each)}
    assert parts <= {last, denoiser}  # one folder per component, because tensor names repeat
    assert (last in parts) == (name == "xl")  # only XL's file fuses projections of the encoder
    for component in (last, denoiser):
        assert all(each.is_meta for each in getattr(pipe, component).parameters())
    words = torch.tensor([[0, 2, 3, 4, 1]])
    with torch.no_grad():
        found, expected = getattr(pipe, last)(words), one.models[last](words)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    if name != "3":
        assert torch.equal(tiny.picture(pipe), tiny.picture(one.pipe))


@pytest.mark.usefixtures("nothing_is_read")
def test_a_component_that_the_file_lacks_wholly(tmp_path: Path) -> None:
    """diffusers' own error comes before anything is read."""
    one = OneFile(tmp_path, "1.5")
    one.drop(*(key for key in one.state if key.startswith("cond_stage_model.")))
    with pytest.raises(Exception, match=r"text_encoder = CLIPTextModel\.from_pretrained"):
        one.load()


GAPS = {
    "1.5": (
        "cond_stage_model.transformer.text_model.encoder.layers.1.mlp.fc1.weight",
        "model.diffusion_model.middle_block.1.norm.weight",
        "first_stage_model.encoder.mid.block_1.norm1.weight",
    ),
    "xl": (
        "conditioner.embedders.0.transformer.text_model.encoder.layers.1.mlp.fc1.weight",
        "conditioner.embedders.1.model.transformer.resblocks.1.ln_1.bias",
        "model.diffusion_model.middle_block.1.norm.weight",
        "first_stage_model.encoder.mid.block_1.norm1.weight",
    ),
    "3": (
        "text_encoders.clip_l.transformer.text_model.encoder.layers.1.mlp.fc1.weight",
        "text_encoders.clip_g.transformer.text_model.encoder.layers.1.mlp.fc1.weight",
        "text_encoders.t5xxl.transformer.encoder.block.1.layer.1.DenseReluDense.wo.weight",
        "first_stage_model.encoder.mid.block_1.norm1.weight",
    ),
}


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("name", GAPS)
def test_what_several_components_lack_is_named_before_data_is_read(
    tmp_path: Path, name: str
) -> None:
    one = OneFile(tmp_path, name)
    one.drop(*GAPS[name])
    with pytest.raises(loadstone.PlanError) as raised:
        one.load()
    assert raised.value.code == "plan.missing"
    told = [each for each in raised.value.findings if each.severity == "error"]
    assert len(told) == len(GAPS[name])
    assert {source for each in told for source in each.sources} == set(GAPS[name])
    for component in one.models:
        assert (f"{component}: " in str(raised.value)) == (component != "transformer")


@pytest.mark.parametrize("key", GAPS["xl"][:2], ids=["clip", "open_clip"])
def test_what_a_text_encoder_lacks_is_filled_on_request(tmp_path: Path, key: str) -> None:
    one = OneFile(tmp_path, "xl")
    one.drop(key)
    pipe = one.load(missing="zeros")
    assert_real(pipe)
    number = "_2" if "embedders.1" in key else ""
    report = loadstone.audit(getattr(pipe, f"text_encoder{number}")).provenance
    filled = [target for target, item in report.items() if item.origin == "zeros"]
    assert len(filled) == 1
    assert not getattr(pipe, f"text_encoder{number}").get_parameter(filled[0]).any()


# --- a converter that empties its input -----------------------------------------------------------

LTX_MAPS: list[Any] = [
    None,
    {"transformer": "disk"},
    {"transformer": {"": "cpu", "transformer_blocks.1": "disk"}, "vae.decoder": "disk"},
]


def frames(pipe: Any) -> torch.Tensor:
    """Run two steps of a video and decode the frames."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    words = torch.randn(2, 1, 8, 32, generator=generator)
    mask = torch.ones(1, 8, dtype=torch.bool)
    made: torch.Tensor = pipe(
        prompt_embeds=words[0], negative_prompt_embeds=words[1], prompt_attention_mask=mask,
        negative_prompt_attention_mask=mask, height=32, width=32, num_frames=9,
        num_inference_steps=2, generator=generator, output_type="pt",
    ).frames  # fmt: skip
    return made


@pytest.mark.parametrize("device_map", LTX_MAPS, ids=["cpu", "component", "parts"])
def test_a_video_of_one_file(tmp_path: Path, device_map: Any) -> None:
    file, whole = ltx_pipeline(tmp_path)
    pipe = loadstone.diffusers.from_single_file(
        diffusers.LTXPipeline, file, config=str(tmp_path / "config"), text_encoder=None,
        tokenizer=None, device_map=device_map, offload_folder=tmp_path / "off",
    )  # fmt: skip
    assert_real(pipe)
    is_on_disk = any(each.is_meta for each in pipe.transformer.parameters())
    assert is_on_disk == (device_map is not None)
    wanted = frames(whole)
    assert torch.isfinite(wanted).all()
    assert torch.equal(frames(pipe), wanted)
    with torch.no_grad():
        whole.transformer.proj_out.bias.add_(1)
    assert not torch.equal(frames(whole), wanted)  # control
