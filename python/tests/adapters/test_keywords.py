"""Tests that each function which loads rejects misspelled keywords and suggests the nearest one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone._base.keywords import refuse_misspelled


def blank() -> torch.nn.Module:
    with loadstone.skeleton():
        return torch.nn.Sequential(torch.nn.Linear(4, 4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(torch.nn.Sequential(torch.nn.Linear(4, 4)).state_dict(), path)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    from diffusers import AutoencoderKL

    AutoencoderKL(block_out_channels=(4,), norm_num_groups=2).save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


# By function: the checkpoint, a misspelled keyword, the nearest keyword, and a value for it.
DOORS: dict[str, tuple[str, str, str, Any]] = {
    "plan": ("file", "max_memroy", "max_memory", None),
    "load": ("file", "max_memroy", "max_memory", None),
    "execute": ("file", "thraeds", "threads", 1),
    "accelerate.load_checkpoint_in_model": ("file", "recepit", "receipt", None),
    "accelerate.load_checkpoint_and_dispatch": ("file", "max_memroy", "max_memory", None),
    "transformers of a class": ("llama", "max_memroy", "max_memory", None),
    "transformers of an auto class": ("llama", "quantize_expert", "quantize_experts", False),
    "diffusers.from_pretrained": ("vae", "offload_foldre", "offload_folder", None),
    "diffusers.from_single_file": ("vae", "max_memroy", "max_memory", None),
    "modelopt.load": ("llama", "max_memroy", "max_memory", None),
    "modelopt.init_quantized_weights": ("llama", "recepit", "receipt", None),
    "modelopt in from_pretrained": ("llama", "max_memroy", "max_memory", None),
    "servers": ("file", "thraeds", "threads", 1),
}


def call(door: str, path: Path, **keywords: Any) -> Any:
    if door == "plan":
        return loadstone.plan(blank(), path, **keywords)
    if door == "load":
        return loadstone.load(blank(), path, **keywords)
    if door == "execute":
        return loadstone.plan(model := blank(), path).execute(model=model, **keywords)
    if door == "servers":
        from loadstone._adapters.serving.options import Options

        return Options.from_mapping(keywords)
    library, _, rest = door.partition(".")
    if library == "accelerate":
        return getattr(loadstone.accelerate, rest)(blank(), path, **keywords)
    if door.startswith("transformers"):
        import transformers

        name = "AutoModelForCausalLM" if "auto" in door else "LlamaForCausalLM"
        cls = getattr(transformers, name)
        return loadstone.transformers.from_pretrained(cls, path, **keywords)
    if library == "diffusers":
        from diffusers import AutoencoderKL

        given: dict[str, Any] = {"config": str(path)} if rest == "from_single_file" else {}
        source = path / "diffusion_pytorch_model.safetensors" if given else path
        return getattr(loadstone.diffusers, rest)(AutoencoderKL, source, **given, **keywords)
    return call_modelopt(door, path, keywords)


def call_modelopt(door: str, path: Path, keywords: dict[str, Any]) -> Any:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from transformers import AutoModelForCausalLM

    if door == "modelopt.load":
        return loadstone.modelopt.load(AutoModelForCausalLM, path, mtq.FP8_DEFAULT_CFG, **keywords)
    inside = keywords if "from_pretrained" in door else {}
    with loadstone.modelopt.init_quantized_weights(
        mtq.FP8_DEFAULT_CFG, **({} if inside else keywords)
    ):
        return AutoModelForCausalLM.from_pretrained(path, **inside)


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelled_keyword_is_refused_with_the_nearest_one(
    door: str, request: pytest.FixtureRequest
) -> None:
    fixture, misspelled, right, value = DOORS[door]
    path = request.getfixturevalue(fixture)
    with pytest.raises((TypeError, loadstone.PlanError)) as caught:
        call(door, path, **{misspelled: value or 1})
    assert f"'{misspelled}'; did you mean '{right}'?" in str(caught.value)
    call(door, path, **{right: value})


# Public functions that do not load into a model: a misspelled keyword, and the nearest keyword.
OTHER_FUNCTIONS = {
    "configure_remote": ("ca_flie", "ca_file"),
    "convert": ("shard_szie", "shard_size"),
    "dequantize": ("encodign", "encoding"),
    "inspect": ("allow_link", "allow_links"),
    "load_file": ("thraeds", "threads"),
    "merge": ("denisty", "density"),
    "open": ("devcie", "device"),
    "quantize": ("block_szie", "block_size"),
    "safe_open": ("framewrok", "framework"),
    "save_recipes": ("rulse", "rules"),
}


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_other_functions_suggest_the_nearest_keyword(name: str) -> None:
    function = getattr(loadstone, name)
    misspelled, right = OTHER_FUNCTIONS[name]
    refusal = "got an unexpected keyword argument"
    with pytest.raises(TypeError, match=f"{refusal} '{misspelled}'; did you mean '{right}'"):
        function(**{misspelled: None})
    with pytest.raises(TypeError, match=f"{name}.*{refusal} 'a_word_of_its_own'$"):  # control
        function(a_word_of_its_own=None)
    assert right in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("name", "misspelled", "right"),
    [
        ("load_file", "bakend", "backend"),
        ("load", "dtaa", "data"),
        ("save", "metdata", "metadata"),
        ("save_file", "metdata", "metadata"),
        ("save_model", "force_contigous", "force_contiguous"),
        ("load_model", "strcit", "strict"),
    ],
)
def test_functions_of_torch_suggest_the_nearest_keyword(
    name: str, misspelled: str, right: str
) -> None:
    with pytest.raises(TypeError, match=f"argument '{misspelled}'; did you mean '{right}'"):
        getattr(loadstone.torch, name)(**{misspelled: None})


def test_keywords_of_configs_and_unlike_ones_are_the_library_s(llama: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    for cls in (LlamaForCausalLM, AutoModelForCausalLM):
        model = loadstone.transformers.from_pretrained(
            cls, llama, rms_norm_eps=0.5, max_position_embeddings=64, num_labels=3
        )
        assert (model.config.rms_norm_eps, model.config.max_position_embeddings) == (0.5, 64)
    with pytest.raises(loadstone.PlanError, match="did you mean 'rms_norm_eps'"):
        loadstone.transformers.from_pretrained(LlamaForCausalLM, llama, rms_norm_epss=0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'a_word_of_its_own'"):
        loadstone.transformers.from_pretrained(LlamaForCausalLM, llama, a_word_of_its_own=1)


def test_names_of_loadstone_are_found_in_any_case_and_length(vae: Path) -> None:
    from diffusers import AutoencoderKL

    for wrong in ("lroa", "Lora", "LORA"):
        with pytest.raises(loadstone.PlanError, match="lora"):
            loadstone.diffusers.from_pretrained(AutoencoderKL, vae, **{wrong: "nowhere"})


def test_fields_of_a_folder_s_config_are_keywords(llama: Path) -> None:
    from transformers import LlamaForCausalLM

    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"hidden_sizes": 1}))
    model = loadstone.transformers.from_pretrained(LlamaForCausalLM, llama, hidden_sizes=2)
    assert model.config.hidden_sizes == 2
    with pytest.raises(loadstone.PlanError, match="did you mean 'hidden_size'"):  # control
        loadstone.transformers.from_pretrained(LlamaForCausalLM, llama, hidden_siez=2)


def test_keywords_that_a_constructor_hands_to_its_base_pass() -> None:
    class Base:
        def __init__(self, thread: int = 0, other: int = 0) -> None: ...

    class Own(Base):
        def __init__(self, **kwargs: int) -> None: ...

    refuse_misspelled(["thread", "tokenizer_2"], ["threads", "tokenizer"], [Own])
    for cls in (Base, type("Closed", (Base,), {"__init__": lambda self, thing=0: None})):
        with pytest.raises(loadstone.PlanError, match="threads"):
            refuse_misspelled(["thraeds"], ["threads"], [cls])
    with pytest.raises(loadstone.PlanError, match="threads"):
        refuse_misspelled(["thread"], ["threads"], [type("Closed", (Base,), {"__init__": print})])


def test_names_that_a_function_looks_up_are_its_keywords() -> None:
    def library(path: str, **kwargs: Any) -> Any:
        return kwargs.pop("offload_places", None), path

    def refused(name: str) -> bool:
        try:
            refuse_misspelled([name], ["threads"], [library])
        except loadstone.PlanError as error:
            assert (error.code, error.field) == ("plan.options", name)
            return True
        return False

    assert [refused(each) for each in ("offload_place", "paths", "thread", "trheads")] == [True] * 4
    assert not any(map(refused, ("offload_places", "path", "threads", "places", "kw")))


@pytest.mark.parametrize("door", ["load_checkpoint_in_model", "load_checkpoint_and_dispatch"])
def test_functions_keep_their_signature(door: str) -> None:
    """Tools and the libraries' patches inspect the signature."""
    names = list(inspect.signature(getattr(loadstone.accelerate, door)).parameters)
    assert names[:2] == ["model", "checkpoint"] and "receipt" in names
