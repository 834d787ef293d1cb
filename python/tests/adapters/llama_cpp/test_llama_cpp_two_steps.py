"""Tests that one pass to a mix equals llama.cpp's steps: convert to BF16, then llama-quantize.

The tests compare all keys with types and values, and all tensors with types and bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imatrix_files
import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import llama_quantize
import pytest

import loadstone
from loadstone import llama_cpp
from loadstone._command import command

# A mix's rules depend on which eighth of the layers a layer is in, on tied embeddings, and on
# whether there are 8 experts.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 9}
MODELS: dict[str, dict[str, int]] = {
    "llama": SIZES,
    "llama-bpe": SIZES | {"num_key_value_heads": 1},
    "qwen3-moe": SIZES | {"moe_intermediate_size": 256},
    "mixtral": SIZES | {"num_local_experts": 8},
    "falcon": SIZES,
    # A row of 96 or 160 elements is not a multiple of the 256-element block.
    "qwen2": SIZES | {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2},
}


class Steps:
    """A model, the converter's BF16 file of it, and importance matrices for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model = networks.make(name, folder / "model", **MODELS[name])
        self.recipes, self.metadata = llama_cpp.save_recipes(
            self.model, folder / "traced", converter=oracle.FOLDER, dtype="BF16"
        )
        self.own = oracle.written(oracle.converter(), self.model, folder / "own.gguf", "BF16")
        shapes = {
            each.name: tuple(int(size) for size in reversed(each.shape))
            for each in oracle.read(self.own).tensors
        }
        entries = imatrix_files.measured(shapes)
        self.imatrix = {
            kind: write(folder / f"imatrix.{kind}", entries)
            for kind, write in imatrix_files.WRITERS.items()
        }


@pytest.fixture(scope="module", params=MODELS)
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    llama_quantize.require_program()
    with pytest.MonkeyPatch.context() as patch:
        oracle.with_any_tokenizer(patch)
        yield Steps(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kind", [None, *imatrix_files.WRITERS])
@pytest.mark.parametrize("mix", llama_quantize.MIXES)
def test_one_pass_is_two_steps(steps: Steps, mix: str, kind: str | None) -> None:
    imatrix = None if kind is None else steps.imatrix[kind]
    own, out = steps.folder / "two.gguf", steps.folder / "one.gguf"
    refused = llama_quantize.run(steps.own, own, mix, imatrix)
    names: dict[str, Any] = {"rules": steps.recipes, "metadata": steps.metadata}
    try:
        loadstone.convert(steps.model, out, **names, quantize=mix, imatrix=imatrix)
    except loadstone.Error as error:
        assert "imatrix" in refused, refused
        assert error.code == "convert.importance"
        return
    assert not refused
    llama_quantize.require_same(out, own)
    own.unlink()
    out.unlink()


def test_one_call_too(steps: Steps) -> None:
    own, out = steps.folder / "two.gguf", steps.folder / "one.gguf"
    imatrix = steps.imatrix["dat"]
    assert not llama_quantize.run(steps.own, own, "q5_k_m", imatrix)
    options: dict[str, Any] = {"quantize": "q5_k_m", "imatrix": imatrix, "dtype": "bfloat16"}
    loadstone.convert(steps.model, out, converter=oracle.FOLDER, **options)
    llama_quantize.require_same(out, own)


def test_the_command_too(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    from command import COMMAND

    if not Path(COMMAND).is_file():
        pytest.skip("the command is not installed")
    monkeypatch.setattr(command, "_command", lambda: COMMAND)
    # In this process, the patched converter accepts the tests' tokenizers.
    monkeypatch.setattr(command, "_prepare_in_process", command.prepare)
    own, out = steps.folder / "two.gguf", steps.folder / "one.gguf"
    assert not llama_quantize.run(steps.own, own, "q4_k_m", steps.imatrix["gguf"])
    options = [f"--converter={oracle.FOLDER}", "--quantize=q4_k_m", "--dtype=bf16"]
    given = ["convert", str(steps.model), str(out), *options, "--imatrix"]
    assert command.main([*given, str(steps.imatrix["gguf"])]) == 0
    llama_quantize.require_same(out, own)


def test_another_mix_is_told(steps: Steps) -> None:
    """Control: files of two mixes differ, and so do files with different importance matrices."""
    files = [steps.folder / f"{i}.gguf" for i in range(3)]
    assert not llama_quantize.run(steps.own, files[0], "q4_k_m")
    assert not llama_quantize.run(steps.own, files[1], "q4_k_s")
    assert not llama_quantize.run(steps.own, files[2], "q4_k_m", steps.imatrix["dat"])
    for other in files[1:]:
        with pytest.raises(AssertionError):
            llama_quantize.require_same(files[0], other)
