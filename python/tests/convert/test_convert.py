"""loadstone.convert, and the command with recipes that Python wrote."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, output
from diffusers_gguf import BLOCK_CASES, mixed, packed
from diffusers_models import cast_copy, library_converted, write_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loadstone
import loadstone.diffusers
from bench import single_files

diffusers = pytest.importorskip("diffusers")

WAN = BLOCK_CASES[0]


class Wan:
    """A tiny Wan model in several GGUF formats under its original names, and its values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = WAN.build()
        self.tensors = packed(WAN.original(model), mixed)
        self.path = self.tensors.write(folder / "wan.gguf")
        write_config(model, folder / "out")
        self.dequantized = self.tensors.dequantized()
        model.load_state_dict(library_converted(WAN, self.dequantized, model))
        self.reference = model

    def skeleton(self) -> Any:
        with loadstone.skeleton():
            return WAN.construct()


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Wan:
    return Wan(tmp_path_factory.mktemp("wan"))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# --- GGUF ----------------------------------------------------------------------------------------


def test_blocks_are_gguf_pys_numbers_rounded_once(wan: Wan, tmp_path: Path) -> None:
    report = loadstone.convert(wan.path, tmp_path / "plain.safetensors")
    assert report.outputs == [tmp_path / "plain.safetensors"]
    plain = {"F16": torch.float16, "F32": torch.float32}
    kinds = {name: kind.name for name, kind in wan.tensors.kinds.items()}
    assert set(kinds.values()) > set(plain)
    dtypes = {name: plain.get(kind, torch.bfloat16) for name, kind in kinds.items()}
    expected = {name: value.to(dtypes[name]) for name, value in wan.dequantized.items()}
    assert_equal(load_file(tmp_path / "plain.safetensors"), expected)
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert file.metadata()["general.architecture"] == "test"
        assert file.metadata()["format"] == "pt"
    loadstone.convert(wan.path, tmp_path / "all.safetensors", dtype=torch.float16)
    halves = {name: value.half() for name, value in wan.dequantized.items()}
    assert_equal(load_file(tmp_path / "all.safetensors"), halves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_renamed_for_a_class_by_the_command(wan: Wan, tmp_path: Path, dtype: torch.dtype) -> None:
    """Python saves recipes, the command converts with them, and the library loads the output."""
    recipes = tmp_path / "wan.recipes.json"
    loadstone.save_recipes(wan.skeleton(), wan.path, recipes, dtype=dtype)
    target = wan.folder / "out/diffusion_pytorch_model.safetensors"
    document = json.loads(output("convert", wan.path, target, "--rules", recipes, "--json"))
    assert document["outputs"] == [str(target)]
    assert document["bytes_written"] == target.stat().st_size
    found = WAN.cls.from_pretrained(wan.folder / "out", torch_dtype=dtype)
    expected = cast_copy(WAN, wan.reference, dtype)
    assert_equal(dict(found.state_dict()), dict(expected.state_dict()))
    if dtype is torch.bfloat16:  # the class keeps some modules in float32
        assert {value.dtype for value in load_file(target).values()} == {dtype, torch.float32}


def test_shards_that_diffusers_loads(wan: Wan, tmp_path: Path) -> None:
    """Convert into shards, with recipes that an adapter traced in Python."""
    catalog = loadstone.inspect(wan.path, gguf_rank_max=5)
    traced = loadstone.diffusers.trace(wan.skeleton(), catalog)
    write_config(wan.reference, tmp_path)
    name = "diffusion_pytorch_model"
    report = loadstone.convert(catalog, tmp_path, rules=traced, shard_size="300KB", name=name)
    assert len(report.outputs) > 3
    assert report.outputs[-1].name == f"{name}.safetensors.index.json"
    found = WAN.cls.from_pretrained(tmp_path)
    assert_equal(dict(found.state_dict()), dict(wan.reference.state_dict()))


def test_recipes_of_another_catalog_are_refused(wan: Wan, tmp_path: Path) -> None:
    traced = loadstone.diffusers.trace(wan.skeleton(), loadstone.inspect(wan.path, gguf_rank_max=5))
    with pytest.raises(loadstone.Error, match="catalog") as caught:
        loadstone.convert(wan.path, tmp_path / "out.safetensors", rules=traced)
    assert caught.value.code == "plan.options"
    recipes = tmp_path / "recipes.json"
    loadstone.save_recipes(wan.skeleton(), wan.path, recipes)
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(loadstone.PlanError) as refused:
        loadstone.convert(
            tmp_path / "other.safetensors", tmp_path / "out.safetensors", rules=recipes
        )
    assert refused.value.code == "plan.recipe"


def test_an_incomplete_model_is_no_recipe(wan: Wan, tmp_path: Path) -> None:
    state = {name: value for name, value in wan.dequantized.items() if "blocks.0.ffn" not in name}
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.save_recipes(wan.skeleton(), tmp_path / "less.safetensors", tmp_path / "r.json")
    assert any(finding.code == "plan.missing" for finding in caught.value.findings)
    assert not (tmp_path / "r.json").exists()


# --- safetensors ---------------------------------------------------------------------------------


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {
        f"layers.{layer}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for layer in range(4)
        for name, shape, dtype in [
            ("gate", (64, 96), torch.bfloat16),
            ("up", (64, 96), torch.bfloat16),
            ("scale", (3, 5, 7), torch.float8_e4m3fn),
            ("norm", (96,), torch.float32),
        ]
    }
    return made | {"ids": torch.arange(17), "mask": torch.tensor([True, False]),
                   "complex": torch.randn(4, dtype=torch.complex64),
                   "scalar": torch.tensor(2.0), "none": torch.zeros(0, 3)}  # fmt: skip


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    bits = [
        {name: value.reshape(-1).view(torch.uint8) for name, value in each.items()}
        for each in (found, expected)
    ]
    assert_equal(*bits)
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in expected.items()}
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in expected.items()}


def test_shards_and_back(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = tmp_path / "one.safetensors"
    save_file(state, source, {"format": "pt", "note": "\u00fc"})
    report = loadstone.convert(source, tmp_path / "many", shard_size=30_000)
    shards = [path for path in report.outputs if path.suffix == ".safetensors"]
    assert len(shards) > 2
    found = {}
    for path in shards:
        assert path.stat().st_size <= 30_000 + 8192
        found |= load_file(path)
    same_bits(found, state)
    index = json.loads(report.outputs[-1].read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    assert index["weight_map"].keys() == state.keys()
    loadstone.convert(tmp_path / "many", tmp_path / "back.safetensors")
    same_bits(load_file(tmp_path / "back.safetensors"), state)
    output("verify", source, tmp_path / "many")
    output("verify", source, tmp_path / "back.safetensors")
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "\u00fc"}


def test_rules(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "one.safetensors")
    rules = [
        {"op": "stack", "dim": 0, "sources": [r"layers\.(\d+)\.gate"], "targets": ["gates"]},
        {"op": "transpose", "dims": [0, 1], "sources": [r"layers\.(\d+)\.up"],
         "targets": ["up.$1"]},
        {"op": "rename", "sources": [r"layers\.(.*)"], "targets": ["model.layers.$1"]},
    ]  # fmt: skip
    loadstone.convert(
        tmp_path / "one.safetensors", tmp_path / "out.safetensors", rules=rules, dtype="float16"
    )
    expected = {}
    for name, value in state.items():
        wide = value.dtype in (torch.bfloat16, torch.float32)
        value = value.half() if wide else value
        if name.endswith("up"):
            expected["up." + name.split(".")[1]] = value.t().contiguous()
        elif not name.endswith("gate"):
            expected[f"model.{name}" if name.startswith("layers") else name] = value
    expected["gates"] = torch.stack([state[f"layers.{i}.gate"].half() for i in range(4)])
    same_bits(load_file(tmp_path / "out.safetensors"), expected)
    mistyped = [*rules, {"op": "rename", "sources": ["gtae", "also"], "targets": ["x"]}]
    for listed, idle in ((rules, []), (mistyped, ["'gtae', 'also'"])):
        report = loadstone.convert(
            tmp_path / "one.safetensors", tmp_path / "out.safetensors", rules=listed, dry_run=True
        )
        told = [(f.severity, f.message) for f in report.findings if f.code == "plan.pattern"]
        assert [(severity, text.split(": ")[1]) for severity, text in told] == [
            ("warning", each) for each in idle
        ]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    by_command = tmp_path / "command.safetensors"
    arguments = ["--rules", tmp_path / "rules.json", "--dtype", "f16", "--threads", 1]
    output("convert", tmp_path / "one.safetensors", by_command, *arguments)
    assert by_command.read_bytes() == (tmp_path / "out.safetensors").read_bytes()


def test_what_cannot_be_is_told_with_all_findings(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    source = tmp_path / "one.safetensors"
    save_file(state, source)
    same = [{"op": "rename", "sources": ["layers.*"], "targets": ["same"]}]
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.convert(source, tmp_path / "out.safetensors", rules=same)
    assert caught.value.code == "plan.duplicate"
    assert len(caught.value.findings) == 15
    with pytest.raises(loadstone.PlanError) as budget:
        loadstone.convert(source, tmp_path / "out.safetensors", max_memory="1KB")
    assert budget.value.code == "plan.over_budget"
    with pytest.raises(loadstone.Error) as target:
        loadstone.convert(source, source)
    assert target.value.code == "convert.target"
    for options in ({"quantize": "nf5"}, {"shard_size": "1MB"}, {"dtype": "int8"}):
        with pytest.raises(loadstone.Error):
            loadstone.convert(source, tmp_path / "out.safetensors", **options)
    planned = loadstone.convert(source, tmp_path / "out.safetensors", dry_run=True)
    assert planned.bytes_written > 0
    assert "F8_E4M3" in str(planned)
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_progress_and_an_error_of_the_callers(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(state, tmp_path / "one.safetensors")
    seen: list[tuple[int, int]] = []
    loadstone.convert(
        tmp_path / "one.safetensors",
        tmp_path / "a.safetensors",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == (tmp_path / "a.safetensors").stat().st_size

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loadstone.convert(tmp_path / "one.safetensors", tmp_path / "b.safetensors", progress=stop)
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["a.safetensors", "one.safetensors"]


def test_names_are_only_names(tmp_path: Path) -> None:
    """Names of tensors and keys of metadata are not used as paths, and are escaped for the
    terminal."""
    names = [
        "../../escape",
        "/etc/passwd",
        "a\x1b[2J",
        'quote"\\',
        "\u00fc\u202e",
        "a\nb",
        " ",
        "\x7f",
    ]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    save_file(state, tmp_path / "one.safetensors", {"\x1b": "\n\x00\u202e", "": ""})
    said = output("convert", tmp_path / "one.safetensors", tmp_path / "out", "--shard-size", "9")
    assert "\x1b" not in said
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert_equal(found, state)
    dry = output("convert", tmp_path / "out", tmp_path / "o.safetensors", "--dry-run", "--tensors")
    assert "\x1b" not in dry
    assert "\u202e" not in dry
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["one.safetensors", "out"]


# --- memory --------------------------------------------------------------------------------------


def peak_of(*arguments: object) -> int:
    """Return the command's largest resident set, including the program itself."""
    document = json.loads(output(*arguments, "--json"))
    process = document["process"]
    assert process["anonymous_bytes_peak"] <= process["resident_bytes_peak"]
    return int(process["resident_bytes_peak"])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the memory of the same command on almost no data, mostly the program's own code."""
    folder = tmp_path_factory.mktemp("start")
    save_file({"a": torch.zeros(1)}, folder / "a.safetensors")
    return peak_of("convert", folder / "a.safetensors", folder / "b.safetensors")


LARGE = pytest.param(480, marks=pytest.mark.bench)


@pytest.fixture(scope="module", params=[90, LARGE])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Q8_0 file of the given size in MiB."""
    return single_files.make(tmp_path_factory.mktemp("large"), request.param) / "model.gguf"


def test_memory_does_not_grow_with_the_file(large: Path, tmp_path: Path, start: int) -> None:
    size = large.stat().st_size
    for options in (["--threads", 1], ["--threads", 4], ["--dtype", "f32"]):
        peak = peak_of("convert", large, tmp_path / "out.safetensors", *options) - start
        print(f"{options}: {peak / 2**20:.1f} MiB for a file of {size / 2**20:.0f} MiB")
        assert peak <= 64 << 20
    # Control: a load, which keeps all values, exceeds the limit.
    assert peak_of("load", tmp_path / "out.safetensors") - start > size


def test_a_large_tensor_that_is_turned(tmp_path: Path, start: int) -> None:
    """loadstone reads a transposed tensor repeatedly if it is larger than the window."""
    value = torch.randint(-128, 127, (8192, 16384), dtype=torch.int8)
    save_file({"w": value}, tmp_path / "one.safetensors")
    rules = [{"op": "transpose", "dims": [0, 1], "sources": ["w"], "targets": ["w"]}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    arguments = ["convert", tmp_path / "one.safetensors", tmp_path / "out.safetensors",
                 "--rules", tmp_path / "rules.json"]  # fmt: skip
    assert peak_of(*arguments) - start <= 64 << 20
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], value.t())
    (tmp_path / "out.safetensors").unlink()
    assert peak_of(*arguments, "--max-memory", "12MiB") - start <= 12 << 20
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], value.t())


# --- early exits ---------------------------------------------------------------------------------


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".loadstone-"))


def begin(source: Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(COMMAND), "convert", str(source), str(target), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def interrupt(process: subprocess.Popen[bytes], folder: Path, delay: float, number: int) -> bool:
    """Send a signal some time after the first file appears; return True if it was sent."""
    while not parts(folder) and process.poll() is None:
        time.sleep(0.0002)
    found = bool(parts(folder))
    time.sleep(delay)
    process.send_signal(number)
    process.wait()
    return found


KILLS = [pytest.param(12, id="some"), pytest.param(50, id="50", marks=pytest.mark.bench)]


@pytest.mark.parametrize("count", KILLS)
@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_killed_at_any_moment(large: Path, tmp_path: Path, name: str, count: int) -> None:
    """The final path contains either no file or the complete file."""
    loadstone.convert(large, tmp_path / "whole.safetensors")
    duration = loadstone.convert(large, tmp_path / "probe.safetensors").seconds
    (tmp_path / "probe.safetensors").unlink()
    options = () if "." in name else ("--shard-size", "40MB")
    random_source = random.Random(1)
    killed = 0
    for _ in range(10 * count):
        if killed == count:
            break
        folder = tmp_path / "run"
        folder.mkdir()
        process = begin(large, folder / name, *options)
        began = interrupt(process, folder, random_source.random() * duration, signal.SIGKILL)
        left = sorted(path.name for path in folder.iterdir())
        if name in left:
            output("verify", tmp_path / "whole.safetensors", folder / name)
            duration *= 0.9  # the kills came too late, so make them earlier
        else:
            assert left == parts(folder)
            killed += began
        shutil.rmtree(folder)
    assert killed == count


def test_interrupted(large: Path, tmp_path: Path) -> None:
    (tmp_path / "old.safetensors").write_bytes(b"old")
    for name in ("old.safetensors", "new.safetensors", "folder"):
        process = begin(large, tmp_path / name, "--overwrite")
        interrupt(process, tmp_path, 0.01, signal.SIGINT)
        assert process.returncode == 130
        assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]
    assert (tmp_path / "old.safetensors").read_bytes() == b"old"


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(large: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [COMMAND, "convert", large, tmp_path / "out.safetensors"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "[io.no_space]" in done.stderr
    assert f"{tmp_path / 'out.safetensors'}: the file is larger than" in done.stderr
    assert "expected at most 1048576 bytes" in done.stderr
    assert re.search(r"found \d{9} bytes", done.stderr)
    assert not list(tmp_path.iterdir())
    command = [COMMAND, "convert", large, tmp_path / "out", "--shard-size", "3MB"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert re.search(
        f"{tmp_path / 'out'}/model-000\\d\\d-of-000\\d\\d.safetensors: the file", done.stderr
    )


# The target, the options, and the code of the error.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "in the source": ("big/sub/", {}, "convert.target"),
    "the source": ("big", {}, "convert.target"),
    "no parent": ("none/sub", {}, "io.not_found"),
    "in the source, and no memory": ("big/sub", {"max_memory": 1}, "plan.over_budget"),
    "in the source, and a name twice": (
        "big/sub",
        {"rules": [{"op": "rename", "sources": [".*"], "targets": ["w"]}]},
        "plan.duplicate",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_is_refused_as_the_run_is(tmp_path: Path, case: str) -> None:
    name, options, code = REFUSED[case]
    big, target = tmp_path / "big", f"{tmp_path}/{name}"
    big.mkdir()
    for i in (1, 2):
        save_file({f"w{i}": torch.ones(9)}, big / f"model-0000{i}-of-00002.safetensors")
    words = [COMMAND, "convert", big, target]
    if "max_memory" in options:
        words += ["--max-memory", "1"]
    if "rules" in options:
        (tmp_path / "rules.json").write_text(json.dumps(options["rules"]))
        words += ["--rules", tmp_path / "rules.json"]
    status = set()
    for dry in (True, False):
        more = ["--dry-run"] if dry else []
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
        assert code in done.stdout + done.stderr
        status.add(done.returncode)
        try:
            report = loadstone.convert(big, target, dry_run=dry, **options)
        except loadstone.Error as error:
            assert error.code == code
        else:
            assert dry and report.findings[0].code == code
    assert len(status) == 1 and status != {0}
    assert len(list(big.iterdir())) == 2


def test_the_source_stays_as_it_is(large: Path, tmp_path: Path) -> None:
    before = large.stat()
    loadstone.convert(large, tmp_path / "out.safetensors")
    after = large.stat()
    assert (before.st_mtime_ns, before.st_size, before.st_ino) == (
        after.st_mtime_ns, after.st_size, after.st_ino)  # fmt: skip
    large.chmod(0o444)
    large.parent.chmod(0o555)
    try:
        loadstone.convert(large, tmp_path / "again.safetensors")
    finally:
        large.parent.chmod(0o755)
