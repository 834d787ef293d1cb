"""Regression tests: calls that work in the libraries must work under ``loadstone.patch``."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import bitsandbytes as bnb
import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import loadstone
from loadstone._base import torch_modes

BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def tiny_vae(tmp_path: Path) -> Path:
    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    model.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


def in_thread(function):
    """Run the function in a thread, and fail if it hangs."""
    done = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    assert done, "the call in the other thread did not come to its end"
    return done[0]


# --- one construction at a time ------------------------------------------------------------------


def test_a_dtype_that_is_refused_leaves_no_lock_behind(bert):
    healing = loadstone.patch("transformers").start()
    try:
        with pytest.raises(ValueError, match="floating"):
            BertModel.from_pretrained(bert, dtype=torch.int64)
        model = in_thread(lambda: BertModel.from_pretrained(bert))
    finally:
        healing.stop()
    assert loadstone.audit(model).ok


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_construction_that_fails_leaves_the_default_dtype(library, bert, tiny_vae, monkeypatch):
    cls, folder = {
        "transformers": (BertModel, bert),
        "diffusers": (diffusers.AutoencoderTiny, tiny_vae),
    }[library]

    def fail(self, *args, **kwargs):
        raise ZeroDivisionError(torch.get_default_dtype())

    monkeypatch.setattr(cls, "__init__", fail)
    name = "dtype" if library == "transformers" else "torch_dtype"
    with loadstone.patch(library), pytest.raises(ZeroDivisionError, match="bfloat16"):
        cls.from_pretrained(folder, **{name: torch.bfloat16})
    assert torch.get_default_dtype() == torch.float32


class SlowConfig(PretrainedConfig):
    model_type = "loadstone_slow"


class Slow(PreTrainedModel):
    """A model whose second construction, needed because the file lacks ``gain``, waits."""

    config_class = SlowConfig
    constructed = 0
    inside, other_done = threading.Event(), threading.Event()

    def __init__(self, config):
        super().__init__(config)
        self.lin = torch.nn.Linear(8, 8)
        self.gain = torch.nn.Parameter(torch.ones(8))
        self.post_init()
        type(self).constructed += 1
        if type(self).constructed == 2:
            self.inside.set()
            self.other_done.wait(1)  # times out, because the other thread must wait for this one

    def _init_weights(self, module):
        pass


class Other(PreTrainedModel):
    config_class = SlowConfig

    def __init__(self, config):
        super().__init__(config)
        self.lin = torch.nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)
        self.post_init()


def test_two_threads_with_two_dtypes_get_their_own(tmp_path):
    slow = Slow(SlowConfig())
    slow.save_pretrained(tmp_path / "slow")
    state = {name: value for name, value in slow.state_dict().items() if name != "gain"}
    save_file(state, tmp_path / "slow" / "model.safetensors", metadata={"format": "pt"})
    Other(SlowConfig()).save_pretrained(tmp_path / "other")
    Slow.constructed = 0
    load = loadstone.transformers.from_pretrained
    got = {}

    def first():
        got["slow"] = load(Slow, tmp_path / "slow", dtype=torch.bfloat16)

    def second():
        Slow.inside.wait(60)
        got["other"] = load(Other, tmp_path / "other", dtype=torch.float16)
        Slow.other_done.set()

    threads = [threading.Thread(target=each, daemon=True) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Slow.constructed == 2
    assert {each.dtype for each in got["slow"].parameters()} == {torch.bfloat16}
    assert got["other"].table.dtype == got["other"].lin.weight.dtype == torch.float16
    assert torch.get_default_dtype() == torch.float32


def test_the_librarys_own_constructions_take_their_turn_too(bert):
    with loadstone.patch("transformers"), torch_modes.constructing(torch.float64):
        thread = threading.Thread(target=lambda: got.append(BertModel.from_pretrained(bert)))
        got: list[BertModel] = []
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()  # the unpatched thread waits for this thread's patch
    thread.join(60)
    assert got[0].embeddings.word_embeddings.weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with torch_modes.constructing():
            inside.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch_modes._lock.acquire(timeout=5) else 1)
    leave.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


# --- inside torch.inference_mode() ---------------------------------------------------------------


def test_models_load_inside_inference_mode(bert, tiny_vae):
    for cls, folder in ((BertModel, bert), (diffusers.AutoencoderTiny, tiny_vae)):
        expected = cls.from_pretrained(folder).state_dict()
        with loadstone.patch("transformers", "diffusers"), torch.inference_mode():
            model = cls.from_pretrained(folder)
            assert torch.is_inference_mode_enabled()
        assert loadstone.audit(model).ok
        assert expected.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name
            assert not value.is_inference()


def test_ordinary_tensors_leaves_the_recording_of_gradients_as_it_is():
    with torch.inference_mode(), torch_modes.ordinary_tensors():
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    with torch_modes.ordinary_tensors():
        assert torch.is_grad_enabled()


# --- weights of bitsandbytes ---------------------------------------------------------------------


def test_the_first_int8_load_under_patch(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    wanted = BitsAndBytesConfig(load_in_8bit=True)
    with loadstone.patch("transformers", "bitsandbytes"):
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=wanted)
    assert model.model.layers[0].mlp.up_proj.weight.SCB.shape == (48,)


def test_tracing_leaves_the_attributes_of_weights(tmp_path):
    """If tracing changed the attributes, the load in the test above could fail."""
    from types import SimpleNamespace

    from transformers.integrations.bitsandbytes import Bnb8bitQuantize

    from loadstone._adapters.transformers import kernels

    model = torch.nn.Module()
    model.lin = bnb.nn.Linear8bitLt(32, 16, has_fp16_weights=False)
    model.lin.source_cls = torch.nn.Linear
    model.get_parameter_or_buffer = model.get_parameter
    before = dict(vars(model.lin.weight))
    quantizer = SimpleNamespace(get_quantize_ops=lambda: Bnb8bitQuantize(None))
    operation = kernels.quantize_operation(quantizer, None)
    operation.convert({"lin.weight": [torch.zeros(16, 32)]}, model=model)
    assert vars(model.lin.weight) == before and "SCB" in before


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: bnb.nn.Linear8bitLt(32, 64, has_fp16_weights=False),
        lambda: bnb.nn.Linear8bitLt(32, 64),
        lambda: bnb.nn.LinearNF4(32, 64),
    ],
)
def test_detached_weights_require_no_gradient(make, is_quantized):
    with loadstone.patch("bitsandbytes"):
        layer = make()
        if is_quantized:
            layer = layer.to("cpu")
        elif isinstance(layer.weight, bnb.nn.Params4bit):
            layer.weight.requires_grad_(True)
        weight, requires = layer.weight, layer.weight.requires_grad
        detached = weight.detach()
        assert not detached.requires_grad and detached.is_leaf
        assert detached.data_ptr() == weight.data_ptr()
        assert not layer.state_dict()["weight"].requires_grad
        assert weight.requires_grad == requires


@pytest.mark.parametrize("width", [32, 64])
def test_a_bias_is_cast_for_good(width):
    def bias_after():
        layer = bnb.nn.LinearNF4(width, 64).to("cpu")
        layer(torch.randn(4, width, dtype=torch.float16))
        return layer.bias.dtype

    with loadstone.patch("bitsandbytes"):
        assert bias_after() == torch.float16


def test_the_class_of_a_weight_is_the_librarys():
    with loadstone.patch("bitsandbytes"):
        four = bnb.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu").weight
        eight = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu").weight
    assert four.__class__ == bnb.nn.Params4bit and isinstance(four, bnb.nn.Params4bit)
    assert eight.__class__ == bnb.nn.Int8Params
    assert type(four) is not bnb.nn.Params4bit  # still patched
    moved = four.to("meta")
    assert moved.quant_state.absmax.is_meta and not four.quant_state.absmax.is_meta


# --- errors that callers catch -------------------------------------------------------------------


def test_a_misfit_is_what_the_libraries_raise(bert):
    with loadstone.patch("transformers"):
        for kind in (RuntimeError, ValueError, loadstone.PlanError):
            with pytest.raises(kind, match=r"plan\.shape"):
                BertForSequenceClassification.from_pretrained(bert, vocab_size=98)


def test_a_missing_shard_is_a_file_that_is_not_found(tmp_path):
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with loadstone.patch("transformers"):
        for kind in (OSError, FileNotFoundError, loadstone.Error):
            with pytest.raises(kind, match=r"missing_shard|not found|No such"):
                BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("ix.missing_shard", (loadstone.FormatError, FileNotFoundError)),
        ("st.hole", (loadstone.FormatError, OSError, ValueError)),
        ("io.not_found", (loadstone.LoadError, FileNotFoundError)),
        ("io.denied", (loadstone.LoadError, PermissionError)),
        ("io.read", (loadstone.LoadError, OSError)),
        ("memory.host", (loadstone.LoadError, MemoryError)),
        ("plan.shape", (loadstone.PlanError, RuntimeError, ValueError)),
        ("cancelled", (loadstone.LoadError,)),
    ],
)
def test_errors_are_ours_and_pythons(code, kinds):
    from loadstone._base import errors

    error = errors.from_core("f.bin: wrong", code, "wrong", "f.bin", "", 7, "", "", "", 5)
    assert all(isinstance(error, kind) for kind in kinds)
    assert isinstance(error, loadstone.Error) and str(error) == "f.bin: wrong"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert (again.code, again.path, again.byte_offset, again.errno) == (code, "f.bin", 7, 5)
    assert isinstance(error, OSError) == (code.partition(".")[0] in ("st", "ix", "io"))


# --- models that stay on meta --------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["meta", torch.device("meta"), {"": "meta"}])
def test_a_model_that_is_wanted_on_meta_stays_there(device_map, bert):
    ours = loadstone.transformers.from_pretrained
    options = {"device_map": device_map, "output_loading_info": True}
    library, wanted = BertModel.from_pretrained(bert, **options)
    with loadstone.patch("transformers"):
        patched = BertModel.from_pretrained(bert, **options)
    expected = {name: (each.device, each.shape) for name, each in library.state_dict().items()}
    for model, info in (patched, ours(BertModel, bert, **options)):
        assert {name: (t.device, t.shape) for name, t in model.state_dict().items()} == expected
        assert loadstone.audit(model).on_meta and info == wanted
    assert {device.type for device, _ in expected.values()} == {"meta"}
    with pytest.raises(loadstone.Error, match="meta with other devices"):
        ours(BertModel, bert, device_map={"embeddings": "cpu", "encoder": "meta", "pooler": "cpu"})


# --- series of experts ---------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def changed(experts: Path, tmp_path: Path, renamed: dict[str, str | None]) -> Path:
    state = load_file(experts / "model.safetensors")
    for old, new in renamed.items():
        value = state.pop(f"{EXPERTS}{old}.weight")
        if new is not None:
            state[f"{EXPERTS}{new}.weight"] = value
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        (
            {"1.up_proj": "4.up_proj"},
            ("lacks expert 1:", "1.up_proj", "outside the series", "4.up_proj"),
        ),
        ({"3.up_proj": "4000000000.up_proj"}, ("lacks expert 3:", "4000000000.up_proj")),
        ({"2.up_proj": None, "3.up_proj": f"{'9' * 400}.up_proj"}, ("lacks experts 2 and 3:",)),
        ({"3.up_proj": f"{'9' * 5000}.up_proj"}, ("sort", "digits")),
        ({f"2.{each}_proj": f"7.{each}_proj" for each in ("up", "gate")}, ("lacks expert 2:",)),
        ({f"1.{each}_proj": f"01.{each}_proj" for each in ("gate", "up", "down")}, ()),
    ],
)
def test_experts_are_paired_by_their_numbers(experts, tmp_path, renamed, words):
    folder = changed(experts, tmp_path, renamed)
    if not words:
        model = loadstone.transformers.from_pretrained(Qwen3MoeForCausalLM, folder)
        whole = loadstone.transformers.from_pretrained(Qwen3MoeForCausalLM, experts)
        for name, value in whole.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        return
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.transformers.from_pretrained(Qwen3MoeForCausalLM, folder)
    text = " ".join(each.message for each in caught.value.findings) or str(caught.value)
    assert all(word in text for word in words), text[:2000]


def test_two_experts_of_one_number_are_refused(experts, tmp_path):
    state = load_file(experts / "model.safetensors")
    for each in ("gate", "up", "down"):
        state[f"{EXPERTS}01.{each}_proj.weight"] = state[f"{EXPERTS}1.{each}_proj.weight"] + 1
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(loadstone.PlanError, match=r"plan\.conversion") as caught:
        loadstone.transformers.from_pretrained(Qwen3MoeForCausalLM, tmp_path)
    assert any("01." in each.message or "1." in each.message for each in caught.value.findings)


def test_a_config_that_claims_many_experts_costs_nothing(experts, tmp_path):
    folder = changed(experts, tmp_path, {"3.up_proj": None})
    text = (
        (folder / "config.json").read_text().replace('"num_experts": 4', '"num_experts": 90000000')
    )
    (folder / "config.json").write_text(text)
    with pytest.raises(loadstone.PlanError, match=r"plan\.missing") as caught:
        loadstone.transformers.from_pretrained(Qwen3MoeForCausalLM, folder)
    assert max(len(each.sources) for each in caught.value.findings) <= 64


def test_a_load_draws_as_many_random_numbers_as_the_librarys(tmp_path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=8,
    )  # fmt: skip
    ViTModel(config).save_pretrained(tmp_path)
    following = []
    for load in (ViTModel.from_pretrained, loadstone.transformers.from_pretrained):
        torch.manual_seed(0)
        load(*((tmp_path,) if load == ViTModel.from_pretrained else (ViTModel, tmp_path)))
        following.append(torch.rand(3))
    assert torch.equal(*following)


def test_numbers_that_a_converter_would_count_to_are_refused(tmp_path):
    from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint
    from loadstone._adapters.diffusers.conversion import require_series

    for number, is_refused in ((4_000_000_000, True), ("9" * 5000, True), (9999, False)):
        path = tmp_path / "model.safetensors"
        save_file({f"double_blocks.{number}.img_attn.qkv.weight": torch.zeros(2)}, path)
        checkpoint = SymbolicCheckpoint.open([str(path)])
        if is_refused:
            with pytest.raises(loadstone.PlanError, match=r"plan\.conversion"):
                require_series(checkpoint)
        else:
            require_series(checkpoint)
