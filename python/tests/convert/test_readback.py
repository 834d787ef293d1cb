"""Every output of ``loadstone convert``, read back by loadstone, against the decoding of the
library that defines the layout, bit for bit.

``readback_cells`` has the matrix and ``readback_oracles`` the values. Foreign readers are tested in
``test_opens_where.py``.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import readback_foreign as foreign
import torch
from codec_models import assert_equal
from command import run
from readback_cells import (
    SOURCES,
    Cell,
    Output,
    Source,
    cells,
    model_state,
    refused,
    tensors_of,
    write_cell,
    write_source,
)
from readback_oracles import numbers_in

import loadstone

transformers = pytest.importorskip("transformers")
pytest.importorskip("modelopt")

ours = loadstone.transformers.from_pretrained
BF16 = torch.bfloat16


class Outputs:
    """Sources and outputs of conversions, each written on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources: dict[Source, Path] = {}
        self.cells: dict[Cell, Output] = {}

    def source(self, source: Source) -> Path:
        if source not in self.sources:
            self.sources[source] = write_source(source, self.root / str(source))
        return self.sources[source]

    def of(self, cell: Cell) -> Output:
        if cell not in self.cells:
            folder = self.root / str(cell)
            self.cells[cell] = write_cell(cell, self.source(cell.source), folder)
        return self.cells[cell]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(tmp_path_factory.mktemp("cells"))


def each_cell(
    is_taken: Callable[[Source], bool] = lambda source: True,
    with_doors: Sequence[Callable[[Path], Any]] = (),
) -> Any:
    """Parametrize a test with the cells whose source matches; skip those without a library.

    The entry points rotate over the cells, so that each entry point meets all encodings, styles and
    sources.
    """
    found = []
    for number, cell in enumerate(each for each in cells() if is_taken(each.source)):
        library = "compressed_tensors" if cell.style == "compressed-tensors" else "bitsandbytes"
        is_absent = cell.style != "modelopt" and importlib.util.find_spec(library) is None
        absent = pytest.mark.skipif(is_absent, reason=f"{library} is not installed")
        turn = sum(divmod(number, len(SOURCES)))
        doors = [with_doors[turn % len(with_doors)]] if with_doors else []
        words = "-".join([str(cell), *(door.__name__ for door in doors)])
        found.append(pytest.param(*[cell, *doors], id=words, marks=[absent]))
    return pytest.mark.parametrize("cell,door" if with_doors else "cell", found)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


# ---- without a library


@each_cell()
def test_verify_finds_nothing(cell: Cell, outputs: Outputs) -> None:
    done = run("verify", outputs.of(cell).folder)
    assert done.returncode == 0, done.stdout + done.stderr


@each_cell()
def test_verify_compares_source_and_output(cell: Cell, outputs: Outputs) -> None:
    done = run("verify", outputs.source(cell.source), outputs.of(cell).folder)
    assert done.returncode == 0, done.stdout + done.stderr


@each_cell()
def test_dequantized_back(cell: Cell, outputs: Outputs, tmp_path: Path) -> None:
    output = outputs.of(cell)
    loadstone.convert(output.folder, tmp_path / "back", dequantize=True)
    assert_equal(tensors_of(tmp_path / "back"), output.numbers)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config


# ---- with transformers


@each_cell()
def test_from_pretrained_dequantizes(cell: Cell, outputs: Outputs) -> None:
    output = outputs.of(cell)
    expected = model_state(output.numbers, cell.source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = ours(
            transformers.AutoModelForCausalLM,
            output.folder,
            dequantize=True,
            output_loading_info=True,
        )
    assert not any(info.values()), info
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    assert loadstone.audit(model).ok
    assert_equal(state_of(model), expected)
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@each_cell(is_taken=lambda source: source == Source("qwen3_moe", shard_size=200_000))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_dtype_is_rounded_to_once(cell: Cell, outputs: Outputs, dtype: torch.dtype) -> None:
    """The loaded values are rounded once, from the exact values."""
    output = outputs.of(cell)
    model = ours(transformers.AutoModelForCausalLM, output.folder, dtype=dtype, dequantize=True)
    exact = {name: tensor.to(dtype) for name, tensor in output.exact.items()}
    assert_equal(state_of(model), model_state(exact, cell.source))


def load_by_rules(folder: Path) -> Any:
    """Load into a skeleton, with transformers' conversion rules."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with loadstone.skeleton():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    loadstone.load(model, folder, rules="transformers")
    return model


def load_patched(folder: Path) -> Any:
    with loadstone.patch("transformers"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def load_directly(folder: Path) -> Any:
    return ours(transformers.AutoModelForCausalLM, folder)


@each_cell(with_doors=(load_by_rules, load_patched, load_directly))
def test_doors_without_an_option(cell: Cell, outputs: Outputs, door: Any) -> None:
    """For outputs in bitsandbytes' style, transformers' loaders keep bitsandbytes' modules."""
    output = outputs.of(cell)
    model = door(output.folder)
    found = state_of(model)
    if cell.style is None and door is not load_by_rules:
        assert model.is_quantized
        model.dequantize()
        # The sign of fp4's decoded zeros depends on bitsandbytes' kernel for this machine.
        found = {name: tensor + 0.0 for name, tensor in state_of(model).items()}
    expected = model_state(output.numbers, cell.source)
    assert_equal({name: tensor.to(BF16) for name, tensor in found.items()}, expected)


# ---- by transformers alone


@each_cell()
def test_the_page_tells_what_transformers_makes_of_it(cell: Cell, outputs: Outputs) -> None:
    """If a new release of transformers reads more cells, update the documentation page."""
    pytest.importorskip("compressed_tensors")
    if (documented := foreign.documented_releases()) != foreign.releases():
        pytest.skip(f"the page is of {documented}")
    assert foreign.documented(cell) == foreign.outcome(cell, outputs.of(cell))


def unread(report: Any) -> list[str]:
    return [each.message for each in report.findings if each.code == "convert.unread"]


@each_cell()
def test_a_conversion_warns_of_what_transformers_does_not_read(
    cell: Cell, outputs: Outputs, tmp_path: Path
) -> None:
    """ModelOpt's style never causes the warning, because that style is for servers."""
    report = loadstone.convert(outputs.source(cell.source), tmp_path / "out", **cell.options)
    is_read = cell.style == "modelopt" or foreign.documented(cell) == "right"
    assert is_read == (not unread(report))


@pytest.mark.parametrize(
    "exclude", [r"experts\.1\.", r"experts\.1\.down", "gate_proj", "down_proj", "experts"]
)
def test_a_conversion_warns_of_experts_in_several_encodings(
    exclude: str, outputs: Outputs, tmp_path: Path
) -> None:
    """transformers does not read experts if only some of one layer are quantized."""
    pytest.importorskip("compressed_tensors")
    cell = Cell("fp8-channel", "compressed-tensors", Source("qwen3_moe", shard_size=200_000))
    out = tmp_path / "out"
    report = loadstone.convert(
        outputs.source(cell.source), out, quantize=cell.encoding, style=cell.style, exclude=exclude
    )
    outcome = foreign.outcome(cell, Output(out, numbers_in(out)))
    assert (outcome == "right") == (not unread(report))
    assert all("several encodings" in each for each in unread(report))
    assert ("1" in exclude) == bool(unread(report))


@pytest.mark.parametrize(
    ("mlp", "others"),
    [
        ("mxfp8", "fp8-channel"),
        ("nvfp4", "fp8"),
        ("fp8-channel", "fp8-block"),
        ("mxfp4", "nvfp4"),
        ("fp8", "int8-channel"),
        ("fp8-channel", "fp8"),
    ],
)
def test_a_conversion_warns_of_dense_layers_in_several_encodings(
    mlp: str, others: str, outputs: Outputs, tmp_path: Path
) -> None:
    """transformers dequantizes all dense layers by one scheme."""
    pytest.importorskip("compressed_tensors")
    cell = Cell("fp8", "compressed-tensors", Source("llama"))
    out = tmp_path / "out"
    options: Any = {"quantize": {"mlp": mlp, "": others}, "style": cell.style}
    report = loadstone.convert(outputs.source(cell.source), out, **options)
    outcome = foreign.outcome(cell, Output(out, numbers_in(out)))
    assert (outcome == "right") == (not unread(report))
    assert all(f"({', '.join(sorted([mlp, others]))})" in each for each in unread(report))
    words = [f"--quantize=mlp={mlp}", f"--quantize={others}", "--style=compressed-tensors"]
    said = run("convert", outputs.source(cell.source), tmp_path / "again", *words).stderr
    assert ("[convert.unread]" in said) == bool(unread(report))


@pytest.mark.parametrize("encoding", ["fp8", "fp8-channel", "fp8-block", "int8-channel", "mxfp4"])
def test_a_repack_warns_of_what_transformers_does_not_read(
    encoding: str, outputs: Outputs, tmp_path: Path
) -> None:
    """The codes of another style have the same readers as codes that are made in this style."""
    source = Source("qwen3_moe", "fused")
    served = outputs.of(Cell(encoding, "modelopt", source)).folder
    is_read = foreign.documented(Cell(encoding, "compressed-tensors", source)) == "right"
    report = loadstone.convert(served, tmp_path / "out", style="compressed-tensors")
    assert is_read == (not unread(report))
    words = [served, tmp_path / "by command", "--style", "compressed-tensors"]
    assert is_read == ("[convert.unread]" not in run("convert", *words).stderr)


GPT_OSS: Any = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("options", "is_read"),
    [
        ({"quantize": "nvfp4"}, True),
        ({"quantize": "fp8", "style": "compressed-tensors", "exclude": "experts"}, True),
        ({"quantize": "nf4"}, True),
        ({"quantize": "nvfp4", "experts": "separate"}, False),
        ({"quantize": "nvfp4", "experts": "separate", "exclude": "experts"}, False),
        ({"quantize": "fp8", "style": "compressed-tensors", "experts": "separate"}, False),
        ({"quantize": "nf4", "experts": "separate"}, False),
    ],
)
def test_a_conversion_warns_of_single_experts_of_gpt_oss(
    options: Any, is_read: bool, tmp_path: Path
) -> None:
    """Nothing joins them again, in any style. The advised outputs open."""
    pytest.importorskip("compressed_tensors")
    config = transformers.AutoConfig.for_model("gpt_oss", **GPT_OSS)
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(0, 0.05)
    source.save_pretrained(tmp_path / "source")
    report = loadstone.convert(tmp_path / "source", tmp_path / "out", **options)
    assert is_read == (not unread(report))
    quantized = "exclude" not in options and not is_read
    assert any("nor loadstone joins" in each for each in unread(report)) >= quantized

    def holds(model: Any) -> bool:
        name = "model.layers.0.mlp.experts.down_proj"
        found, expected = (each.get_parameter(name).float() for each in (model, source))
        return bool((found - expected).norm() < 0.2 * expected.norm())

    assert holds(load_directly(tmp_path / "out")) == is_read
    if options.get("style") or options["quantize"] == "nf4":
        assert holds(foreign.load_alone(tmp_path / "out")[0]) == is_read


# ---- rejected


@pytest.mark.parametrize(("encoding", "style"), refused())
def test_a_style_that_does_not_hold_an_encoding_is_refused(
    encoding: str, style: str, outputs: Outputs, tmp_path: Path
) -> None:
    source = outputs.source(Source("llama"))
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out", quantize=encoding, style=style)
    assert caught.value.code == "plan.options"
    message = str(caught.value)
    assert encoding in message and (style in message or "a TARGET that ends in .gguf" in message)
    assert not list(tmp_path.iterdir())
