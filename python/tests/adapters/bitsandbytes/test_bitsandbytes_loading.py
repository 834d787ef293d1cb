"""Tests that weights quantized during a load equal the libraries' own bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_state, library_load
from safetensors.torch import load_file, save_file

pytest.importorskip("bitsandbytes")
import bitsandbytes as bnb
from bitsandbytes_checkpoints import KINDS, MODELS, assert_same, change, config, plain, raw
from pairs import pairs
from transformers_models import by_name

import loadstone

ours = loadstone.transformers.from_pretrained
WEIGHT = "model.layers.0.mlp.up_proj.weight"

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [
    *(("llama", kind, torch.bfloat16) for kind in KINDS),
    *((name, "nf4 nested", torch.bfloat16) for name in MODELS[1:]),
    ("gpt2", "int8", torch.bfloat16),
    ("llama", "nf4", torch.float32),
    ("llama", "int8", torch.float16),
]
REST = [
    (name, kind, dtype)
    for name in MODELS
    for kind in KINDS
    for dtype in DTYPES
    if (name, kind, dtype) not in ROWS
]


def offsets(model: torch.nn.Module) -> dict[str, float]:
    """Return the offsets that bitsandbytes subtracted from nested scales."""
    return {
        name: parameter.quant_state.offset.item()
        for name, parameter in model.named_parameters()
        if getattr(getattr(parameter, "quant_state", None), "nested", False)
    }


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.sweep) for row in REST)],
    ids=name_of,
)
def test_a_model_is_as_the_library_quantizes_it(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    cls, folder = by_name(name).cls, plain(name, tmp_path)
    library = library_load(cls, folder, quantization_config=config(kind), dtype=dtype)
    given = offsets(library.model)
    for _ in range(2):  # the second time with recipes from the cache
        model, info = ours(
            cls,
            folder,
            quantization_config=config(kind),
            dtype=dtype,
            nested_offset=given,
            output_loading_info=True,
        )
        assert_same_state(model, library.model, info, library.info)
        assert_same(model, library.model)
        loadstone.audit(model).require_real()


def test_without_an_offset_nested_scales_are_those_of_the_exact_mean(tmp_path: Path) -> None:
    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    model = ours(cls, folder, quantization_config=config("nf4 nested"))
    library = cls.from_pretrained(folder, quantization_config=config("nf4 nested"))
    numbers = load_file(folder / "model.safetensors")
    names = list(offsets(library))
    assert len(names) == 14
    for name in names:
        weight, theirs = model.get_parameter(name), library.get_parameter(name)
        assert torch.equal(weight.data, theirs.data)
        parts = loadstone.quantize(numbers[name], "nf4", nested=True).parts
        state = weight.quant_state
        assert torch.equal(weight.data, parts["data"])
        assert torch.equal(state.absmax, parts["absmax"])
        assert torch.equal(state.offset, parts["nested_offset"])
        assert torch.equal(state.state2.absmax, parts["nested_absmax"])


def test_no_weight_is_quantized_by_bitsandbytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("bitsandbytes computes")

    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    for name in ("quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant"):
        monkeypatch.setattr(bnb.functional, name, forbidden)
    for kind in KINDS:
        ours(cls, folder, quantization_config=config(kind))
        with pytest.raises(RuntimeError, match="conversion of the weights"):  # control
            cls.from_pretrained(folder, quantization_config=config(kind))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_loads_under_a_patch(kind: str, tmp_path: Path) -> None:
    cls, folder = by_name("gpt2").cls, plain("gpt2", tmp_path)
    library = cls.from_pretrained(folder, quantization_config=config(kind))
    assert loadstone.audit(library).unaccounted  # control: transformers' own load
    with loadstone.patch("transformers"):
        model = cls.from_pretrained(folder, quantization_config=config(kind))
    assert_same(model, library)
    assert loadstone.audit(model).ok


def test_the_report_says_what_was_quantized(tmp_path: Path) -> None:
    model = ours(
        by_name("llama").cls, plain("llama", tmp_path), quantization_config=config("nf4 nested")
    )
    known = loadstone.audit(model).provenance
    state = f"{WEIGHT}.quant_state"
    assert (known[WEIGHT].encoding, known[WEIGHT].dtype) == ("nf4", "BF16")
    assert [each.tensor for each in known[WEIGHT].sources] == [WEIGHT]
    origins = {name: item.origin for name, item in known.items() if name.startswith(state)}
    assert origins == {
        f"{state}.absmax": "checkpoint",
        f"{state}.offset": "checkpoint",
        f"{state}.state2.absmax": "checkpoint",
        f"{state}.code": "constant",
        f"{state}.state2.code": "constant",
    }
    assert known["lm_head.weight"].encoding == ""


def test_skipped_modules_and_the_threshold_are_the_configuration_s(tmp_path: Path) -> None:
    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    chosen = config("int8", llm_int8_skip_modules=["up_proj"], llm_int8_threshold=3.5)
    model = ours(cls, folder, quantization_config=chosen)
    assert_same(model, cls.from_pretrained(folder, quantization_config=chosen))
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.lm_head.state.threshold == 3.5


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(kind: str, number: float, tmp_path: Path) -> None:
    folder = plain("llama", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT][3, 5] = number

    change(folder, spoil)
    model = ours(by_name("llama").cls, folder, quantization_config=config(kind))
    report = loadstone._execute.audit.last_report(model)
    assert [f.target for f in report.findings if f.code == "q.nan"] == [WEIGHT]


def test_what_is_no_quantization_is_refused(tmp_path: Path) -> None:
    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    chosen = config("int8", llm_int8_has_fp16_weight=True)
    with pytest.raises(loadstone.Error, match="has_fp16_weight"):
        ours(cls, folder, quantization_config=chosen)


def test_a_layer_without_numbers_is_refused(tmp_path: Path) -> None:
    """transformers would initialise this layer without quantizing it, so the model would fail."""
    folder = plain("llama", tmp_path)
    change(folder, lambda tensors: tensors.pop(WEIGHT))
    with pytest.raises(
        loadstone.PlanError, match="only weights of the checkpoint can be quantized"
    ):
        ours(by_name("llama").cls, folder, quantization_config=config("nf4"))


# --- any module ----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64, bias=False)
        )
        self.twice = torch.nn.ModuleList([self.body[0]])
        self.norm = torch.nn.LayerNorm(64)
        self.lm_head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.body(x)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(4)
    state = Net().to(torch.bfloat16).state_dict()
    state.pop("twice.0.weight"), state.pop("twice.0.bias")
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def skeleton(dtype: torch.dtype = torch.bfloat16) -> Net:
    with loadstone.skeleton():
        return Net().to(dtype)


def quantized_by_library(file: Path, encoding: str, paths: list[str]) -> Net:
    """Return the network with bitsandbytes layers, quantized by bitsandbytes itself."""
    model = Net().to(torch.bfloat16)
    tensors = load_file(file)
    tensors |= {f"twice.0.{name}": tensors[f"body.0.{name}"] for name in ("weight", "bias")}
    model.load_state_dict(tensors)
    for path in paths:
        old = model.get_submodule(path)
        size = (old.in_features, old.out_features, old.bias is not None)
        new: Any
        if encoding == "int8":
            new = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
            new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False).to("cpu")
        else:
            new = bnb.nn.Linear4bit(*size, quant_type=encoding, compress_statistics=False)
            made = bnb.nn.Params4bit(
                old.weight.data, quant_type=encoding, compress_statistics=False, module=new
            )
            new.weight = made.to("cpu")
        new.bias = old.bias
        model.set_submodule(path, new)
    model.twice[0] = model.body[0]
    return model


@pytest.mark.parametrize("encoding", ["nf4", "fp4", "int8"])
def test_linear_layers_of_any_module(encoding: str, file: Path) -> None:
    model = skeleton()
    report = loadstone.load(model, file, quantize=encoding)
    library = quantized_by_library(file, encoding, ["body.0", "body.2"])
    assert model.twice[0] is model.body[0]
    assert type(model.lm_head) is torch.nn.Linear
    assert_same(model, library)
    assert {report.provenance[f"body.{i}.weight"].encoding for i in (0, 2)} == {encoding}
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), library.eval()(x))


def test_patterns_choose_exactly_what_they_match(file: Path) -> None:
    model = skeleton()
    chosen = {"lm_head": "int8", r"body\.2\.weight": loadstone.Quantization("nf4", nested=True)}
    loadstone.load(model, file, quantize=chosen)
    assert isinstance(model.lm_head, bnb.nn.Linear8bitLt)
    assert isinstance(model.body[2], bnb.nn.Linear4bit)
    assert model.body[2].weight.quant_state.nested
    assert type(model.body[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("quantize", "word"),
    [("nf5", "nf5"), ({"nothing": "nf4"}, "nothing"), ({"(": "nf4"}, r"\("), (4, "4")],
)
def test_choices_that_mean_nothing_are_refused(quantize: Any, word: str, file: Path) -> None:
    with pytest.raises(loadstone.Error, match=word) as caught:
        loadstone.plan(skeleton(), file, quantize=quantize)
    assert caught.value.code == "plan.options"


def test_a_model_is_as_it_was_until_the_last_byte(file: Path) -> None:
    model = skeleton()
    before = {name: id(module) for name, module in model.named_modules()}
    plan = loadstone.plan(model, file, quantize="nf4")
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-100])  # the plan exists already, so only its execution fails
    with pytest.raises(loadstone.LoadError):
        plan.execute()
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all(parameter.is_meta for parameter in model.parameters())
    file.write_bytes(data)  # control
    loadstone.plan(model, file, quantize="nf4").execute()
    assert {name: id(module) for name, module in model.named_modules()} != before


@pytest.mark.parametrize("dtype", ["float16", torch.float32])
def test_numbers_are_cast_before_they_are_quantized(dtype: Any, file: Path) -> None:
    model = skeleton()
    loadstone.load(model, file, dtype=dtype, quantize="nf4")
    kind = getattr(torch, name_of(dtype))
    wanted = loadstone.quantize(load_file(file)["body.0.weight"].to(kind), "nf4")
    weight = model.body[0].weight
    assert weight.quant_state.dtype == model.norm.weight.dtype == kind
    assert torch.equal(weight.data, wanted.parts["data"])
    assert torch.equal(weight.quant_state.absmax, wanted.parts["absmax"])


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [None, "float32", "auto"])
def test_what_is_stored_quantized_goes_in_as_it_is(
    encoding: str, dtype: Any, file: Path, tmp_path: Path
) -> None:
    """Codes load into plain layers, and into layers of bitsandbytes."""
    source = skeleton()
    loadstone.load(source, file, quantize=encoding)
    stored = tmp_path / "stored.safetensors"
    state = {k: v.contiguous() for k, v in source.state_dict().items() if "twice" not in k}
    save_file(state, stored)
    first, second = skeleton(), skeleton()
    loadstone.load(first, stored, quantize=encoding, dtype=dtype)
    with torch.device("meta"):
        for index, bias in ((0, True), (2, False)):
            old = second.body[index]
            size = (old.in_features, old.out_features, bias)
            second.body[index] = (
                bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
                if encoding == "int8"
                else bnb.nn.Linear4bit(*size, quant_type=encoding)
            ).to(torch.bfloat16)
    second.twice[0] = second.body[0]
    loadstone.load(second, stored, dtype=dtype)
    for model in (first, second):
        for index in (0, 2):
            weight, wanted = model.body[index].weight, source.body[index].weight
            assert torch.equal(raw(weight), raw(wanted))
            if encoding == "nf4":
                assert torch.equal(weight.quant_state.absmax, wanted.quant_state.absmax)
            else:
                assert torch.equal(weight.SCB, wanted.SCB)
        loadstone.audit(model).require_real()
        assert model.norm.weight.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)


def test_another_encoding_than_the_stored_one_is_refused(file: Path, tmp_path: Path) -> None:
    source = skeleton()
    loadstone.load(source, file, quantize="nf4")
    state = {k: v.contiguous() for k, v in source.state_dict().items() if "twice" not in k}
    save_file(state, tmp_path / "stored.safetensors")
    plan = loadstone.plan(skeleton(), tmp_path / "stored.safetensors", quantize="fp4")
    found = [f for f in plan.findings if f.severity == "error"]
    assert {f.code for f in found} == {"plan.quantize"}
    assert "stored as nf4" in found[0].message


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_layers_on_disk_are_brought_whole(encoding: str, file: Path, tmp_path: Path) -> None:
    import accelerate

    whole = skeleton().eval()
    loadstone.load(whole, file, quantize=encoding)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = loadstone.bitsandbytes.heal(whole)(x)
    model, offload = skeleton().eval(), tmp_path / "offload"
    model.twice = whole.twice = None  # accelerate's device maps accept one path per module
    places = {"body": "disk", "norm": "cpu", "lm_head": "cpu"}
    loadstone.load(model, file, quantize=encoding, device_map=places, offload_folder=offload)
    assert model.body[0].weight.is_meta
    accelerate.dispatch_model(model, places, offload_dir=offload)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected)


def test_a_plan_from_a_file_does_not_quantize_into_a_model(file: Path, tmp_path: Path) -> None:
    model = skeleton()
    loadstone.plan(model, file, quantize="nf4").save(tmp_path / "plan.json")
    plan = loadstone.Plan.load(tmp_path / "plan.json")
    with pytest.raises(loadstone.Error, match="needs a new plan with quantize="):
        plan.execute(model=model)
    assert all(parameter.is_meta for parameter in model.parameters())


# --- experts in one tensor -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    pairs(
        ["mixtral", "qwen3_moe"],
        ["nf4", "nf4 nested", "fp4"],
        ["eager", "grouped_mm", "batched_mm"],
    ),
)
def test_stacks_of_experts_compute_what_their_numbers_do(
    name: str, kind: str, implementation: str, tmp_path: Path
) -> None:
    cls, folder = by_name(name).cls, plain(name, tmp_path)
    options = {
        "quantization_config": config(kind),
        "experts_implementation": implementation,
    }
    stacked = ours(cls, folder, quantize_experts=True, **options)
    loadstone.audit(stacked).require_real()
    numbers = ours(cls, folder, **options)
    names = [each for each, _ in numbers.named_parameters() if ".experts." in each]
    assert names
    quantized = dict(stacked.named_parameters())
    for each in names:
        weight, plain_weight = quantized[each], numbers.get_parameter(each)
        assert isinstance(weight, bnb.nn.Params4bit)
        assert weight.nbytes * 4 == plain_weight.nbytes
        nested = kind == "nf4 nested"
        made = loadstone.quantize(
            plain_weight.data, config(kind).bnb_4bit_quant_type, nested=nested
        )
        assert torch.equal(weight.data, made.parts["data"])
        plain_weight.data.copy_(made.dequantize())
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(stacked(ids).logits, numbers(ids).logits)


def test_only_the_experts_that_are_chosen_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadstone._adapters.bitsandbytes.experts import QuantizedStack

    cls, folder = by_name("mixtral").cls, plain("mixtral", tmp_path)
    options = {"quantization_config": config("nf4"), "experts_implementation": "eager"}
    model = ours(cls, folder, quantize_experts=True, **options)
    # The model must run without the function that decodes all experts at once.
    monkeypatch.setattr(QuantizedStack, "dequantized", None)
    with torch.no_grad():
        model(torch.arange(3)[None])
    experts = model.model.layers[0].mlp.experts
    whole = ours(cls, folder, **options).model.layers[0].mlp.experts.down_proj.data
    numbers = loadstone.quantize(whole, "nf4").dequantize()
    assert torch.equal(experts.down_proj[2], numbers[2])
    assert torch.equal(experts.down_proj[torch.tensor([3, 0, 3])], numbers[[3, 0, 3]])


def test_experts_are_not_put_on_disk(tmp_path: Path) -> None:
    """The load rejects experts on disk, and both suggestions of its error work."""
    cls, folder = by_name("mixtral").cls, plain("mixtral", tmp_path)

    def load(devices: dict[str, str], quantize_experts: bool = True) -> Any:
        return ours(
            cls,
            folder,
            quantization_config=config("nf4"),
            quantize_experts=quantize_experts,
            device_map=devices,
            offload_folder=tmp_path / "offload",
        )

    devices, ids = {"": "cpu", "model.layers.1": "disk"}, torch.arange(7)[None]
    with pytest.raises(loadstone.PlanError, match=r"cannot be placed on disk[\s\S]*place its"):
        load(devices)
    for is_quantized, places in ((True, {"model.layers.1.mlp.experts": "cpu"}), (False, {})):
        model = load(devices | places, is_quantized)
        layer = model.model.layers[1]
        assert layer.self_attn.q_proj.weight.is_meta
        assert layer.mlp.experts.down_proj.is_meta != is_quantized
        whole = load({"": "cpu"}, is_quantized)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, whole(ids).logits)


def test_experts_are_left_alone_unless_asked_for(tmp_path: Path) -> None:
    cls, folder = by_name("mixtral").cls, plain("mixtral", tmp_path)
    model = ours(cls, folder, quantization_config=config("nf4"))
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    for options in ({}, {"quantization_config": config("int8")}):
        with pytest.raises(loadstone.Error, match="quantize_experts"):
            ours(cls, folder, quantize_experts=True, **options)


def test_patterns_choose_stacks_of_experts_too(tmp_path: Path) -> None:
    cls, folder = by_name("mixtral").cls, plain("mixtral", tmp_path)
    with loadstone.skeleton():
        model = cls(cls.config_class.from_pretrained(folder)).to(torch.bfloat16)
    loadstone.load(model, folder, rules="transformers", quantize={r".*\.experts\.down_proj": "nf4"})
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts._parameters["down_proj"], bnb.nn.Params4bit)
    assert experts.down_proj[1].shape == (64, 96)
    assert experts.gate_up_proj.dtype == torch.bfloat16


def test_the_audit_knows_what_a_forward_pass_lends(tmp_path: Path) -> None:
    """In a forward pass, bitsandbytes moves 8-bit codes and scales into the module's state."""
    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    chosen = config("int8", llm_int8_threshold=0.0)
    model = ours(cls, folder, quantization_config=chosen)
    with torch.no_grad():
        model(torch.arange(5)[None])
    layer = model.model.layers[0].mlp.up_proj
    assert layer.state.SCB is not None and layer.weight.SCB is None
    audit = loadstone.audit(model)
    audit.require_real()
    path = WEIGHT.removesuffix(".weight")
    assert audit.provenance[f"{path}.state.SCB"].tie_of == f"{WEIGHT}.SCB"
    layer.state.SCB = layer.state.SCB.clone()  # control: new memory, which no load has filled
    assert loadstone.audit(model).changed == [f"{path}.state.SCB"]
