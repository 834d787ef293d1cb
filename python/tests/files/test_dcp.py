"""Tests checkpoints of torch.distributed.checkpoint against torch's own result."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from dcp_checkpoints import Net
from dcp_tensors import same, tensors_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import loadstone

NAMES = ["fsdp2", "hsdp", "fsdp_tp", "mesh"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    script = Path(__file__).parents[1] / "support" / "dcp_checkpoints.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=300)
    return folder


def flat(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    items = value.items() if isinstance(value, dict) else []
    for key, inner in items if not isinstance(value, list) else enumerate(value):
        yield from flat(inner, f"{name}.{key}" if name else str(key))


def consolidated(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Return the state dict into which torch's own tool converts a checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, target)
    return dict(flat(torch.load(target, weights_only=False)))


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_that_of_torchs_own_tool(
    checkpoints: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = consolidated(checkpoints / name, tmp_path / "all.pt")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle is run")

    for module, function in [(torch, "load"), (pickle, "load"), (pickle, "loads")]:
        monkeypatch.setattr(module, function, refuse)
    found = tensors_of(checkpoints / name)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_that_of_the_gathered_state_dict(checkpoints: Path, name: str) -> None:
    expected = torch.load(checkpoints / f"{name}.pt")
    prefix = "model." if name in ("fsdp2", "hsdp") else ""
    found = tensors_of(checkpoints / name)
    assert [key for key in expected if not same(found[prefix + key], expected[key])] == []


def test_inspect_says_dcp_and_names_what_is_no_tensor(checkpoints: Path) -> None:
    done = run("inspect", checkpoints / "fsdp2", "--json")
    catalog = json.loads(done.stdout)
    assert {shard["format"] for shard in catalog["shards"]} == {"dcp"}
    ignored = [each for each in catalog["findings"] if each["code"] == "dcp.ignored"]
    assert len(ignored) == 1
    assert ignored[0]["severity"] == "info"
    assert "(22)" in ignored[0]["message"] or "more" in ignored[0]["message"]
    assert run("verify", checkpoints / "fsdp2").returncode == 0


def test_the_folder_and_its_metadata_are_one_checkpoint(checkpoints: Path) -> None:
    folder = checkpoints / "mesh"
    assert tensors_of(folder).keys() == tensors_of(folder / ".metadata").keys()


def test_slices_of_tiles_are_read(checkpoints: Path) -> None:
    expected = torch.load(checkpoints / "mesh.pt")
    with loadstone.open(checkpoints / "mesh") as checkpoint:
        assert same(checkpoint["tiles"][2:6, 1:4], expected["tiles"][2:6, 1:4])
        assert same(checkpoint["rows"][4:], expected["rows"][4:])
        assert same(checkpoint["deep"][1], expected["deep"][1])


@pytest.mark.parametrize("mmap", [False, True])
def test_a_model_loads_with_a_rule_for_the_prefix(checkpoints: Path, mmap: bool) -> None:
    with loadstone.skeleton():
        model = Net()
    report = loadstone.load(
        model, checkpoints / "fsdp2", rules={"model.": ""}, unexpected="ignore", mmap=mmap
    )
    assert model.head.weight is model.embed.weight
    expected = torch.load(checkpoints / "fsdp2.pt")
    state = model.state_dict()
    assert [key for key in expected if not same(state[key], expected[key])] == []
    assert loadstone.audit(model, report).ok


def test_the_prefix_of_a_model_without_an_optimizer_is_stripped(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "alone", no_dist=True)
    other = nn.Linear(3, 2)
    loadstone.load(other, tmp_path / "alone", strip_prefix="model.")
    assert same(other.weight, model.weight)


def test_a_conversion_warns_of_extra_state_that_it_loses(tmp_path: Path) -> None:
    for name, severity in (("a._extra_state", "warning"), ("step", "info")):
        save({"w": torch.ones(2), name: {"x": 1}}, checkpoint_id=tmp_path / name, no_dist=True)
        report = loadstone.convert(tmp_path / name, tmp_path / "out.safetensors")
        told = [each for each in report.findings if each.code == "dcp.ignored"]
        assert [each.severity for each in told] == [severity] and name in told[0].message
        assert loadstone.inspect(tmp_path / name).findings[0].severity == "info"


def test_a_conversion_warns_of_tensors_in_objects(tmp_path: Path) -> None:
    """DCP splits a list of tensors into its elements, but not a tuple."""
    pair = (torch.ones(2), torch.zeros(3))
    for name, value, is_lost in (
        ("t", pair, True),
        ("nested", (1, {"x": pair}), True),
        ("plain", (1, "two", [0.5] * 500), False),
        ("list", list(pair), False),
    ):
        state = {"w": torch.ones(2), "step": 3, name: value}
        save(state, checkpoint_id=tmp_path / name, no_dist=True)
        report = loadstone.convert(tmp_path / name, tmp_path / "out.safetensors")
        (told,) = [each for each in report.findings if each.code == "dcp.ignored"]
        assert told.severity == ("warning" if is_lost else "info")
        assert ("contain tensors" in told.message) is is_lost
        assert list(told.sources) == ([name] if is_lost else [])
        assert "step" in told.message
        assert loadstone.inspect(tmp_path / name).findings[0].severity == "info"
    assert {"list.0", "list.1"} <= tensors_of(tmp_path / "out.safetensors").keys()


def test_a_conversion_makes_safetensors_with_the_configs_beside_it(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(checkpoints / "fsdp2", folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    done = run("convert", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "llama"}'
    assert not list((tmp_path / "out").glob("*.distcp"))
    found, expected = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []
    assert run("verify", folder, tmp_path / "out").returncode == 0


def test_blocks_of_gguf_are_those_of_the_converted_file(tmp_path: Path) -> None:
    weight = torch.randn(64, 256)
    save({"blk.0.ffn_up.weight": weight}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert run("convert", tmp_path / "dcp", tmp_path / "a.safetensors").returncode == 0
    written = []
    for source in ("dcp", "a.safetensors"):
        target = tmp_path / f"{source}.gguf"
        metadata = tmp_path / "metadata.json"
        entries = [{"key": "general.architecture", "type": "string", "value": "llama"}]
        kind = "loadstone-gguf-metadata"
        metadata.write_text(json.dumps({"format": kind, "version": 1, "entries": entries}))
        options = ["--quantize", "q8_0", "--include", "ffn", "--metadata", metadata]
        done = run("convert", tmp_path / source, target, *options)
        assert done.returncode == 0, done.stderr
        written.append(target.read_bytes())
    assert written[0] == written[1]


def test_a_plan_is_saved_and_carried_out(checkpoints: Path, tmp_path: Path) -> None:
    with loadstone.skeleton():
        model = Net()
    plan = loadstone.plan(model, checkpoints / "hsdp", rules={"model.": ""}, unexpected="ignore")
    plan.save(tmp_path / "plan.json")
    done = run("load", "--plan", tmp_path / "plan.json", "--json")
    assert done.returncode == 0, done.stderr


def test_a_changed_file_is_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(checkpoints / "fsdp2", folder)
    with loadstone.skeleton():
        model = Net()
    plan = loadstone.plan(model, folder, rules={"model.": ""}, unexpected="ignore")
    with (folder / "__2_0.distcp").open("ab") as file:
        file.write(b"more")
    with pytest.raises(loadstone.LoadError) as error:
        plan.execute()
    assert error.value.code == "io.changed"
    assert "__2_0.distcp" in str(error.value)


def test_memory_is_what_the_plan_says(tmp_path: Path) -> None:
    weight = torch.randn(1024, 4096)
    save({"weight": weight}, checkpoint_id=tmp_path / "large", no_dist=True)
    model = nn.Linear(4096, 1024, bias=False)
    report = loadstone.load(model, tmp_path / "large", staging_bytes_max=1 << 20)
    assert report.staging_bytes_peak <= 1 << 20
    assert same(model.weight, weight)


def test_other_orders_of_elements_stay_in_whole_items(tmp_path: Path) -> None:
    content = {
        "turned": torch.randn(5, 3).t(),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    save(content, checkpoint_id=tmp_path / "turned", no_dist=True)
    found = tensors_of(tmp_path / "turned")
    assert all(same(found[name], content[name]) for name in content)


def test_items_in_safetensors_are_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    content = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    writer = FileSystemWriter(tmp_path / "st", serialization_format=SerializationFormat.SAFETENSORS)
    save(content, storage_writer=writer, no_dist=True)
    found = tensors_of(tmp_path / "st")
    assert all(same(found[name], content[name]) for name in content)


# ---- invalid metadata


def change(name: str) -> Callable[[Any], None]:
    """Return the change of this name, which makes the metadata invalid."""

    def tensor(metadata: Any) -> Any:
        return metadata.state_dict_metadata["tiles"]

    def item(metadata: Any) -> Any:
        return metadata.storage_data[MetadataIndex("tiles", torch.Size((0, 0)))]

    def sizes(metadata: Any, *numbers: int) -> None:
        tensor(metadata).chunks[0].sizes = torch.Size(numbers)

    def drop(metadata: Any) -> None:
        del metadata.storage_data[MetadataIndex("tiles", torch.Size((0, 0)))]

    def share(metadata: Any) -> None:
        other = metadata.storage_data[MetadataIndex("rows", torch.Size((0, 0)))]
        item(metadata).offset = other.offset + 1

    def more(metadata: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size((1, 1)), torch.Size((1, 1)))
        tensor(metadata).chunks.append(chunk)

    changes: dict[str, Callable[[Any], None]] = {
        "outside": lambda metadata: sizes(metadata, 8, 5),
        "rank": lambda metadata: sizes(metadata, 4, 3, 1),
        "overlap": more,
        "cover": lambda metadata: sizes(metadata, 5, 3),
        "hole": lambda metadata: tensor(metadata).chunks.pop(),
        "smaller": lambda metadata: sizes(metadata, 3, 3),
        "no_item": drop,
        "past_end": lambda metadata: setattr(item(metadata), "length", 1 << 40),
        "far": lambda metadata: setattr(item(metadata), "offset", (1 << 63) - 1),
        "negative": lambda metadata: setattr(item(metadata), "offset", -1),
        "beyond_64_bits": lambda metadata: setattr(item(metadata), "offset", 1 << 70),
        "shared": share,
        "climbs": lambda metadata: setattr(item(metadata), "relative_path", "../__0_0.distcp"),
        "absolute": lambda metadata: setattr(item(metadata), "relative_path", "/etc/passwd"),
        "control": lambda metadata: setattr(item(metadata), "relative_path", "a\nb"),
        "missing": lambda metadata: setattr(item(metadata), "relative_path", "__9_0.distcp"),
        "compressed": lambda metadata: setattr(item(metadata), "transform_descriptors", ["zstd"]),
        "dtype": lambda metadata: setattr(tensor(metadata).properties, "dtype", torch.int32),
        "strange_dtype": lambda metadata: setattr(
            tensor(metadata).properties, "dtype", torch.qint8
        ),
        "sparse": lambda metadata: setattr(tensor(metadata).properties, "layout", torch.sparse_coo),
        "huge": lambda metadata: setattr(tensor(metadata), "size", torch.Size((1 << 40, 1 << 40))),
        "dims": lambda metadata: setattr(tensor(metadata), "size", torch.Size((1,) * 1000)),
        "text": lambda metadata: setattr(tensor(metadata), "chunks", "none"),
        "no_storage": lambda metadata: setattr(metadata, "storage_data", None),
        "object": lambda metadata: metadata.state_dict_metadata.update(tiles=Path("x")),
        "global": lambda metadata: setattr(metadata, "planner_data", subprocess.Popen),
    }
    return changes[name]


REFUSED = {
    "outside": "dcp.chunk_bounds",
    "rank": "dcp.chunk_bounds",
    "overlap": "dcp.overlap",
    "cover": "dcp.overlap",
    "hole": "dcp.hole",
    "smaller": "dcp.hole",
    "no_item": "dcp.item_missing",
    "past_end": "dcp.item_bounds",
    "far": "dcp.item_bounds",
    "negative": "dcp.metadata",
    "beyond_64_bits": "dcp.metadata",
    "shared": "dcp.item_overlap",
    "climbs": "ix.path_escape",
    "absolute": "ix.path_escape",
    "control": "ix.path",
    "missing": "ix.missing_shard",
    "compressed": "dcp.transform",
    "dtype": "dcp.dtype",
    "strange_dtype": "dcp.dtype",
    "sparse": "dcp.unsupported",
    "huge": "pt.overflow",
    "dims": "dcp.metadata",
    "text": "dcp.metadata",
    "no_storage": "dcp.metadata",
    "object": "dcp.metadata",
    "global": "pt.global_refused",
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_break_a_rule_are_refused(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(checkpoints / "mesh", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(name)(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(folder)
    assert error.value.code == REFUSED[name], str(error.value)
    if name == "global":
        assert "subprocess.Popen" in str(error.value)
        assert error.value.byte_offset is not None
    elif name not in ("no_storage", "missing"):
        assert error.value.tensor == "tiles", str(error.value)
    assert run("inspect", folder).returncode == 3


def test_a_name_that_stands_twice_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    shutil.copytree(checkpoints / "mesh", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["tile2"] = metadata.state_dict_metadata["tiles"]
    raw = pickle.dumps(metadata)
    assert raw.count(b"tile2") == 1
    (folder / ".metadata").write_bytes(raw.replace(b"tile2", b"tiles"))
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(folder)
    assert (error.value.code, error.value.tensor) == ("dcp.duplicate", "tiles")


def test_items_of_no_tensor_are_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(checkpoints / "mesh", folder)
    assert "dcp.unused" not in run("inspect", folder, "--json").stdout
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    start = torch.Size((0, 0))
    item = metadata.storage_data[MetadataIndex("tiles", start)]
    metadata.storage_data[MetadataIndex("gone", start)] = item
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    findings = json.loads(run("inspect", folder, "--json").stdout)["findings"]
    (unused,) = [each for each in findings if each["code"] == "dcp.unused"]
    assert unused["severity"] == "warning" and "gone" in unused["message"]


def test_metadata_that_end_early_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(checkpoints / "mesh", folder)
    raw = (folder / ".metadata").read_bytes()
    codes = set()
    for length in range(0, len(raw), len(raw) // 60):
        (folder / ".metadata").write_bytes(raw[:length])
        with pytest.raises(loadstone.FormatError) as error:
            loadstone.inspect(folder)
        assert error.value.path.endswith(".metadata")
        codes.add(error.value.code)
    print(codes)
    assert all(code.startswith(("pt.", "dcp.")) for code in codes)
    (folder / ".metadata").write_bytes(raw)
    assert loadstone.inspect(folder).tensors  # control


def test_nothing_of_the_metadata_is_called(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "called",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(tmp_path)
    assert error.value.code == "pt.global_refused"
    assert not (tmp_path / "called").exists()


def test_a_swapped_file_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(checkpoints / "mesh", folder)
    shutil.copy(folder / "__3_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(folder)
    assert error.value.code.startswith(("dcp.item", "pt."))


def test_a_link_out_of_the_folder_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    shutil.copytree(checkpoints / "mesh", folder)
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(folder)
    assert error.value.code == "ix.path_escape"
    assert loadstone.inspect(folder, allow_links=True).tensors


def test_other_weights_beside_it_are_not_chosen_between(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    shutil.copytree(checkpoints / "mesh", folder)
    done = run("convert", checkpoints / "mesh", folder / "model.safetensors")
    assert done.returncode == 0, done.stderr
    with pytest.raises(loadstone.FormatError) as error:
        loadstone.inspect(folder)
    assert error.value.code == "format.no_checkpoint"


def test_checkpoints_are_merged(tmp_path: Path) -> None:
    weights = [torch.randn(8, 6) for _ in range(2)]
    for index, weight in enumerate(weights):
        save({"w": weight}, checkpoint_id=tmp_path / str(index), no_dist=True)
        done = run("convert", tmp_path / str(index), tmp_path / f"{index}.safetensors")
        assert done.returncode == 0, done.stderr
    outputs = []
    for ending in ("", ".safetensors"):
        target = tmp_path / f"merged{len(outputs)}.safetensors"
        models = {tmp_path / f"{index}{ending}": 0.5 for index in range(2)}
        loadstone.merge(models=models, method="linear", target=target)
        outputs.append(load_file(target)["w"])
    assert same(*outputs)
    assert torch.allclose(outputs[0], (weights[0] + weights[1]) / 2)


def test_receipts_hold_for_what_is_assembled(tmp_path: Path) -> None:
    folder, out = tmp_path / "dcp", tmp_path / "out"
    save({"w": torch.randn(64, 64), "b": torch.randn(7)}, checkpoint_id=folder, no_dist=True)
    done = run("convert", folder, out, "--receipt", "sha256-tree")
    assert done.returncode == 0, done.stderr
    checked = ("verify", out, "--receipt", "--source", folder)
    done = run(*checked)
    assert done.returncode == 0, done.stderr + done.stdout
    [pieces] = folder.glob("*.distcp")
    whole = pieces.read_bytes()
    weight = load_file(out / "model.safetensors")["w"].numpy().tobytes()
    at = whole.index(weight) + 100
    pieces.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    done = run(*checked)
    assert done.returncode == 1, done.stderr
    assert "w" in done.stdout and ".metadata" in done.stdout and "'b'" not in done.stdout
    (folder / ".metadata").unlink()
    done = run(*checked)
    assert done.returncode == 1, done.stderr
    assert "missing" in done.stdout and ".metadata" in done.stdout


def test_parts_on_copies_are_kept(tmp_path: Path) -> None:
    folder, out = tmp_path / "dcp", tmp_path / "out"
    content = {f"w{i}": torch.randn(64, 64) for i in range(4)}
    save(content, checkpoint_id=folder, no_dist=True)
    for part in ("1/2", "2/2"):
        copy = tmp_path / part.replace("/", "-")
        shutil.copytree(folder, copy, copy_function=shutil.copyfile)
        done = run("convert", copy, out, "--shard-size", "20kB", "--part", part)
        assert done.returncode == 0, done.stderr
    done = run("convert", folder, out, "--shard-size", "20kB", "--finish", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"] == []
    for name, tensor in content.items():
        [shard] = [path for path in out.glob("*.safetensors") if name in load_file(path)]
        assert torch.equal(load_file(shard)[name], tensor)
