"""Builds pipelines of Wan whose transformer is a GGUF file of mixed types."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers_gguf import Kind, Tensors, packed
from diffusers_models import Case, by_name, library_converted, write_config

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


diffusers = pytest.importorskip("diffusers")


transformers = pytest.importorskip("transformers")


WIDTH = 256  # a row of this width is one block of the K types


PROMPTS = {"prompt": "a cat runs fast", "negative_prompt": "bad art"}


CHANGES = {"attention_head_dim": 64, "ffn_dim": WIDTH, "text_dim": WIDTH, "freq_dim": WIDTH}


KINDS = {
    "t2v": ("wan_t2v", CHANGES, "WanPipeline"),
    "i2v": (
        "wan_i2v", CHANGES | {"image_dim": WIDTH, "added_kv_proj_dim": WIDTH},
        "WanImageToVideoPipeline",
    ),
}  # fmt: skip


def tokenizer() -> Any:
    words = [f"\u2581{word}" for word in ("a", "cat", "runs", "fast", "bad", "art", "")]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return transformers.T5Tokenizer(
        vocab=[*specials, *((word, -1.0 - at) for at, word in enumerate(words))], extra_ids=0
    )


def randomised(model: Any, seed: int) -> Any:
    """Give weights random values that keep activations in range; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.squeeze().dim() > 1:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(drawn * 0.1)
    return model.eval()


def components(is_image: bool) -> dict[str, Any]:
    """Return every component of the pipeline except the transformer."""
    text = transformers.UMT5Config(
        vocab_size=16, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    made = {
        "tokenizer": tokenizer(),
        "text_encoder": randomised(transformers.UMT5EncoderModel(text), 1),
        "vae": randomised(vae, 2),
        "scheduler": diffusers.UniPCMultistepScheduler(),
    }
    if is_image:
        image = transformers.CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4,
            image_size=32, patch_size=16,
        )  # fmt: skip
        made["image_encoder"] = randomised(transformers.CLIPVisionModel(image), 3)
        made["image_processor"] = transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size=32
        )
    return made


@dataclasses.dataclass
class Parts:
    """A pipeline's folder without its transformer, and a GGUF file of the transformer."""

    case: Case
    pipeline: Any
    folder: Path
    tensors: Tensors
    others: dict[str, Any]

    @property
    def file(self) -> str:
        return str(self.folder / "model.gguf")

    @property
    def config(self) -> str:
        return str(self.folder / "config")

    def reference(self, dtype: torch.dtype, keeps_blocks: bool) -> Any:
        """Return the transformer, built directly with the values that its layers must use."""
        state = self.tensors.dequantized()
        if keeps_blocks:  # packed layers decode with diffusers' function, whose rounding differs
            for name, data in self.tensors.data.items():
                if self.tensors.kinds[name] in (Kind.Q4_K, Kind.Q6_K):
                    state[name] = library_numbers(data, self.tensors.kinds[name]).to(dtype)
        model = self.case.construct()
        model.load_state_dict(library_converted(self.case, state, model))
        kept = self.case.cls._keep_in_fp32_modules
        for name, parameter in model.named_parameters():
            if not set(kept) & set(name.split(".")):
                parameter.data = parameter.data.to(dtype)
        return model.eval()

    def video(self, pipeline: Any) -> torch.Tensor:
        """Run two denoising steps of a pipeline, and decode the video."""
        generator = torch.Generator().manual_seed(7)
        given: dict[str, Any] = dict(PROMPTS)
        if "image_encoder" in self.others:
            pixels = numpy.random.default_rng(4).integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
            image = pytest.importorskip("PIL.Image")
            given["image"] = image.fromarray(pixels)
        pipeline.set_progress_bar_config(disable=True)
        made: torch.Tensor = pipeline(
            **given, height=16, width=16, num_frames=5, num_inference_steps=2,
            generator=generator, output_type="pt", max_sequence_length=16,
        ).frames  # fmt: skip
        return made


def published(name: str) -> Kind:
    """Return F16, Q6_K or Q4_K as the type of a matrix, as in files named K_M."""
    if ".blocks." not in f".{name}":
        return Kind.F16
    return Kind.Q6_K if ".v." in name or ".ffn.2." in name else Kind.Q4_K


def library_numbers(data: Any, kind: Kind) -> torch.Tensor:
    """Decode a packed weight with the function that diffusers' layers use."""
    utils = diffusers.quantizers.gguf.utils
    blocks = utils.GGUFParameter(torch.from_numpy(data.copy()), quant_type=kind)
    made: torch.Tensor = utils.dequantize_gguf_tensor(blocks)
    return made.as_subclass(torch.Tensor)


@pytest.fixture(scope="module", params=KINDS)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    name, changes, pipeline = KINDS[request.param]
    case = by_name(name)
    case = dataclasses.replace(case, changes=case.changes | changes)
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = randomised(case.construct(), 5)
    state = case.original(model)
    tensors = packed(state, lambda index: published(list(state)[index]), scale=2e-4)
    tensors.write(folder / "model.gguf")
    write_config(model, folder / "config")
    others = components(is_image=request.param == "i2v")
    cls = getattr(diffusers, pipeline)
    cls(**others, transformer=None).save_pretrained(folder / "pipeline")
    return Parts(case, cls, folder, tensors, others)


@pytest.fixture(autouse=True)
def text_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the repair of broken Unicode, because its package is optional."""
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    unchanged = types.SimpleNamespace(fix_text=lambda text: text)
    for module in (pipeline_wan, pipeline_wan_i2v):
        monkeypatch.setattr(module, "ftfy", unchanged, raising=False)
