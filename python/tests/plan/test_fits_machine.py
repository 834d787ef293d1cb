"""Tests that every plan is compared with the free memory and disk of this machine."""

import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command
import diffusers
import pytest
import safetensors.torch
import torch
import transformers
from accelerate.utils import OffloadedWeightsLoader
from remote_server import Server

import loadstone
import loadstone.accelerate
import loadstone.diffusers
import loadstone.transformers
from loadstone import _core
from loadstone._base.machine import read_proc_bytes
from loadstone._model.model_lock import slots_of
from loadstone._plan.model_memory import reused_bytes
from loadstone._plan.planned_load import PlannedLoad

ROWS, COLUMNS = 1 << 20, 1 << 19  # 1.1 TB in BF16: more than a machine has, and one tensor
BYTES = ROWS * COLUMNS * 2


def write_checkpoint(folder: Path) -> Path:
    """Write a file whose data is a hole, which takes no disk space."""
    header = json.dumps(
        {"weight": {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, BYTES]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + BYTES)
    return file


def model(device: str = "meta") -> torch.nn.Module:
    return torch.nn.Linear(COLUMNS, ROWS, bias=False, device=device, dtype=torch.bfloat16)


# A tensor that needs no change would stay in its shard, so the rule transposes it.
RULES = json.dumps(
    [{"op": "transpose", "sources": ["^weight$"], "targets": ["weight"], "dims": [1, 0]}]
)


def transposed() -> torch.nn.Module:
    return torch.nn.Linear(ROWS, COLUMNS, bias=False, device="meta", dtype=torch.bfloat16)


def adapter_loads(folder: Path) -> dict[str, Callable[[], object]]:
    """Save one small model for each library, and return loads of them by adapters and patches."""
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8,
        )
    )  # fmt: skip
    bert.save_pretrained(folder / "bert")
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    vae.save_pretrained(folder / "vae")

    def patched(library: str, model: Any, name: str) -> object:
        with loadstone.patch(library):
            return model.from_pretrained(folder / name)

    ours, theirs = loadstone.transformers, loadstone.diffusers
    return {
        "transformers": lambda: ours.from_pretrained(type(bert), folder / "bert"),
        "patched transformers": lambda: patched("transformers", type(bert), "bert"),
        "diffusers": lambda: theirs.from_pretrained(type(vae), folder / "vae"),
        "patched diffusers": lambda: patched("diffusers", type(vae), "vae"),
        "accelerate": lambda: loadstone.accelerate.load_checkpoint_and_dispatch(
            transformers.BertModel(bert.config), folder / "bert", device_map="auto"
        ),
    }


ADAPTERS = ("transformers", "patched transformers", "diffusers", "patched diffusers", "accelerate")


def codes(findings: list) -> list[str]:
    return [finding.code for finding in findings if finding.severity == "error"]


@pytest.fixture
def file(tmp_path):
    return write_checkpoint(tmp_path)


def test_plan_returns_the_finding_and_does_not_save_it(file, tmp_path):
    plan = loadstone.plan(model(), file)
    assert codes(plan.findings) == ["memory.host"]
    assert not plan.ok
    assert "of memory, but only" in str(plan)
    assert "memory.host" in plan.to_html()
    assert "memory.host" not in plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert codes(loadstone.Plan.load(tmp_path / "plan.json").findings) == ["memory.host"]


@pytest.mark.parametrize("entry", ["load", "execute", "saved"])
def test_nothing_is_read(file, tmp_path, entry):
    module = model()
    plan = loadstone.plan(module, file)
    plan.save(tmp_path / "plan.json")
    saved = loadstone.Plan.load(tmp_path / "plan.json")
    calls = {
        "load": lambda: loadstone.load(module, file),
        "execute": plan.execute,
        "saved": lambda: saved.execute(model=module),
    }
    with pytest.raises(loadstone.Error) as caught:
        calls[entry]()
    assert caught.value.code == "memory.host"
    assert codes(caught.value.findings) == ["memory.host"]
    assert caught.value.expected.endswith("TB")
    assert module.weight.is_meta


@pytest.fixture
def server(file: Path) -> Iterator[Server]:
    """Serve the file, which is larger than the memory, from a mapping."""
    server = Server()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        server.files["/model.safetensors"] = data
        yield server
        server.close()


def test_a_checkpoint_on_a_server_is_compared_too(server, tmp_path):
    url = server.url("/model.safetensors")
    module = model()
    plan = loadstone.plan(module, url)
    assert codes(plan.findings) == ["memory.host"]
    plan.save(tmp_path / "plan.json")
    for load in (plan.execute, lambda: loadstone.load(module, url)):
        with pytest.raises(loadstone.Error) as caught:
            load()
        assert caught.value.code == "memory.host"
        assert module.weight.is_meta
    assert "memory.host" in command.output("plan", url, status=5)
    assert "memory.host" in command.output("load", url, status=5)
    assert "memory.host" in command.output("load", "--plan", tmp_path / "plan.json", status=5)
    assert loadstone.plan(module, url, max_memory={"cpu": "unlimited"}).ok  # control
    assert server.sent < 1 << 20  # only headers


def test_memory_that_the_load_reuses_is_not_counted(file):
    planned = loadstone.plan(model(), file)._planned
    assert codes(planned.on_this_machine(0).findings) == ["memory.host"]
    assert codes(planned.on_this_machine(BYTES).findings) == []


def test_memory_that_a_load_in_place_reuses(tmp_path):
    module = torch.nn.Linear(4, 2)
    file = tmp_path / "small.safetensors"
    safetensors.torch.save_file(module.state_dict(), file)
    planned = loadstone.plan(module, file, in_place=True)._planned
    assert planned.reused_bytes == reused_bytes(slots_of(module), planned.targets) == 40
    planned = loadstone.plan(module, file, in_place=True, dtype="bfloat16")._planned
    assert planned.reused_bytes == 0  # the load allocates new memory for the new dtype


@pytest.mark.parametrize("entry", ADAPTERS)
def test_adapters_compare_only_the_disk(tmp_path, monkeypatch, entry):
    """Libraries compute device maps that fill the free memory, and staging comes on top."""
    limits = []

    def recorded(planned: PlannedLoad, _: int) -> Any:
        limits.append(planned.memory_limit)
        return planned.core

    monkeypatch.setattr(PlannedLoad, "on_this_machine", recorded)
    adapter_loads(tmp_path)[entry]()
    assert limits == [_core.MEMORY_UNLIMITED]


@pytest.mark.parametrize("limit", [2 * BYTES, "4TiB", "unlimited"])
def test_limit_replaces_free_memory(file, limit):
    plan = loadstone.plan(model(), file, max_memory={"cpu": limit})
    assert plan.ok
    assert ("4 TB" in plan.to_html(max_memory={"cpu": limit})) == (limit == "4TiB")
    plan = loadstone.plan(model(), file, max_memory={"cpu": "8GiB"})
    assert codes(plan.findings) == ["plan.over_budget"]


def test_computed_device_map_fits_the_machine(file, tmp_path):
    plan = loadstone.plan(model(), file, device_map="auto", offload_folder=tmp_path / "offload")
    assert "memory.host" not in codes(plan.findings)


def test_disk_of_the_offload_folder(file, tmp_path):
    folder = tmp_path / "not/there/yet"
    options = {"device_map": {"": "disk"}, "rules": RULES, "offload_folder": folder}
    plan = loadstone.plan(transposed(), file, **options)
    assert codes(plan.findings) == ["io.no_space"]
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(transposed(), file, **options)
    assert caught.value.code == "io.no_space"
    assert not folder.exists()


def test_command_returns_5_and_prints_the_plan(file, tmp_path):
    saved = tmp_path / "plan.json"
    text = command.output("plan", file, "-o", saved, status=5)
    assert "weight" in text
    assert "memory.host" in text
    assert "memory.host" not in saved.read_text()
    document = json.loads(command.output("plan", file, "--json", status=5))
    assert [finding["code"] for finding in document["findings"]] == ["memory.host"]
    assert "memory.host" in command.output("load", file, status=5)
    assert "memory.host" in command.output("load", "--plan", saved, status=5)
    # Reading a plan drops the finding about the machine that planned, and checks this machine.
    saved.write_text(json.dumps(document))
    assert codes(loadstone.Plan.load(saved).findings) == ["memory.host"]
    assert loadstone.Plan.load(saved).to_json().count("memory.host") == 0


def test_saved_plan_takes_a_limit(file, tmp_path):
    saved = tmp_path / "plan.json"
    loadstone.plan(model(), file).save(saved)
    assert loadstone.Plan.load(saved, max_memory={"cpu": "unlimited"}).ok
    assert loadstone.Plan.load(saved, max_memory={"cpu": 2 * BYTES}).ok
    tight = loadstone.Plan.load(saved, max_memory={"cpu": "8GiB"})
    assert codes(tight.findings) == ["memory.host"]
    text = command.output("load", "--plan", saved, "--max-memory", "cpu=8GiB", status=5)
    assert "only 8.6 GB are allowed" in text
    command.output("load", "--plan", saved, "--max-memory", "disk=1GiB", status=2)


@pytest.mark.parametrize("limit", ["cpu=unlimited", "cpu=4TiB"])
def test_command_takes_a_limit(file, limit):
    command.output("plan", file, "--max-memory", limit)
    assert "plan.over_budget" in command.output("plan", file, "--max-memory", "cpu=1GiB", status=5)


def test_command_compares_the_disk(file, tmp_path):
    skeleton, rules = tmp_path / "skeleton.json", tmp_path / "rules.json"
    loadstone.save_skeleton(transposed(), skeleton)
    rules.write_text(RULES)
    options = ["--skeleton", skeleton, "--rules", rules, "--device-map", "disk"]
    options += ["--offload-folder", tmp_path / "a/b"]
    assert "io.no_space" in command.output("plan", file, *options, status=4)
    assert "io.no_space" in command.output("load", file, *options, status=4)
    assert not (tmp_path / "a").exists()


def test_dry_run_prints_the_plan_when_the_disk_is_full(file, tmp_path):
    text = command.output("convert", file, tmp_path / "out", "--dry-run", status=4)
    assert "io.no_space" in text
    assert "to write" in text
    document = json.loads(
        command.output("convert", file, tmp_path / "out", "--dry-run", "--json", status=4)
    )
    assert [finding["code"] for finding in document["findings"]] == ["io.no_space"]
    report = loadstone.convert(file, tmp_path / "out", dry_run=True)
    assert codes(report.findings) == ["io.no_space"]
    assert report.bytes_written > BYTES
    assert "io.no_space" in command.output("convert", file, tmp_path / "out", status=4)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(file, tmp_path / "out")
    assert caught.value.code == "io.no_space"
    assert not (tmp_path / "out").exists()


LAYER_BYTES = 64 << 20


def write_layers(folder: Path) -> Path:
    """Write tensors of 64 MiB, twice as many as the memory has room for; the data is a hole."""
    count = 2 * free_bytes() // LAYER_BYTES
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [LAYER_BYTES // 2],
            "data_offsets": [i * LAYER_BYTES, (i + 1) * LAYER_BYTES],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    file = folder / "layers.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + count * LAYER_BYTES)
    return file


def free_bytes() -> int:
    return read_proc_bytes("/proc/meminfo", "MemAvailable")


@pytest.mark.parametrize("entry", ["python", "command"])
def test_a_computed_device_map_leaves_memory_free(tmp_path, entry):
    layers = write_layers(tmp_path)
    with loadstone.skeleton():
        modules = [torch.nn.Module() for _ in loadstone.inspect(layers).tensors]
        for module in modules:
            module.weight = torch.nn.Parameter(torch.empty(LAYER_BYTES // 2, dtype=torch.bfloat16))
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(modules)
    free = free_bytes()
    if entry == "python":
        plan = loadstone.plan(model, layers, device_map="auto")
        assert plan.ok
        text, places = str(plan), [target.device for target in plan.targets]
    else:
        text = command.output("plan", layers, "--device-map", "auto")
        document = json.loads(command.output("plan", layers, "--device-map", "auto", "--json"))
        places = [target["device"] for target in document["targets"]]
    free = max(free, free_bytes())
    assert set(places) == {"cpu", "disk"}
    assert places.count("cpu") * LAYER_BYTES <= free - max(1 << 30, free // 20)
    on_disk = places.count("disk")
    figures = r"\d+ tensors \(\S+ GB\)"
    assert re.search(
        rf"placed   {figures} on cpu, {figures} on disk; on disk, {figures} stay", text
    )
    if entry == "python":  # two runs of the command measure the free memory twice
        assert f" {on_disk} tensors (" in text


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_cast_tensor_on_disk_stays_in_its_shard(tmp_path, dtype):
    """Nothing is written: each read of the offload folder casts the tensor."""
    file = tmp_path / "model.safetensors"
    value = torch.randn(4, 3, dtype=torch.bfloat16)
    safetensors.torch.save_file({"weight": value}, file)
    options = ["--device-map", "disk", "--dtype", dtype, "--offload-folder", tmp_path / "off"]
    text = command.output("plan", file, *options)
    assert "placed   1 tensor (24 B) on disk; on disk, 1 tensor (24 B) stay" in text
    assert ("kept in its shard and cast at each read" in text) == (dtype == "f16")
    command.output("load", file, *options)
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["index.json"]
    [entry] = json.loads((tmp_path / "off/index.json").read_text()).values()
    assert entry["safetensors_file"] == str(file)
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    read = OffloadedWeightsLoader(save_folder=tmp_path / "off")["weight"]
    assert torch.equal(read, value.to(torch_dtype))
