"""Tests that one call or command converts a language model's folder to a GGUF file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp_golden as golden
import llama_cpp_oracle as oracle
import pytest
import torch
from command import COMMAND
from safetensors.torch import load_file, save_file

import loadstone
from loadstone._adapters.llama_cpp.converter import converter_at
from loadstone._adapters.llama_cpp.weights import Weights
from loadstone._command import command

CONVERTER = Path(__file__).parents[2] / "support" / "llama_cpp_converter"


@pytest.fixture(params=["Stack", "Sums"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a model folder for the tests' own small converter."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [request.param]}))
    torch.manual_seed(0)
    tensors = {name: torch.randn(3, 64, dtype=torch.bfloat16) for name in ("expert0", "expert1")}
    save_file(
        tensors | {"norm": torch.randn(5), "w": torch.randn(4, 32)}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("dtype", [None, "auto", torch.float16])
def test_in_one_call(model: Path, tmp_path: Path, dtype: Any) -> None:
    name = "F16" if dtype is torch.float16 else None
    own = oracle.written(converter_at(CONVERTER), model, tmp_path / "own.gguf", name)
    report = loadstone.convert(model, tmp_path / "out.gguf", dtype=dtype, converter=CONVERTER)
    oracle.require_same_files(tmp_path / "out.gguf", own)
    assert not [each for each in report.findings if each.severity != "info"]


@pytest.mark.parametrize(
    ("encoding", "name"), [("nf4", "w.weight.quant_map"), ("int8", "w.weight_format")]
)
def test_components_that_recipes_do_not_read_are_not_left_over(
    tmp_path: Path, encoding: str, name: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["Sums"]}')
    save_file({"w.weight": torch.randn(4, 64)}, source / "model.safetensors")
    model = tmp_path / "model"
    loadstone.convert(source, model, quantize=encoding, include="w")
    assert name in load_file(model / "model.safetensors")
    report = loadstone.convert(model, tmp_path / "out.gguf", converter=CONVERTER)
    assert not [each for each in report.findings if each.severity != "info"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path(COMMAND).is_file():
        pytest.skip("the command is not installed")
    monkeypatch.setattr(command, "_command", lambda: COMMAND)


@pytest.mark.usefixtures("installed")
def test_in_one_command(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = oracle.written(converter_at(CONVERTER), model, tmp_path / "own.gguf", "BF16")
    target = tmp_path / "out.gguf"
    options = ["--dtype", "bf16", "--converter", str(CONVERTER)]
    before = set(sys.modules)
    assert command.main(["convert", str(model), str(target), *options]) == 0
    assert not {"conversion", "loadstone._adapters.llama_cpp.tracing"} & (set(sys.modules) - before)
    assert "warning" not in capfd.readouterr().err
    oracle.require_same_files(target, own)


@pytest.mark.usefixtures("installed")
def test_options_may_precede_the_source(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log, target = tmp_path / "job.log", tmp_path / "out.gguf"
    words = ["--log", str(log), str(model), str(target), "--converter", str(CONVERTER)]
    assert command.main(["convert", *words]) == 0
    assert f"wrote     {target}" in log.read_text()
    # The converter needs SOURCE and TARGET next to each other, and makes its own metadata.
    apart = [str(model), "--log", str(log), str(target), "--converter", str(CONVERTER)]
    for more in (apart, [*words, "--metadata", "keys.json"]):
        assert command.main(["convert", *more]) == 2
        assert "--converter needs the folder of a language model" in capfd.readouterr().err


PROGRAM = """
import sys
from loadstone._command import command as _command
if __name__ == "__main__":
    _command._command = lambda: sys.argv[1]
    sys.exit(_command.main(sys.argv[2:]))
"""


@pytest.mark.usefixtures("installed")
def test_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    """PROGRAM succeeds in a new process; for a usage error, the module prints one line."""
    arguments = ["convert", model, tmp_path / "out.gguf", "--converter", CONVERTER, "--dry-run"]
    done = python("-c", PROGRAM, COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out.gguf").exists()
    done = python("-m", "loadstone", *arguments[:4], model)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("installed")
def test_the_files_are_enough_for_the_command(model: Path, tmp_path: Path) -> None:
    traced = loadstone.llama_cpp.trace(model, converter=CONVERTER, computed_bytes_max=100)
    recipes, metadata = traced.save(tmp_path / "x")
    target = tmp_path / "out.gguf"
    given = ["convert", str(model), str(target), f"--rules={recipes}", f"--metadata={metadata}"]
    assert command.prepare(given, tmp_path) == given
    assert command.main(given) == 0
    own = oracle.written(converter_at(CONVERTER), model, tmp_path / "own.gguf", None)
    oracle.require_same_files(target, own)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("change", ["", "config", "tensors"])
def test_constants_of_another_checkpoint_are_told(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    """Unchanged copies of the checkpoint are the control, and cause no warning."""
    is_computed = "Sums" in (model / "config.json").read_text()
    paths = loadstone.llama_cpp.save_recipes(
        model, tmp_path / "x", converter=CONVERTER, computed_bytes_max=100
    )
    other = Path(shutil.copytree(model, tmp_path / "other"))
    if change == "config":
        (other / "config.json").write_text((model / "config.json").read_text() + " ")
    elif change == "tensors":
        tensors = load_file(model / "model.safetensors")
        save_file({name: each + 1 for name, each in tensors.items()}, other / "model.safetensors")
    given = ["convert", str(other), str(tmp_path / "out.gguf"), f"--rules={paths[0]}"]
    assert command.main([*given, f"--metadata={paths[1]}"]) == 0
    is_foreign = change == "config" or (change == "tensors" and is_computed)
    name = "blk.norm" if is_computed else "rope_freqs.weight"
    stderr = capfd.readouterr().err
    assert ("[convert.constants]" in stderr and f"'{name}'" in stderr) == is_foreign
    # Tensors used in computations are not reported as unused.
    assert is_foreign or "warning" not in stderr


def test_files_of_llama_cpps_converter_make_its_own_file(tmp_path: Path) -> None:
    """The recipes and keys are those of a small Llama; the digest is of llama.cpp's tensors."""
    facts = json.loads((golden.FOLDER / "llama.json").read_text())
    save_file(golden.values(facts["shapes"]), tmp_path / "model.safetensors")
    metadata = golden.FOLDER / "llama.metadata.json"
    loadstone.convert(
        tmp_path / "model.safetensors",
        tmp_path / "out.gguf",
        rules=golden.FOLDER / "llama.recipes.json",
        metadata=metadata,
    )
    reader = oracle.read(tmp_path / "out.gguf")
    assert golden.digest(reader) == facts["sha256"]
    expected = json.loads(metadata.read_text(encoding="utf-8"))["entries"]
    keys = {row[0]: row[3] for row in oracle.keys_of(reader)}
    assert keys == {each["key"]: each["value"] for each in expected}


def test_the_command_compares_a_file_with_its_conversion(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_command", lambda: COMMAND)
    target = tmp_path / "out.gguf"
    options = [f"--converter={CONVERTER}", "--dtype=f16"]
    words = [str(model), str(target)]
    assert command.main(["convert", *words, *options]) == 0
    assert command.main(["verify", *words, *options]) == 0
    assert command.main(["verify", *words, options[0]]) == 1  # control: the checkpoint's dtype
    assert command.main(["verify", *words]) == 1


def test_keys_can_be_added_and_replaced(model: Path, tmp_path: Path) -> None:
    given = {"general.name": "mine", "toy.eps": {"type": "f32", "value": 0.5}}
    loadstone.convert(model, tmp_path / "out.gguf", metadata=given, converter=CONVERTER)
    keys = {row[0]: row[3] for row in oracle.keys_of(oracle.read(tmp_path / "out.gguf"))}
    assert (keys["general.name"], keys["toy.eps"]) == ("mine", 0.5)
    assert keys["general.architecture"] == "toy"
    plain = {"general.name": "other", "toy.eps": 0.25, "toy.runs": 7}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    loadstone.convert(
        model, tmp_path / "out.gguf", metadata=tmp_path / "plain.json", converter=CONVERTER
    )
    rows = {row[0]: row for row in oracle.keys_of(oracle.read(tmp_path / "out.gguf"))}
    assert {key: rows[key][3] for key in plain} == plain
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(loadstone.Error, match="the metadata is invalid"):
        loadstone.convert(
            model, tmp_path / "out.gguf", metadata=tmp_path / "bad.json", converter=CONVERTER
        )


@pytest.mark.parametrize(
    ("encoding", "style"), [("fp8", "modelopt"), ("nvfp4", "compressed-tensors"), ("nf4", None)]
)
def test_an_unused_quantized_tensor_is_named(
    tmp_path: Path, encoding: str, style: str | None
) -> None:
    names = ("model.layers.0.a_proj.weight", "model.layers.0.b_proj.weight")
    save_file({name: torch.randn(64, 64) for name in names}, tmp_path / "plain.safetensors")
    loadstone.convert(
        tmp_path / "plain.safetensors", tmp_path / "small", quantize=encoding, style=style
    )
    weights = Weights(loadstone.inspect(tmp_path / "small"), 0, lambda _: None)
    assert weights.unused() == names
    weights.use(weights.source(names[0]))
    assert weights.unused() == names[1:]


def test_tensors_that_the_converter_leaves_are_named(model: Path, tmp_path: Path) -> None:
    if "Stack" not in (model / "config.json").read_text():
        pytest.skip("it takes all")
    tensors = loadstone.load_file(model / "model.safetensors")
    del tensors["expert1"]  # the other expert then waits for this one, and is not written
    save_file(tensors, model / "model.safetensors")
    traced = loadstone.llama_cpp.trace(model, converter=CONVERTER)
    assert traced.unused == ("expert0",)
    report = loadstone.convert(model, tmp_path / "out.gguf", converter=CONVERTER)
    found = [each for each in report.findings if each.code == "plan.unexpected"]
    assert [each.sources for each in found] == [["expert0"]]


def test_rules_of_the_callers_own_come_first(model: Path, tmp_path: Path) -> None:
    metadata = {"general.architecture": "mine"}
    loadstone.convert(model, tmp_path / "out.gguf", rules=[], metadata=metadata)
    names = [each.name for each in oracle.read(tmp_path / "out.gguf").tensors]
    assert sorted(names) == ["expert0", "expert1", "norm", "w"]


# --- the command's arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert"],
        ["inspect", "model", "out.gguf"],
        ["convert", "--help"],
        ["convert", "model", "out.safetensors"],
        ["convert", "model", "out.gguf", "--rules", "x.json"],
        ["convert", "model", "out.gguf", "--metadata=x.json"],
        ["convert", "nowhere", "out.gguf"],
    ],
)
def test_other_calls_are_passed_on(
    arguments: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.prepare(arguments, tmp_path) == arguments


def test_options_of_the_converter_stay_here(model: Path, tmp_path: Path) -> None:
    given = ["convert", str(model), "out.gguf", "--quantize=q4_k_m", "--imatrix=i.gguf"]
    given += ["--dtype", "f16"]
    found = command.prepare([*given, f"--converter={CONVERTER}", "--trust-code"], tmp_path)
    assert found[:5] == given[:5]
    assert [each.partition("=")[0] for each in found[5:]] == ["--rules", "--metadata"]
    metadata = json.loads((tmp_path / "model.metadata.json").read_text())["entries"]
    assert {"key": "general.file_type", "type": "u32", "value": 1} in metadata


def test_an_error_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_command", lambda: "no such command")
    assert command.main(["convert", str(model), "out.gguf", "--converter", str(model)]) == 2
    stderr = capsys.readouterr().err
    assert "llama.cpp's converter is not in this folder" in stderr
    assert len(stderr.splitlines()) == 1
