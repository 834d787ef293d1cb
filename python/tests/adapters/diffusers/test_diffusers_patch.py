"""Tests loadstone.patch with unchanged scripts that were written for diffusers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_gguf import BLOCK_CASES, Kind, mixed, packed
from diffusers_models import (
    Case,
    assert_same,
    by_name,
    cast_copy,
    differences,
    logged_lines,
    write_config,
    write_single_file,
)
from safetensors.torch import save_file
from transformers_models import own_state

import loadstone
import loadstone.diffusers
from loadstone._model.walk import walk

diffusers = pytest.importorskip("diffusers")

FLF2V = by_name("wan_flf2v")
IMAGE_KEYS = ("img_emb.", "k_img", "v_img")


def places() -> list[tuple[str, Any]]:
    """Return all attributes of each object in which the patch replaces something."""
    from loadstone._adapters.diffusers import hooks

    owners = {id(hook.owner): hook.owner for hook in hooks.hooks()}
    return [item for owner in owners.values() for item in list(vars(owner).items())]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Check that each test leaves diffusers' attributes identical."""
    before = places()
    yield
    after = places()
    assert [name for name, _ in before] == [name for name, _ in after]
    for (name, was), (_, now) in zip(before, after, strict=True):
        assert was is now, name


def file_of(case: Case, folder: Path, *dropped: str) -> tuple[Any, str, str]:
    """Write a random model without some keys; return it, the file and the config's folder."""
    model = case.build()
    state = case.original(model)
    kept = {name: value for name, value in state.items() if not any(d in name for d in dropped)}
    assert not dropped or len(kept) < len(state)
    save_file(kept, folder / "model.safetensors")
    return model, str(folder / "model.safetensors"), write_config(model, folder / "config")


# --- single files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan_i2v", "wan_animate", "sd35", "ltx_vae", "qwen_image"])
def test_single_file(tmp_path: Path, no_readers: None, name: str) -> None:
    case = by_name(name)
    model, file, config = file_of(case, tmp_path)
    with loadstone.patch("diffusers"):
        whole = case.cls.from_single_file(file, config=config)
        rounded = case.cls.from_single_file(file, config=config, torch_dtype=torch.bfloat16)
    assert_same(whole, model)
    assert_same(rounded, cast_copy(case, model, torch.bfloat16))


def test_first_last_frame(tmp_path: Path, no_readers: None) -> None:
    """diffusers' converter does not know the key ``img_emb.emb_pos`` of these files."""
    model, file, config = file_of(FLF2V, tmp_path)
    with loadstone.patch("diffusers"):
        assert_same(FLF2V.cls.from_single_file(file, config=config), model)


def test_first_last_frame_without_the_patch(tmp_path: Path) -> None:
    _, file, config = file_of(FLF2V, tmp_path)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        FLF2V.cls.from_single_file(file, config=config)


def test_first_last_frame_is_no_surplus(tmp_path: Path, no_readers: None) -> None:
    """loadstone uses the key, so diffusers must not warn that it is unused."""
    _, file, config = file_of(FLF2V, tmp_path)
    with logged_lines() as lines, loadstone.patch("diffusers"):
        FLF2V.cls.from_single_file(file, config=config)
    assert not [line for line in lines if "emb_pos" in line]


def test_missing_weight(tmp_path: Path, no_readers: None) -> None:
    case = by_name("wan_i2v")
    _, file, config = file_of(case, tmp_path, "blocks.0.norm3.weight")
    with (
        loadstone.patch("diffusers"),
        pytest.raises(loadstone.PlanError, match=r"blocks\.0\.norm2\.weight") as raised,
    ):
        case.cls.from_single_file(file, config=config)
    assert raised.value.code == "plan.missing"


def test_missing_weight_without_the_patch(tmp_path: Path) -> None:
    case = by_name("wan_i2v")
    _, file, config = file_of(case, tmp_path, "blocks.0.norm3.weight")
    with pytest.raises(NotImplementedError, match="meta tensor"):
        case.cls.from_single_file(file, config=config)


def test_config_of_another_model(tmp_path: Path, no_readers: None) -> None:
    """A Wan2.2 I2V file with the config of Wan2.1 gives one finding that names the fields."""
    case = by_name("wan_i2v")
    _, file, config = file_of(case, tmp_path, *IMAGE_KEYS)
    with loadstone.patch("diffusers"), pytest.raises(loadstone.PlanError) as raised:
        case.cls.from_single_file(file, config=config)
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert [item.code for item in errors] == ["plan.config_mismatch"]
    assert "image_dim" in errors[0].message
    assert "added_kv_proj_dim" in errors[0].message


def test_gguf(tmp_path: Path, no_readers: None) -> None:
    case = BLOCK_CASES[0]
    model = case.build()
    tensors = packed(case.original(model), mixed)
    file = tensors.write(tmp_path / "model.gguf")
    config = write_config(model, tmp_path / "config")
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    with loadstone.patch("diffusers"):
        found = case.cls.from_single_file(file, config=config, quantization_config=quantization)
    held = tensors.data["model.diffusion_model.blocks.1.ffn.0.weight"]
    parameter = found.blocks[1].ffn.net[0].proj.weight
    assert parameter.quant_type == tensors.kinds["model.diffusion_model.blocks.1.ffn.0.weight"]
    assert torch.equal(parameter.as_tensor().view(torch.uint8), torch.from_numpy(held).view(
        torch.uint8))  # fmt: skip
    assert loadstone.audit(found).ok


def test_torch_files_are_left_to_the_library(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    torch.save(case.original(model), tmp_path / "model.ckpt")
    config = write_config(model, tmp_path / "config")
    file = str(tmp_path / "model.ckpt")
    with loadstone.patch("diffusers"):
        found = case.cls.from_single_file(file, config=config)
    assert differences(found, model) == []
    with pytest.raises(loadstone.Error, match="call the class's own function") as raised:
        loadstone.diffusers.from_single_file(case.cls, file, config=config)
    assert raised.value.code == "plan.options"
    # The load succeeds if it follows the message's advice.
    assert differences(case.cls.from_single_file(file, config=config), model) == []


# --- folders and pipelines -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan_t2v", "pixart", "kandinsky5", "autoencoder_kl"])
def test_folder(tmp_path: Path, no_readers: None, name: str) -> None:
    case = by_name(name)
    model = case.build()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    with loadstone.patch("diffusers"):
        assert_same(case.cls.from_pretrained(str(tmp_path / "model")), model)


def incomplete_folder(folder: Path) -> Case:
    case = by_name("wan_i2v")
    model = case.build()
    kept = {
        name: value
        for name, value in own_state(model).items()
        if "image_embedder" not in name and "add_" not in name and "norm_added" not in name
    }
    write_config(model, folder)
    save_file(kept, folder / "diffusion_pytorch_model.safetensors")
    return case


def test_a_failed_call_leaves_no_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_readers: None
) -> None:
    case = by_name("wan_i2v")
    model, _, config = file_of(case, tmp_path)
    model.save_pretrained(tmp_path / "folder")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no construction")

    with loadstone.patch("diffusers"):
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no construction"):
            patched.setattr(case.cls, "from_config", fail)
            case.cls.from_pretrained(tmp_path / "folder", torch_dtype=torch.float16)
        made = case.cls.from_config(case.cls.load_config(config))
    assert {each.dtype for each in made.parameters()} == {torch.float32}


def test_folder_with_gaps(tmp_path: Path, no_readers: None) -> None:
    case = incomplete_folder(tmp_path)
    with loadstone.patch("diffusers"), pytest.raises(loadstone.PlanError):
        case.cls.from_pretrained(str(tmp_path))


def test_folder_with_gaps_without_the_patch(tmp_path: Path) -> None:
    """diffusers itself returns a model with tensors on meta."""
    found = incomplete_folder(tmp_path).cls.from_pretrained(str(tmp_path))
    assert len([slot for slot in walk(found) if slot.tensor.is_meta]) == 18


def ltx_pipeline(folder: Path) -> Any:
    transformer, vae = by_name("ltx").build(), by_name("ltx_vae").build()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.LTXPipeline(
        scheduler=scheduler, vae=vae, text_encoder=None, tokenizer=None, transformer=transformer
    )
    pipe.save_pretrained(folder)
    return pipe


def test_pipeline_folder(tmp_path: Path, no_readers: None) -> None:
    pipe = ltx_pipeline(tmp_path / "pipe")
    with loadstone.patch("diffusers"):
        found = diffusers.DiffusionPipeline.from_pretrained(
            str(tmp_path / "pipe"), text_encoder=None, tokenizer=None
        )
    assert type(found) is diffusers.LTXPipeline
    assert_same(found.transformer, pipe.transformer)
    assert_same(found.vae, pipe.vae)


def test_combined_file(tmp_path: Path, no_readers: None) -> None:
    pipe = ltx_pipeline(tmp_path / "pipe")
    state = by_name("ltx").original(pipe.transformer) | by_name("ltx_vae").original(pipe.vae)
    save_file(state, tmp_path / "combined.safetensors")
    with loadstone.patch("diffusers"):
        found = diffusers.LTXPipeline.from_single_file(
            str(tmp_path / "combined.safetensors"),
            config=str(tmp_path / "pipe"),
            text_encoder=None,
            tokenizer=None,
        )
    assert_same(found.transformer, pipe.transformer)
    assert_same(found.vae, pipe.vae)


# --- scope of the patch ---------------------------------------------------------------------------


def is_healed(case: Case, file: str, config: str) -> bool:
    """Return true if a bfloat16 load keeps the tables in float32, which only the patch does."""
    found = case.cls.from_single_file(file, config=config, torch_dtype=torch.bfloat16)
    return bool(found.rope.freqs_cos.dtype == torch.float32)


def test_it_ends_and_other_threads_have_none(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    file, config = write_single_file(case, case.build(), tmp_path / "model.safetensors")
    results: list[bool] = []
    assert not is_healed(case, file, config)
    with loadstone.patch("diffusers"):
        assert is_healed(case, file, config)
        other = threading.Thread(target=lambda: results.append(is_healed(case, file, config)))
        other.start()
        other.join()
        with pytest.raises(OSError):  # a failed call must not end the patch
            case.cls.from_single_file(file, config=str(tmp_path / "nowhere"), local_files_only=True)
        assert is_healed(case, file, config)
    assert results == [False]
    assert not is_healed(case, file, config)


def test_the_whole_process(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    file, config = write_single_file(case, case.build(), tmp_path / "model.safetensors")
    healing = loadstone.patch("diffusers").start()
    try:
        results: list[bool] = []
        other = threading.Thread(target=lambda: results.append(is_healed(case, file, config)))
        other.start()
        other.join()
    finally:
        healing.stop()
    assert results == [True]
    assert not is_healed(case, file, config)


def test_files_of_plain_tensors_need_no_gguf_package():
    """diffusers is often installed without the gguf package."""
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "import loadstone._adapters.diffusers.hooks, loadstone._adapters.diffusers.load\n"
        "try:\n"
        "    import loadstone._adapters.diffusers.packed\n"
        "except ImportError:\n"
        "    print('only blocks')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "only blocks"


# --- a program that does not import loadstone -----------------------------------------------------

# Graphical tools call the library like this: a node class, run in a thread that serves a queue.
NODE = """
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel


class LoadWan:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"

    def load(self, path, config, precision):
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        options = {"config": config, "torch_dtype": dtype}
        if path.endswith(".gguf"):
            options["quantization_config"] = GGUFQuantizationConfig(compute_dtype=dtype)
        return (WanTransformer3DModel.from_single_file(path, **options),)


NODE_CLASS_MAPPINGS = {"LoadWan": LoadWan}
"""


def run_node(path: str, config: str, precision: str = "fp32") -> Any:
    """Run the node in a thread; return its result, or the exception that ends it."""
    names: dict[str, Any] = {}
    exec(compile(NODE, "node.py", "exec"), names)
    results: list[Any] = []

    def work() -> None:
        cls = names["NODE_CLASS_MAPPINGS"]["LoadWan"]
        try:
            results.extend(getattr(cls(), cls.FUNCTION)(path, config, precision))
        except Exception as reason:
            results.append(reason)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    return results[0]


@pytest.fixture
def healed() -> Iterator[None]:
    """Patch the whole process during a test."""
    healing = loadstone.patch("diffusers").start()
    yield
    healing.stop()


def test_node_loads_first_last_frame(tmp_path: Path, healed: None, no_readers: None) -> None:
    model, file, config = file_of(FLF2V, tmp_path)
    assert_same(run_node(file, config), model)
    assert_same(run_node(file, config, "bf16"), cast_copy(FLF2V, model, torch.bfloat16))


def test_node_loads_blocks(tmp_path: Path, healed: None, no_readers: None) -> None:
    """diffusers alone cannot load first-last-frame files as GGUF."""
    model = FLF2V.build()
    tensors = packed(FLF2V.original(model), lambda _: Kind.Q8_0)
    file = tensors.write(tmp_path / "model.gguf")
    config = write_config(model, tmp_path / "config")
    found = run_node(file, config)
    assert loadstone.audit(found).ok
    position = "model.diffusion_model.img_emb.emb_pos"
    numbers = tensors.dequantized()[position]
    assert torch.equal(found.condition_embedder.image_embedder.pos_embed, numbers)
    held = tensors.data["model.diffusion_model.blocks.0.ffn.0.weight"]
    packed_weight = found.blocks[0].ffn.net[0].proj.weight
    assert torch.equal(packed_weight.as_tensor(), torch.from_numpy(held).view(torch.uint8))


def test_node_is_told_of_the_wrong_config(tmp_path: Path, healed: None, no_readers: None) -> None:
    _, file, config = file_of(by_name("wan_i2v"), tmp_path, *IMAGE_KEYS)
    reason = run_node(file, config)
    assert isinstance(reason, loadstone.PlanError)
    assert reason.code == "plan.config_mismatch"
    assert "image_dim" in str(reason)
    assert "added_kv_proj_dim" in str(reason)


def test_node_without_the_patch(tmp_path: Path) -> None:
    """Control: without the patch, diffusers' own error names no tensor."""
    for folder, dropped in (("wrong", IMAGE_KEYS), ("whole", ())):
        (tmp_path / folder).mkdir()
        case = by_name("wan_i2v") if dropped else FLF2V
        _, file, config = file_of(case, tmp_path / folder, *dropped)
        reason = run_node(file, config)
        assert isinstance(reason, NotImplementedError)
        assert "meta tensor" in str(reason)


PIPELINES_COME_LATE = """
import sys
from loadstone._adapters.diffusers import hooks
from loadstone._adapters.patch import hooked

name = "diffusers.pipelines.pipeline_utils"
with hooked(hooks.hooks()):
    assert name not in sys.modules
    from diffusers import DiffusionPipeline
    own = vars(DiffusionPipeline)["from_pretrained"]
    with hooked(hooks.hooks()):
        assert vars(DiffusionPipeline)["from_pretrained"] is not own
assert vars(DiffusionPipeline)["from_pretrained"] is own
"""
A_PATCH_IS_FOR_ALL = """
import loadstone
import diffusers

with loadstone.patch("diffusers"):
    inside = vars(diffusers.DiffusionPipeline)["from_pretrained"]
assert vars(diffusers.DiffusionPipeline)["from_pretrained"] is not inside
"""


@pytest.mark.parametrize("code", [PIPELINES_COME_LATE, A_PATCH_IS_FOR_ALL])
def test_pipelines_are_entered_where_they_are(code: str):
    """Importing the pipelines takes long, so the patch waits until the program imports them."""
    subprocess.run([sys.executable, "-c", code], check=True)
