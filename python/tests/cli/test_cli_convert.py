"""`loadstone convert`, and the encodings that `inspect` lists."""

import json
import struct
import subprocess
from pathlib import Path

import pytest

HOSTILE = Path(__file__).resolve().parents[3] / "tests/hostile"


def error_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.stderr == ""
    return json.loads(done.stdout)["error"]


def assert_said_on_stderr(done: subprocess.CompletedProcess[str], code: str) -> None:
    assert done.stdout == ""
    assert f"[{code}]" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def header_of(path: Path) -> dict:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    return json.loads(raw[8 : 8 + length])


def test_one_file(run, small, tmp_path):
    target = tmp_path / "out.safetensors"
    done = run("convert", small, target, status=0)
    assert str(target) in done.stdout
    assert done.stderr == ""
    record = tmp_path / ".loadstone-out.safetensors.done"
    assert f"record    {record}: lets later runs replace this output" in done.stdout
    assert record.exists()
    header = header_of(target)
    assert header.pop("__metadata__") == {"format": "pt", "made by": "a test"}
    assert header["embed.weight"]["shape"] == [4, 2]
    assert list(header) == ["embed.weight", "norm.weight"]  # the wider dtype comes first
    run("verify", small, target, status=0)


def test_json(run, small, tmp_path):
    document = json.loads(run("convert", small, tmp_path / "out", "--json", status=0).stdout)
    members = {"outputs", "seconds", "bytes_read", "bytes_written", "peak_bytes", "findings"}
    assert document.keys() >= members
    assert document["outputs"] == [str(tmp_path / "out/model.safetensors")]
    assert document["bytes_read"] == 36
    assert document["bytes_written"] == Path(document["outputs"][0]).stat().st_size


def test_dry_run(run, small, tmp_path):
    target = tmp_path / "out.safetensors"
    said = run("convert", small, target, "--dry-run", "--dtype", "f16", "--tensors", status=0)
    assert "F32 to F16" in said.stdout
    assert "embed.weight" in said.stdout
    document = json.loads(run("convert", small, target, "--dry-run", "--json", status=0).stdout)
    assert document["tensors"]["embed.weight"]["dtype"] == "F32"
    assert document["bytes_to_read"] == 36
    assert not target.exists()


def test_help(run):
    said = run("convert", "--help", status=0).stdout
    assert "--max-memory" in said
    assert "bf16 (default)" in said


def rules(folder: Path, text: str) -> Path:
    path = folder / "rules.json"
    path.write_text(text)
    return path


def test_rules(run, small, tmp_path):
    renames = rules(tmp_path, '[{"op": "rename", "sources": ["(.*)"], "targets": ["model.$1"]}]')
    run("convert", small, tmp_path / "out.safetensors", "--rules", renames, status=0)
    assert "model.norm.weight" in header_of(tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("[1]", 1, "plan.rules"),
        ("{}", 1, "plan.recipe"),
        ('{"version": 1, "sources": ["gone"], "targets": []}', 1, "plan.recipe"),
        ('[{"op": "rename", "sources": [".*"], "targets": ["a"]}]', 1, "plan.duplicate"),
    ],
)
def test_rules_that_do_not_fit(run, small, tmp_path, text, status, code):
    wrong = rules(tmp_path, text)
    done = run("convert", small, tmp_path / "out.safetensors", "--rules", wrong, status=status)
    assert_said_on_stderr(done, code)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["out.safetensors", "--shard-size", "1MB"],
        ["out.safetensors", "--name", "x"],
        ["out", "--shard-size", "many"],
        ["out", "--max-memory", "0"],
        ["out", "--dtype", "float31"],
        ["out", "--block-dtype", "q4_0"],
        ["out", "--to", "gguf"],
        ["out", "--part", "0/2"],
        ["out", "--part", "3/2"],
        ["out", "--part", "1"],
        ["out", "--part", "1/2x"],
        ["out", "--part", "1/2", "--finish"],
        ["out", "--resume", "--finish"],
        ["out.safetensors", "--part", "1/2"],
        ["out.safetensors", "--finish"],
    ],
    ids=" ".join,
)
def test_wrong_usage(run, small, tmp_path, options):
    target, *rest = options
    done = run("convert", small, tmp_path / target, *rest, status=2)
    assert_said_on_stderr(done, "usage")
    error = error_of(run("convert", small, tmp_path / target, *rest, "--json", status=2))
    assert error["code"] == "usage"
    assert not (tmp_path / target).exists()


def test_parts_and_a_finish(run, small, tmp_path):
    target = tmp_path / "out"
    options = [small, target, "--shard-size", "16"]
    run("convert", small, tmp_path / "whole", "--shard-size", "16", status=0)
    assert_said_on_stderr(run("convert", *options, "--finish", status=1), "convert.incomplete")
    said = run("convert", *options, "--part", "2/3", status=0).stdout
    assert said.startswith("part      2 of 3: ")
    done = run("convert", *options, "--finish", status=1)
    assert_said_on_stderr(done, "convert.incomplete")
    assert "part 1 of 3" in done.stderr
    assert_said_on_stderr(run("convert", *options, status=1), "convert.state")
    run("convert", *options, "--part", "1/3", "--resume", status=0)
    assert "nothing to do" in run("convert", *options, "--part", "3/3", status=0).stdout
    assert not target.exists()
    document = json.loads(run("convert", *options, "--finish", "--json", status=0).stdout)
    assert document["outputs"][-1] == str(target / "model.safetensors.index.json")
    for path in (tmp_path / "whole").iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    again = json.loads(run("convert", *options, "--resume", "--json", status=0).stdout)
    assert again["bytes_kept"] > 0 == again["bytes_written"]
    assert [each["code"] for each in again["findings"]] == ["convert.complete"]


def test_the_source_is_no_target(run, small):
    before = small.read_bytes()
    assert_said_on_stderr(run("convert", small, small, status=2), "convert.target")
    assert_said_on_stderr(run("convert", small, small, "--dry-run", status=2), "convert.target")
    assert small.read_bytes() == before


def test_a_budget_that_is_too_small(run, small, tmp_path):
    target = tmp_path / "out.safetensors"
    done = run("convert", small, target, "--max-memory", "1000", "--json", status=5)
    error = error_of(done)
    assert error["code"] == "plan.over_budget"
    least = error["expected"].split()[0]
    run("convert", small, target, "--max-memory", least, status=0)
    run("convert", small, target, "--max-memory", int(least) - 1, status=5)


def test_no_folder_and_no_source(run, small, tmp_path):
    done = run("convert", small, tmp_path / "none/out.safetensors", status=4)
    assert_said_on_stderr(done, "io.not_found")
    done = run("convert", tmp_path / "none.gguf", tmp_path / "out.safetensors", status=4)
    assert_said_on_stderr(done, "io.not_found")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("safetensors/st_off_hole.safetensors", "st.hole"),
        ("gguf/gg_magic.gguf", "gg.magic"),
        ("gguf/gg_dims_u32max.gguf", "gg.n_dims"),
        ("sharded/ix_missing_shard", "ix.missing_shard"),
    ],
)
def test_malformed(run, tmp_path, file, code):
    done = run("convert", HOSTILE / file, tmp_path / "out.safetensors", status=3)
    assert_said_on_stderr(done, code)
    assert not list(tmp_path.iterdir())


def test_five_dims(run, tmp_path):
    """`convert` accepts the five dims of video models; `inspect` needs an option for them."""
    file = HOSTILE / "gguf/gg_dims_five.gguf"
    run("convert", file, tmp_path / "out.safetensors", status=0)
    run("inspect", file, "--gguf-rank-max", "5", status=0)
    assert "--gguf-rank-max 5" in run("inspect", file, status=3).stderr


def test_five_dims_that_we_wrote(run, tmp_path):
    """The file declares its number of dims, so every command opens it without an option."""
    source, file = HOSTILE / "gguf/gg_dims_five.gguf", tmp_path / "out.gguf"
    run("convert", source, file, "--beyond-ggml", status=0)
    for command in ("inspect", "plan", "load", "verify"):
        run(command, file, status=0)
        json.loads(run(command, file, "--json", status=0).stdout)
    run("verify", file, file, status=0)
    back = tmp_path / "back.safetensors"
    run("convert", file, back, status=0)
    metadata = json.loads(run("inspect", back, "--json", status=0).stdout)["metadata"]
    assert "loadstone.rank_max" not in metadata


def test_nine_dims_are_too_many(run, tmp_path):
    """loadstone writes no file that it cannot read, even if ggml's limit is lifted."""
    for rank, status in ((8, 0), (9, 1)):
        header = {"x": {"dtype": "F32", "shape": [1] * rank, "data_offsets": [0, 4]}}
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        source, file = tmp_path / f"{rank}.safetensors", tmp_path / f"{rank}.gguf"
        source.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
        options = ["--beyond-ggml", "--arch", "wan"]
        done = run("convert", source, file, *options, status=status)
        assert file.exists() == (status == 0)
    assert_said_on_stderr(done, "convert.dims")
    assert "loadstone supports 8" in done.stderr


def test_strict(run, tmp_path):
    folder = HOSTILE / "sharded/ix_total_size_lies"
    done = run("convert", folder, tmp_path / "out.safetensors", "--strict", status=3)
    assert "[ix." in done.stderr
    assert not list(tmp_path.iterdir())
    assert "[ix." in run("convert", folder, tmp_path / "out.safetensors", status=0).stderr


def test_inspect_tells_encodings(run, small):
    document = json.loads(run("inspect", small, "--json", status=0).stdout)
    assert document["encodings"] == {
        "F32": {"tensors": 1, "elements": 8, "bytes": 32},
        "BF16": {"tensors": 1, "elements": 2, "bytes": 4},
    }
    said = run("inspect", small, status=0).stdout
    assert "8 elements" in said
    gguf = json.loads(run("inspect", HOSTILE / "gguf/gg_ok.gguf", "--json", status=0).stdout)
    assert gguf["metadata_types"]["general.architecture"] == "string"
    assert gguf["encodings"]["F32"]["elements"] == 32


def test_every_hostile_file(run, tmp_path):
    """A file that opens converts to the same tensors; any other leaves no output."""
    cases = json.loads((HOSTILE / "manifest.json").read_text())["cases"]
    target = tmp_path / "out.safetensors"
    made = 0
    for case in cases:
        if case["format"] not in ("safetensors", "sharded", "gguf"):
            continue
        source = HOSTILE / case["file"]
        opens = run("inspect", source, "--gguf-rank-max", 8).returncode == 0
        # The codes are finite, but the block's scale is not, so an option must allow the output.
        is_spoiled = case["name"] in ("gg_nan_scale", "gg_inf_scale")
        if is_spoiled:
            done = run("convert", source, target, status=1)
            assert "convert.overflow" in done.stderr and not target.exists()
        more = ["--allow-non-finite"] * is_spoiled
        done = run("convert", source, target, *more, status=0 if opens else 3)
        names = [f".loadstone-{target.name}.done", target.name] if opens else []
        assert sorted(path.name for path in tmp_path.iterdir()) == names, case
        if not opens:
            assert done.stdout == ""
            continue
        made += 1
        status = 1 if case["expect"] == "st.bool_value" else 0
        run("verify", target, status=status)
        if case["format"] != "gguf":
            run("verify", source, target, status=0)
        for path in tmp_path.iterdir():
            path.unlink()
    assert made > 30
