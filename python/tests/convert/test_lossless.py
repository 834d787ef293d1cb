"""From codes to codes: predictions of the plan, the table of the page, and ``require_lossless``."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import lossless_cells as cells
import pytest
import torch
from codec_files import CODECS
from command import output, run
from safetensors.torch import load_file, save_file

import loadstone

LossError = (loadstone.PlanError, loadstone.LoadError)
OF_CODES = [each for each in CODECS if not any(word in each for word in ("plain", "mixed"))]
TARGETS = (
    *("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-channel", "int8-channel", "int4-packed-32"),
    *("q4_0", "q5_1", "q8_0"),
)
# Q3_K has two levels of integer scales, so loadstone promises nothing for it. Their products with
# codes fit Q8_0.
UNPROMISED = {("q3_k", "q8_0")}
PAGE = cells.cells_of_page()

Sources = Callable[[str], cells.Source]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Return a function that writes the file of a codec or encoding at its first call."""

    @functools.cache
    def write(name: str) -> cells.Source:
        folder = tmp_path_factory.mktemp("source") / "new"
        return (
            cells.codec_source(folder, name)
            if name in CODECS
            else cells.normal_source(folder, name.removeprefix("normal "))
        )

    return write


def check(source: cells.Source, encoding: str, folder: Path) -> cells.Outcome | None:
    """Compare a conversion with its prediction; None if the encoding does not fit the shapes."""
    try:
        result = cells.outcome(source, encoding, folder)
    except loadstone.PlanError as error:
        assert error.code == "convert.left_alone", error
        return None
    if result.predicted == {"exact"}:
        assert result.exact_blocks == result.blocks > 0
        assert result.is_equal, encoding
    return result


@pytest.mark.parametrize("before", cells.ENCODINGS)
@pytest.mark.parametrize("after", cells.ENCODINGS)
def test_normal_values(tmp_path: Path, sources: Sources, before: str, after: str) -> None:
    source = sources(f"normal {before}")
    result = check(source, after, tmp_path)
    assert result is not None
    if result.predicted == {"lossy"} and (before, after) not in UNPROMISED:
        assert not result.is_equal
    assert cells.cell(result) == PAGE[before, after]


@pytest.mark.parametrize("codec", OF_CODES)
@pytest.mark.parametrize("after", TARGETS)
def test_random_codes_and_scales(tmp_path: Path, sources: Sources, codec: str, after: str) -> None:
    check(sources(codec), after, tmp_path)


@pytest.mark.parametrize("after", cells.ENCODINGS)
def test_the_typical_error_is_that_of_normal_values(tmp_path: Path, after: str) -> None:
    plain = tmp_path / "plain.safetensors"
    values = cells.normal_values()
    save_file({cells.NAME: values}, plain)
    target = cells.target_path(tmp_path, after)
    table = cells.convert(plain, target, after).table
    error = (cells.decoded(target)[cells.NAME] - values).norm() / values.norm()
    stated = float(table.split("lossy, with about ")[1].split(" %")[0]) / 100
    assert stated == pytest.approx(float(error), rel=0.05)


# ---- require_lossless


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    """Blocks of E2M1 codes. The scales of the first tensor are 1 to 4, of the second 2^-60 to 1."""
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for name, least in {"near": 127, "far": 67}.items():
        path = f"model.layers.0.{name}.weight"
        tensors[f"{path}_blocks"] = torch.randint(
            0, 256, (64, 4, 16), generator=random, dtype=torch.uint8
        )
        tensors[f"{path}_scales"] = torch.randint(
            least, 130, (64, 4), generator=random, dtype=torch.uint8
        )
    save_file(tensors, tmp_path / "mxfp4.safetensors")
    return tmp_path / "mxfp4.safetensors"


def test_strict_accepts_a_conversion_that_must_be_lossless(tmp_path: Path, mxfp4: Path) -> None:
    """Scales that may not fit do not cause a warning, because the conversion then fails."""
    target = tmp_path / "out.safetensors"
    words = ["convert", mxfp4, target, "--quantize", "nvfp4", "--strict"]
    assert run(*words, "--exclude", "far").returncode == 3
    near = {"exclude": "far", "quantize": "nvfp4", "require_lossless": True}
    report = loadstone.convert(mxfp4, target, dry_run=True, **near)
    (found,) = [each for each in report.findings if each.code == "convert.requantized"]
    assert (found.severity, found.suggestion) == ("info", "")
    assert ": exact where scales fit" in found.message
    output(*words, "--exclude", "far", "--require-lossless", "--dry-run")
    output(*words, "--exclude", "far", "--require-lossless")
    done = run("convert", mxfp4, tmp_path / "b.safetensors", *words[3:], "--require-lossless")
    assert done.returncode not in (0, 3)
    assert "convert.lossy" in done.stderr


def left(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} - {"mxfp4.safetensors"}


def test_exact_pairs_are_accepted(tmp_path: Path, mxfp4: Path) -> None:
    target = tmp_path / "out.safetensors"
    report = loadstone.convert(mxfp4, target, quantize="mxfp8", require_lossless=True)
    assert report.requantized[0].exact_blocks == report.requantized[0].blocks
    output("convert", mxfp4, target, "--quantize", "mxfp8", "--require-lossless")


def test_lossy_pairs_are_rejected_before_reading(tmp_path: Path, mxfp4: Path) -> None:
    target = tmp_path / "out.safetensors"
    options = {"quantize": "int4", "require_lossless": True}
    for dry_run in (True, False):
        if dry_run:
            findings = loadstone.convert(mxfp4, target, dry_run=True, **options).findings
        else:
            with pytest.raises(loadstone.PlanError) as caught:
                loadstone.convert(mxfp4, target, **options)
            findings = caught.value.findings
        errors = [each for each in findings if each.severity == "error"]
        assert [each.code for each in errors] == ["convert.lossy"]
        assert re.match(
            r"2 tensors \(the first is 'model.*'\) would change from mxfp4 to int4",
            errors[0].message,
        )
    done = run("convert", mxfp4, target, "--quantize", "int4", "--require-lossless")
    assert done.returncode == 1
    assert "convert.lossy" in done.stderr
    assert left(tmp_path) == set()


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_a_changed_block_stops_the_conversion(tmp_path: Path, mxfp4: Path, name: str) -> None:
    target = tmp_path / name
    near = {"exclude": "far", "quantize": "nvfp4", "require_lossless": True}
    loadstone.convert(mxfp4, tmp_path / "near.safetensors", **near)
    for path in tmp_path.glob("*near*"):
        path.unlink()
    with pytest.raises(LossError, match=r"far.*would\s+change") as caught:
        loadstone.convert(mxfp4, target, quantize="nvfp4", require_lossless=True)
    assert caught.value.code == "convert.lossy"
    done = run("convert", mxfp4, target, "--quantize", "nvfp4", "--require-lossless")
    assert done.returncode != 0
    assert "convert.lossy" in done.stderr
    assert left(tmp_path) == set()


def test_a_resumed_run_checks_finished_shards(tmp_path: Path, mxfp4: Path) -> None:
    options = {"quantize": "nvfp4", "shard_size": 4000}
    loadstone.convert(mxfp4, tmp_path / "out", part=(1, 2), **options)
    loadstone.convert(mxfp4, tmp_path / "out", part=(2, 2), **options)
    with pytest.raises(LossError) as caught:
        loadstone.convert(mxfp4, tmp_path / "out", finish=True, require_lossless=True, **options)
    assert caught.value.code == "convert.lossy"
    assert not (tmp_path / "out").exists()
    loadstone.convert(mxfp4, tmp_path / "out", finish=True, **options)


@pytest.mark.parametrize(
    ("stored", "dtype", "is_lossless"),
    [
        (torch.bfloat16, "float32", True),
        (torch.float16, "float32", True),
        (torch.float32, "bfloat16", False),
        (torch.bfloat16, "float16", False),
        (torch.float16, "bfloat16", False),
        (torch.bfloat16, "bfloat16", True),
    ],
)
def test_casts(tmp_path: Path, stored: torch.dtype, dtype: str, is_lossless: bool) -> None:
    source = tmp_path / "plain.safetensors"
    save_file({"a": torch.ones(4, dtype=stored), "b": torch.arange(3)}, source)
    found = loadstone.convert(
        source, tmp_path / "out.safetensors", dtype=dtype, require_lossless=True, dry_run=True
    ).findings
    assert ("convert.lossy" in {each.code for each in found}) is not is_lossless


def test_decoded_values(tmp_path: Path, mxfp4: Path) -> None:
    for dtype, is_lossless in {"float32": True, "bfloat16": True, "float16": False}.items():
        target = tmp_path / "out.safetensors"
        found = loadstone.convert(
            mxfp4, target, dequantize=True, dtype=dtype, require_lossless=True, dry_run=True
        ).findings
        assert ("convert.lossy" in {each.code for each in found}) is not is_lossless
    loadstone.convert(mxfp4, target, dequantize=True, dtype="float32")
    wide = load_file(target)
    loadstone.convert(mxfp4, target, dequantize=True, dtype="bfloat16", require_lossless=True)
    for name, tensor in load_file(target).items():
        assert torch.equal(tensor.float(), wide[name])


def test_floats_to_codes_are_lossy(tmp_path: Path) -> None:
    source = tmp_path / "plain.safetensors"
    save_file({"model.layers.0.up_proj.weight": torch.ones(64, 64)}, source)
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(source, tmp_path / "out", quantize="fp8", require_lossless=True)
    assert caught.value.code == "convert.lossy"


# ---- verdicts of verify


def verdict(first: Path, second: Path) -> str:
    found = output("verify", first, second).splitlines()[-1].split("; ")
    assert found[0] == "ok"
    assert json.loads(output("verify", first, second, "--json"))["verdict"] == found[1]
    return found[1]


def test_verdicts(tmp_path: Path) -> None:
    """Large enough that tensors with an error are compared only by samples."""
    random = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (512, 40, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(120, 130, (512, 40), generator=random, dtype=torch.uint8)
    path = "model.layers.0.up.weight"
    source = tmp_path / "source.safetensors"
    save_file({f"{path}_blocks": codes, f"{path}_scales": scales}, source)
    made = {}
    for name, options in {
        "mxfp8": {"quantize": "mxfp8"},
        "nvfp4": {"quantize": "nvfp4"},
        "int4": {"quantize": "int4"},
        "wide": {"dequantize": True, "dtype": "float32"},
    }.items():
        made[name] = tmp_path / f"{name}.safetensors"
        loadstone.convert(source, made[name], **options)
    loadstone.convert(made["wide"], tmp_path / "half.safetensors", dtype="float16")
    assert verdict(source, source) == "equal"
    for name in ("mxfp8", "nvfp4", "wide"):
        assert verdict(source, made[name]) == "equal as real numbers"
    assert verdict(source, made["int4"]).startswith("a relative error of at most 0.1")
    rounded = verdict(made["wide"], tmp_path / "half.safetensors")
    assert rounded == "equal up to rounding to the new dtype"
    codes[8, 0, 0] ^= 1  # value 10,240 of 655,360, between the first two samples
    save_file({f"{path}_blocks": codes, f"{path}_scales": scales}, source)
    line = run("verify", source, made["mxfp8"]).stdout.splitlines()[-1]
    assert "a relative error of at most" in line or line.startswith("not ok")


# ---- ModelOpt's cast


@pytest.mark.parametrize("spread", [1, 9, 17, 18, 25, 60])
def test_as_many_blocks_are_exact_as_with_modelopt(tmp_path: Path, spread: int) -> None:
    cast = pytest.importorskip("modelopt.torch.export.shard_cast_utils")
    random = torch.Generator().manual_seed(spread)
    rows, blocks = 64, 8
    codes = torch.randint(0, 256, (rows, blocks, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 100 + spread, (rows, blocks), generator=random, dtype=torch.uint8)
    path = "model.layers.0.up.weight"
    source = tmp_path / "source.safetensors"
    save_file({f"{path}_blocks": codes, f"{path}_scales": scales}, source)
    expected = cells.decoded(source)[path]
    report = loadstone.convert(source, tmp_path / "out.safetensors", quantize="nvfp4")
    found = cells.decoded(tmp_path / "out.safetensors")[path]

    packed = codes.reshape(rows, -1)
    highest = cast.mxfp4_kmax(scales)
    data, scale, outer, count, lossless = cast.quantize_mxfp4_to_nvfp4_lossless(
        packed, scales, highest, "cpu"
    )
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    nibbles = torch.stack([data & 15, data >> 4], -1).reshape(rows, -1)
    theirs = values[nibbles.long()] * (scale.float() * outer).repeat_interleave(16, -1)

    def exact_blocks(tensor: torch.Tensor) -> int:
        return int((tensor == expected).reshape(-1, 16).all(-1).sum())

    assert count == rows * blocks
    assert exact_blocks(theirs) >= 2 * lossless
    assert exact_blocks(found) == exact_blocks(theirs)
    assert report.requantized[0].exact_blocks == exact_blocks(found)
    assert report.requantized[0].blocks == 2 * count


# ---- corner cases


def test_a_finished_output_without_the_promise_is_not_accepted(tmp_path: Path, mxfp4: Path) -> None:
    options = {"quantize": "nvfp4", "resume": True}
    loadstone.convert(mxfp4, tmp_path / "out", **options)
    with pytest.raises(LossError, match="no --require-lossless") as caught:
        loadstone.convert(mxfp4, tmp_path / "out", require_lossless=True, **options)
    assert caught.value.code == "convert.state"


def test_bf16_lacks_the_smallest_products_of_e4m3(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    name = "model.layers.0.up.weight"
    save_file(
        {
            name: torch.full((32, 32), 1, dtype=torch.uint8).view(torch.float8_e4m3fn),
            f"{name}_scale": torch.zeros(32, 1, dtype=torch.uint8),
        },
        source,
    )
    options = {"dequantize": True, "require_lossless": True, "dry_run": True}
    for dtype, is_lossless in {"float32": True, "bfloat16": False}.items():
        found = loadstone.convert(source, tmp_path / "out", dtype=dtype, **options).findings
        assert ("convert.lossy" in {each.code for each in found}) is not is_lossless


def int8_file(path: Path, scales: dict[str, float], code: int) -> Path:
    tensors = {}
    for role, scale in scales.items():
        name = f"model.layers.0.mlp.{role}_proj.weight"
        tensors[name] = torch.full((32, 32), code, dtype=torch.int8)
        tensors[f"{name}_scale"] = torch.full((32, 1), scale)
    save_file(tensors, path)
    return path


def predicted(source: Path, encoding: str) -> set[str]:
    report = loadstone.convert(source, source.parent / "out", quantize=encoding, dry_run=True)
    texts = [each.message for each in report.findings if each.code == "convert.requantized"]
    return {text.split(": ")[1].split(", ")[0] for text in texts}


def test_a_negative_scale_may_not_fit(tmp_path: Path) -> None:
    source = int8_file(tmp_path / "source.safetensors", {"up": -0.01}, -128)
    assert predicted(source, "int8-channel") == {"exact where scales fit"}


def test_tensors_that_share_a_scale_may_not_fit(tmp_path: Path) -> None:
    tensors = {}
    for role, scale in {"gate": 0.013, "up": 0.0071}.items():
        name = f"model.layers.0.mlp.{role}_proj.weight"
        tensors[name] = torch.randn(32, 32).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor(scale)
    source = tmp_path / "source.safetensors"
    save_file(tensors, source)
    assert predicted(source, "fp8") == {"exact where scales fit"}
    assert predicted(source, "fp8-channel") == {"exact"}
