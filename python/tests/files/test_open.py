"""Tests loadstone.open, load_file and safe_open with every format, codec, dtype and index type."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from codec_files import CODECS, Files, each_once
from packed_files import REFUSED, write_refused
from torch_values import DTYPES, LAYOUTS, some, views
from torch_values import same as same_bits

import loadstone

# A dtype that safetensors does not support.
NOT_SAFETENSORS = {torch.complex128}
KINDS = [dtype for dtype in DTYPES if dtype not in NOT_SAFETENSORS]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit, regardless of strides."""
    return same_bits(*(each.clone(memory_format=torch.contiguous_format) for each in (a, b)))


def named(dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """Return a matrix, a scalar and an empty tensor of each dtype."""
    made = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        made[f"{name}.matrix"] = some(dtype, 7, 6)
        made[f"{name}.number"] = some(dtype)
        made[f"{name}.empty"] = torch.empty(0, 3, dtype=dtype)
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model.safetensors"
    safetensors.torch.save_file(named(KINDS), path, metadata={"format": "pt", "who": "a test"})
    return path


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    tensor = torch.randn(4096, 256)
    safetensors.torch.save_file({"w": tensor, "other": torch.zeros(4096, 256)}, path)
    return path, tensor


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return each_once(lambda codec: tmp_path_factory.mktemp(codec))


DOORS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "index": lambda path: {name: lazy[...] for name, lazy in loadstone.open(path).items()},
    "slice": lambda path: {name: lazy[:] for name, lazy in loadstone.open(path).items()},
    "tensor": lambda path: {name: lazy.tensor() for name, lazy in loadstone.open(path).items()},
    "get": lambda path: {name: loadstone.open(path).get(name) for name in loadstone.open(path)},
    "load_file": loadstone.load_file,
    "torch.load_file": lambda path: loadstone.torch.load_file(path),
    "torch.load": lambda path: loadstone.torch.load(path.read_bytes()),
    "get_tensor": lambda path: {
        name: loadstone.safe_open(path).get_tensor(name)
        for name in loadstone.safe_open(path).keys()  # noqa: SIM118
    },
    "get_tensors": lambda path: loadstone.safe_open(path).get_tensors(),
    "get_slice": lambda path: {
        name: loadstone.safe_open(path).get_slice(name)[...]
        for name in loadstone.safe_open(path).offset_keys()
    },
}


@pytest.mark.parametrize("door", DOORS)
def test_each_dtype_through_each_door(door: str, plain: Path) -> None:
    expected = safetensors.torch.load_file(plain)
    found = DOORS[door](plain)
    assert set(found) == set(expected)
    assert [name for name in expected if not same(found[name], expected[name])] == []


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_files_of_torch(door: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "views.pt"
    state = views()
    torch.save(state, path, **LAYOUTS[layout])
    found = DOORS[door](path)
    assert [name for name in state if not same(found[name], state[name])] == []


@pytest.mark.parametrize("codec", CODECS)
def test_each_codec_is_decoded(codec: str, files: Files) -> None:
    """Whole tensors, slices and rounded values equal the oracle's values."""
    written = files(codec)
    every = loadstone.load_file(written.path)
    assert set(every) == set(written.numbers)
    halves = loadstone.load_file(written.path, dtype=torch.bfloat16)
    with loadstone.open(written.path) as opened:
        assert set(opened) == set(written.numbers) and len(opened) == len(written.numbers)
        for name, expected in written.numbers.items():
            lazy = opened[name]
            assert lazy.shape == expected.shape and same(lazy[...], every[name]), name
            assert lazy.is_quantized or lazy.dtype == expected.dtype
            assert same(every[name].to(expected.dtype), expected), name
            floating = expected.is_floating_point()
            rounded = expected.to(torch.bfloat16) if floating else expected
            assert torch.equal(halves[name].nan_to_num(), rounded.nan_to_num()), name
            part = lazy[1:-1:2] if lazy.ndim else lazy[()]
            assert same(part, every[name][1:-1:2] if lazy.ndim else every[name]), name
            columns = lazy[..., 3:9] if lazy.ndim else lazy[...]
            assert same(columns, every[name][..., 3:9] if lazy.ndim else every[name]), name


@pytest.mark.parametrize("codec", CODECS)
def test_components_are_as_in_the_file(codec: str, files: Files) -> None:
    written = files(codec)
    with loadstone.open(written.path) as opened:
        for name, quantized in written.quantized.items():
            found = opened.components(name)
            for role, stored in quantized.components.items():
                if written.stored:
                    assert same(found[role], written.stored[stored]), (name, role)
        for name, tensor in written.stored.items():
            if name in opened and name not in written.quantized:
                assert same(opened.components(name)["data"], tensor)


@pytest.mark.parametrize("codec", [name for name in CODECS if not name.startswith("gguf")])
def test_safe_open_gives_codes_and_scales(codec: str, files: Files) -> None:
    written = files(codec)
    opened = loadstone.safe_open(written.path)
    every = loadstone.torch.load_file(written.path)
    assert set(every) == set(opened.keys())
    for name, tensor in written.stored.items():
        assert same(opened.get_tensor(name), tensor) and same(every[name], tensor), name
        if tensor.dim():
            assert same(opened.get_slice(name)[1:, ...], tensor[1:]), name


@pytest.mark.parametrize("encoding", ["Q4_K", "Q8_0"])
def test_gguf_is_ggufs_own_dequantize(encoding: str, files: Files) -> None:
    path = files(f"gguf-{encoding}").path
    rows = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    opened = loadstone.open(path)
    for name, lazy in opened.items():
        tensor = rows[name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        numbers = lazy.tensor(dtype=torch.float32).numpy()
        assert np.array_equal(numbers.reshape(expected.shape), expected)
        if tensor.tensor_type.name == encoding:
            assert lazy.encoding == encoding and lazy.is_quantized
            data = opened.components(name)["data"]
            assert np.array_equal(data.numpy(), tensor.data)
            parts = loadstone.dequantize({"data": data}, encoding, lazy.shape, torch.float32)
            assert torch.equal(parts, lazy[:])
    assert opened.metadata["general.architecture"]


def test_values_are_those_of_load(files: Files) -> None:
    written = files("nf4-nested")
    model = torch.nn.Module()
    for name, tensor in written.numbers.items():
        model.register_buffer(name.replace(".", "_"), torch.zeros(tensor.shape))
    rules = [
        {"op": "rename", "sources": [name.replace(".", r"\.")], "targets": [name.replace(".", "_")]}
        for name in written.numbers
    ]
    loadstone.load(model, written.path, rules=rules)
    every = loadstone.load_file(written.path, dtype=torch.float32)
    for name, tensor in every.items():
        assert same(model.state_dict()[name.replace(".", "_")], tensor)


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_when_it_is_read(case: str, tmp_path: Path) -> None:
    """Opening succeeds. Reading the invalid weight fails with the defect's code, but its stored
    components stay readable."""
    path, code = write_refused(REFUSED[case], tmp_path / "model").path, REFUSED[case].code
    opened = loadstone.open(path)
    with pytest.raises(loadstone.Error) as caught:
        for lazy in opened.values():
            lazy.tensor()
    assert caught.value.code == code
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load_file(path)
    assert caught.value.code == code
    expected = safetensors.torch.load_file(path / "model.safetensors")
    found = loadstone.torch.load_file(path)
    assert set(found) == set(expected) and all(same(found[n], expected[n]) for n in expected)
    safe = loadstone.safe_open(path)
    assert all(same(safe.get_tensor(name), expected[name]) for name in expected)


INDICES: list[Any] = [
    slice(None), (), ..., 0, -1, 6, slice(1, 3), slice(-2, None), slice(0, 99), slice(5, 2),
    slice(None, None, 1), slice(None, None, 3), slice(-99, 2), None, (None, 0), (slice(None), 2),
    (slice(2, 5), slice(1, -1)), (0, 0), (3, slice(None, None, 2)), (..., 0), (0, ...), (..., None),
    (slice(None), None, slice(2)), (slice(1, 1), 0), np.int64(2), torch.tensor(3), [], [0, 5],
    (slice(None), [1, 1]), torch.tensor([4, 0]), np.array([True, False] * 3 + [True]), True,
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("name", ["float32.matrix", "bfloat16.matrix", "bool.matrix"])
def test_each_index_is_torchs(index: Any, name: str, plain: Path) -> None:
    whole = safetensors.torch.load_file(plain)[name]
    expected = whole[torch.as_tensor(index, dtype=torch.long) if type(index) is list else index]
    with loadstone.open(plain) as opened, loadstone.safe_open(plain) as safe:
        assert same(opened[name][index], expected)
        assert same(safe.get_slice(name)[index], expected)


NO_INDICES: list[Any] = [torch.tensor([9]), torch.tensor([True, False]), 1.0, "x", [99]]


@pytest.mark.parametrize(
    "index", [7, -8, (0, 6), (0, 0, 0), slice(None, None, -1), (..., ...), *NO_INDICES], ids=repr
)
def test_an_index_that_is_none(index: Any, plain: Path) -> None:
    for lazy in (loadstone.open(plain)["int64.matrix"],
                 loadstone.safe_open(plain).get_slice("int64.matrix")):  # fmt: skip
        with pytest.raises(IndexError, match=r"int64\.matrix") as caught:
            lazy[index]
        assert isinstance(caught.value, loadstone.PlanError)
        assert caught.value.code == "open.index"
    with pytest.raises(IndexError):
        loadstone.open(plain)["int64.number"][0]
    assert loadstone.open(plain)["int64.number"][:].shape == ()


def test_a_slice_reads_its_rows_and_no_more(big: tuple[Path, torch.Tensor]) -> None:
    path, tensor = big
    row = 256 * 4
    with loadstone.open(path) as opened:
        lazy = opened["w"]
        assert (lazy.nbytes, lazy.stored_bytes, opened.bytes_read) == (4096 * row, 4096 * row, 0)
        for index, most in [
            (slice(0, 128), 128 * row),
            ((slice(0, 128), slice(None)), 128 * row),
            (-1, row),
            ((7, slice(3, 9)), 6 * 4),
            ((slice(100, 102), slice(0, 2)), 2 * row),
            (slice(3, 3), 0),
        ]:
            before = opened.bytes_read
            assert torch.equal(lazy[index], tensor[index])
            assert opened.bytes_read - before <= most, index


@pytest.mark.parametrize("codec", ["fp8-block", "nf4-nested", "gguf-Q4_K", "packed-4-g32"])
def test_a_slice_of_codes_reads_a_part_of_them(codec: str, files: Files) -> None:
    opened = loadstone.open(files(codec).path)
    lazy = max((each for each in opened.values() if each.is_quantized), key=lambda t: t.numel())
    lazy[0:1]
    part = opened.bytes_read
    lazy[:]
    assert 0 < part < opened.bytes_read - part


def test_mapping(plain: Path) -> None:
    with loadstone.open(plain) as opened:
        assert "bool.matrix" in opened and "nothing" not in opened and 3 not in opened
        assert list(opened.keys()) == list(opened) and len(opened) == 3 * len(KINDS)
        assert opened.metadata == {"format": "pt", "who": "a test"}
        assert opened.get("nothing") is None and opened.get("nothing", 5) == 5
        lazy = opened["bfloat16.matrix"]
        assert (lazy.name, lazy.shape, lazy.dtype, lazy.encoding, lazy.ndim) == (
            "bfloat16.matrix", (7, 6), torch.bfloat16, "BF16", 2
        )  # fmt: skip
        assert (lazy.nbytes, lazy.stored_bytes, lazy.numel(), len(lazy)) == (84, 84, 42, 7)
        assert not lazy.is_quantized and "bfloat16.matrix" in repr(lazy)
        assert opened.bytes_read == 0


def test_a_lazy_tensor_is_a_tensor_where_one_is_wanted(plain: Path) -> None:
    expected = safetensors.torch.load_file(plain)["float32.matrix"].nan_to_num()
    lazy = loadstone.open(plain)["float32.matrix"]
    for made in (torch.asarray(lazy), torch.as_tensor(lazy), torch.from_dlpack(lazy),
                 torch.from_numpy(np.asarray(lazy)), torch.stack(list(lazy))):  # fmt: skip
        assert torch.equal(made.nan_to_num(), expected)
    assert torch.equal(torch.nan_to_num(lazy), expected)
    assert torch.stack([lazy, lazy]).shape == (2, 7, 6)
    with pytest.raises(TypeError):
        loadstone.open(plain)["bfloat16.matrix"].numpy()
    with pytest.raises(TypeError):
        len(loadstone.open(plain)["float32.number"])


@pytest.mark.parametrize("wanted", [torch.bfloat16, "bfloat16", "torch.bfloat16", "BF16"])
def test_dtype_is_for_floating_point_numbers(wanted: Any, files: Files) -> None:
    numbers = files("plain").numbers
    path = files("plain").path
    found = loadstone.load_file(path, dtype=wanted)
    opened = loadstone.open(path, dtype=wanted)
    for name, tensor in numbers.items():
        floating = tensor.is_floating_point()
        assert found[name].dtype == (torch.bfloat16 if floating else tensor.dtype)
        assert same(opened[name][...], found[name]) and opened[name].dtype == found[name].dtype
    assert loadstone.open(path).get("of_int32.ids", dtype="int64").dtype == torch.int64
    with pytest.raises(loadstone.PlanError, match=r"of_float32.weight") as caught:
        loadstone.open(path).get("of_float32.weight", dtype=torch.int8)
    assert caught.value.code == "plan.dtype"
    with pytest.raises(ValueError, match="float12"):
        loadstone.open(path, dtype="float12")


def test_a_sharded_folder(files: Files) -> None:
    written = files("mixed-shards")
    assert written.path.is_dir()
    index = written.path / "model.safetensors.index.json"
    for path in (written.path, index, sorted(written.path.glob("*.safetensors"))):
        opened = loadstone.open(path)
        assert set(opened) == set(written.numbers)
        name = next(iter(written.quantized))
        assert torch.equal(opened[name][...], written.numbers[name])
    assert len(loadstone.open(written.path).catalog.shards) == 3


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nonsense", torch.device("meta")])
def test_a_device_that_holds_no_values(device: Any, plain: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: loadstone.open(plain, device=device),
        lambda: loadstone.open(plain).get("bool.number", device=device),
        lambda: loadstone.load_file(plain, device),
        lambda: loadstone.safe_open(plain, "pt", device),
        lambda: loadstone.torch.load_file(plain, device),
    ]
    for call in calls:
        with pytest.raises(loadstone.PlanError) as caught:
            call()
        assert (caught.value.code, caught.value.found) == ("plan.options", str(device))
    assert loadstone.load_file(plain, torch.device("cpu"))["bool.number"].device.type == "cpu"


def test_an_unknown_name_lists_the_nearest(plain: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: loadstone.open(plain)["bool.matrx"],
        lambda: loadstone.open(plain).components("bool.matrx"),
        lambda: loadstone.safe_open(plain).get_tensor("bool.matrx"),
        lambda: loadstone.safe_open(plain).get_slice("bool.matrx"),
    ]
    for call in calls:
        with pytest.raises(KeyError) as caught:
            call()
        error = caught.value
        assert isinstance(error, loadstone.Error) and error.code == "open.name"
        assert "bool.matrix" in str(error) and str(plain) in str(error)
        assert error.tensor == "bool.matrx" and pickle.loads(pickle.dumps(error)).code == error.code


def test_the_name_of_a_component_names_its_codes(tmp_path: Path) -> None:
    codes = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"a": codes, "scales": torch.ones(3)}, tmp_path / "m.safetensors")
    opened = loadstone.open(tmp_path / "m.safetensors")
    assert "scales" not in opened
    with pytest.raises(KeyError, match=r"scales: the tensor belongs to the codes of 'a'"):
        opened["scales"]


def test_errors_of_files_are_also_pythons(tmp_path: Path) -> None:
    for door in (loadstone.open, loadstone.load_file, loadstone.safe_open):
        with pytest.raises(FileNotFoundError) as caught:
            door(tmp_path / "no.safetensors")
        assert caught.value.path == str(tmp_path / "no.safetensors")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"abc")
    for kind in (ValueError, OSError, loadstone.FormatError):
        with pytest.raises(kind, match=r"bad\.safetensors"):
            loadstone.open(bad)


def test_closed(plain: Path) -> None:
    with loadstone.open(plain) as opened:
        lazy = opened["bool.matrix"]
    calls: list[Callable[[], Any]] = [
        lambda: lazy[0], lazy.tensor, lazy.components, lambda: opened.get("bool.matrix")
    ]  # fmt: skip
    with loadstone.safe_open(plain) as safe:
        part = safe.get_slice("bool.matrix")
    calls += [lambda: part[0], safe.keys, safe.metadata, lambda: safe.get_tensor("bool.matrix")]
    for call in calls:
        with pytest.raises(loadstone.PlanError) as caught:
            call()
        assert caught.value.code == "open.closed"


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(4)}, path)
    opened = loadstone.open(path)
    assert torch.equal(opened["w"][:], torch.ones(4))
    safetensors.torch.save_file({"w": torch.zeros(4)}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(loadstone.LoadError) as caught:
        opened["w"][:]
    assert caught.value.code == "io.changed" and caught.value.path == str(path)


def test_safe_open_is_safetensors(plain: Path) -> None:
    ours, theirs = loadstone.safe_open(plain, "pt", "cpu"), safetensors.safe_open(plain, "pt")
    assert ours.keys() == theirs.keys() and ours.metadata() == theirs.metadata()
    assert ours.offset_keys() == theirs.offset_keys()
    for name in theirs.keys():  # noqa: SIM118
        mine, other = ours.get_slice(name), theirs.get_slice(name)
        assert (mine.get_shape(), mine.get_dtype()) == (other.get_shape(), other.get_dtype())
    arrays = loadstone.safe_open(plain, framework="numpy")
    assert isinstance(arrays.get_tensor("int16.matrix"), np.ndarray)
    assert arrays.get_slice("int16.matrix")[2:4, 1].shape == (2,)
    for wrong in ({"framework": "tf"}, {"backend": "gds"}):
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.safe_open(plain, **wrong)
        assert caught.value.code == "plan.options"


def test_pairs_of_four_bits(tmp_path: Path) -> None:
    path = tmp_path / "f4.safetensors"
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    safetensors.torch.save_file({"w": pairs}, path)
    with loadstone.safe_open(path) as opened:
        assert opened.get_slice("w").get_shape() == [3, 8]
        assert same(opened.get_tensor("w"), pairs)
    assert same(loadstone.torch.load_file(path)["w"], pairs)
    assert same(loadstone.open(path)["w"][1:3], pairs.view(torch.uint8)[1:3].view(pairs.dtype))


def test_many_threads_read_one_checkpoint(big: tuple[Path, torch.Tensor]) -> None:
    path, tensor = big
    opened, wrong = loadstone.open(path), []

    def read(first: int) -> None:
        for row in range(first, 4096, 512):
            if not torch.equal(opened["w"][row : row + 8], tensor[row : row + 8]):
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(0, 64, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and opened.bytes_read == 64 * 8 * 1024


def test_hub_ids_are_found_in_the_cache(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0" * 40)
    (snapshot / "model.safetensors").write_bytes(plain.read_bytes())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    expected = loadstone.load_file(plain)
    for name in ("some/model", "some/model/model.safetensors"):
        assert set(loadstone.load_file(name)) == set(expected)
        assert set(loadstone.open(name)) == set(loadstone.inspect(name).tensors)
    with pytest.raises(FileNotFoundError, match="some/other"):
        loadstone.open("some/other")
    (tmp_path / "some/model").mkdir(parents=True)  # a path takes precedence over a hub id
    with pytest.raises(loadstone.FormatError):
        loadstone.open("some/model")


def test_star_import_shadows_nothing() -> None:
    space: dict[str, Any] = {}
    exec("from loadstone import *", space)
    assert space["load_file"] is loadstone.load_file
    shadowed = {"torch", "transformers", "diffusers", "accelerate", "bitsandbytes", "modelopt"}
    assert not (shadowed | {"open"}) & set(space)
    assert {"torch", "open"} < set(dir(loadstone))
