"""``loadstone.check``: verdicts against what transformers does, rules, and the command."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import readback_foreign as foreign
from check_folders import Case, folders, truth
from readback_cells import SOURCES, Cell
from transformers import LlamaForCausalLM
from transformers.utils import logging

import loadstone
from loadstone._adapters.check import ENGINES, rules
from loadstone._command import command

pytest.importorskip("transformers", minversion="5.1")
pytest.importorskip("compressed_tensors")
pytest.importorskip("bitsandbytes")

FP8 = "fp8 compressed-tensors"
CASES = {
    Case("llama", "plain", "none"): "opens right",
    Case("llama", "plain", "tensor dropped"): "opens wrong",
    Case("llama", "plain", "tensor renamed"): "opens wrong",
    Case("llama", "plain", "tensor transposed"): "does not open",
    Case("llama", "plain", "stale index"): "does not open",
    Case("llama", "plain", "extra tensor"): "unknown",
    Case("llama", "plain", "vector in float32"): "unknown",
    Case("qwen2", "plain", "none"): "opens right",
    Case("qwen2", "plain", "tie flag flipped"): "opens wrong",
    Case("llama", FP8, "none"): "opens right",
    Case("llama", FP8, "list emptied"): "opens wrong",
    Case("llama", FP8, "scales in bfloat16"): "unknown",
    Case("llama", "nf4", "none"): "opens right",
    Case("llama", "fp8 modelopt", "none"): "opens wrong",
    Case("gpt2", "nf4", "none"): "unknown",
    Case("qwen3_moe", "mxfp4 compressed-tensors", "none"): "opens right",
    Case("qwen3_moe", "nvfp4 compressed-tensors", "none"): "opens wrong",
}


def test_verdicts_agree_with_transformers(tmp_path: Path) -> None:
    seen = []
    for case, folder, original in folders(tmp_path, list(CASES)):
        result = loadstone.check(folder, "transformers")
        assert result.verdict == CASES[case], (case, result)
        assert result.verdict in ("unknown", truth(case, folder, original)), (case, result)
        assert result.ok == (not result.problems)
        assert all(problem.reason and problem.source for problem in result.problems)
        seen.append(case)
    assert seen == list(CASES)


def test_check_reads_no_weights(tmp_path: Path) -> None:
    from loadstone._adapters.transformers.check import ask

    ((_, folder, _),) = folders(tmp_path, [Case("llama", "plain", "none")])
    answer = ask(folder)
    assert answer.error is None
    assert all(each.is_meta for each in answer.model.parameters())
    assert not any(each.is_meta for each in LlamaForCausalLM.from_pretrained(folder).parameters())


def test_check_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.set_verbosity_warning()  # which other tests change
    cases = [Case("llama", "plain", "tensor dropped"), Case("llama", FP8, "none")]
    for _, folder, _ in folders(tmp_path, cases):
        capfd.readouterr()
        with warnings.catch_warnings(record=True, action="always") as warned:
            loadstone.check(folder, "transformers")
        assert capfd.readouterr() == ("", "")
        assert not caplog.records
        assert not warned


def test_rules_equal_the_page() -> None:
    openings = rules()["transformers"]["openings"]
    for name, opening in openings.items():
        encoding, _, style = name.partition(" ")
        cells = [Cell(encoding, None if style == "bitsandbytes" else style, s) for s in SOURCES]
        dense, *experts = map(foreign.documented, cells)
        assert opening["dense"] == dense
        assert opening["experts"] == next((each for each in experts if each != "right"), "right")
    releases = rules()["transformers"]["releases"].items()
    assert foreign.documented_releases() == ", ".join(map(" ".join, releases))


def test_engines_without_rules_are_unknown(tmp_path: Path) -> None:
    for engine in set(ENGINES) - {"transformers", "llama.cpp"}:
        result = loadstone.check(tmp_path, engine)
        assert result.verdict == "unknown"
        assert result.problems[0].reason == f"loadstone has no rules for {engine}"
    with pytest.raises(loadstone.OptionError, match=r"did you mean 'llama.cpp'"):
        loadstone.check(tmp_path, "llama.cp")


def write_gguf(path: Path, keys: dict[str, object], names: list[str]) -> Path:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    for name in names:
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KEYS = {
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "tokenizer.ggml.model": "llama",
}
NAMES = ["token_embd.weight", "blk.0.attn_q.weight"]


def test_gguf_files(tmp_path: Path) -> None:
    def verdict(name: str, keys: dict[str, object], names: list[str]) -> tuple[str, set[str]]:
        result = loadstone.check(write_gguf(tmp_path / name, keys, names), "llama.cpp")
        return result.verdict, {name for problem in result.problems for name in problem.names}

    assert verdict("good.gguf", KEYS, NAMES) == ("unknown", set())
    lacking = {key: value for key, value in KEYS.items() if "context" not in key}
    assert verdict("key.gguf", lacking, NAMES) == ("does not open", {"llama.context_length"})
    deeper = KEYS | {"llama.block_count": 2}
    assert verdict("layer.gguf", deeper, NAMES) == ("does not open", {"blk.1"})
    assert verdict("name.gguf", KEYS, [*NAMES, "strange.weight"]) == ("unknown", {"strange.weight"})
    assert verdict("embed.gguf", KEYS, NAMES[1:]) == ("does not open", {"token_embd.weight"})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("llama", "plain", "none"), Case("llama", "plain", "tensor dropped")]
    good, bad = (folder for _, folder, _ in folders(tmp_path, cases))
    assert command.main(["check", str(good), "--for", "transformers"]) == 0
    assert "opens right (decided by transformers: " in capsys.readouterr().out
    assert command.main(["check", str(bad), "--for", "transformers,llama.cpp", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [each["verdict"] for each in found["engines"]] == ["opens wrong", "does not open"]
    assert command.main(["check", str(good), "--for", "transformer"]) == 2
    assert "did you mean 'transformers'?" in capsys.readouterr().err
