"""Tests that loadstone.torch's functions read and write the same bytes as safetensors.torch's."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as theirs
import torch
from torch_values import DTYPES, same, some

import loadstone

ours = loadstone.torch
STATE = {
    f"{str(dtype)[6:]}.{number}": some(dtype, 3, number)
    for dtype in DTYPES
    if dtype != torch.complex128
    for number in (0, 1, 5)
}


class Tied(torch.nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Linear(4, 3)
        self.a = self.b


class Apart(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
        self.b = torch.nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (STATE, None),
        (STATE, {"format": "pt"}),
        ({}, None),
        (
            {"number": torch.tensor(2.0), "\xe9\n\"'\\/\x7f\x01 \u96ea": torch.ones(2)},
            {"\xfc": "\t\u2028"},
        ),
        ({"pairs": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, None),
        (dict(reversed(STATE.items())), {"a": "b"}),
        ({"parameter": torch.nn.Parameter(torch.ones(3))}, None),
    ],
)
def test_the_bytes_are_those_of_safetensors(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    assert ours.save(tensors, metadata) == theirs.save(tensors, metadata)
    ours.save_file(tensors, tmp_path / "ours", metadata)
    theirs.save_file(tensors, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = theirs.load_file(tmp_path / "ours")
    again = ours.load_file(str(tmp_path / "ours"), "cpu", backend="pread")
    data = ours.load(ours.save(tensors, metadata))
    assert set(found) == set(again) == set(data) == set(tensors)
    for name, tensor in tensors.items():
        assert same(again[name], tensor) and same(data[name], tensor) and same(found[name], tensor)


def shared() -> dict[str, torch.Tensor]:
    whole = torch.zeros(4, 4)
    return {"whole": whole, "rows": whole[1:3], "other": torch.ones(2)}


REFUSED: dict[str, tuple[Callable[[], Any], str, str, type[Exception]]] = {
    "no dictionary": (lambda: [torch.ones(2)], "save.tensor", "dict", ValueError),
    "no tensor": (lambda: {"w": 1}, "save.tensor", "int", ValueError),
    "no name": (lambda: {1: torch.ones(2)}, "save.tensor", "1", ValueError),
    "half a letter": (lambda: {"\ud800": torch.ones(2)}, "save.tensor", "UTF-8", ValueError),
    "kept name": (lambda: {"__metadata__": torch.ones(2)}, "save.tensor", "reserved", ValueError),
    "dtype": (
        lambda: {"w": torch.ones(2, dtype=torch.complex128)}, "save.tensor", "complex128",
        ValueError,
    ),
    "turned": (
        lambda: {"w": torch.ones(2, 3).t()}, "save.layout", "non contiguous", ValueError
    ),
    "sparse": (lambda: {"w": torch.ones(2, 3).to_sparse()}, "save.layout", "sparse", ValueError),
    "meta": (
        lambda: {"w": torch.empty(2, device="meta")}, "save.layout",
        "Cannot copy out of meta tensor", RuntimeError,
    ),
    "conjugate": (
        lambda: {"w": torch.ones(2, dtype=torch.complex64).conj()}, "save.layout", "conj",
        ValueError,
    ),
    "shared": (shared, "save.shared", "rows, whole", RuntimeError),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_before_a_file_is_there(
    case: str, tmp_path: Path
) -> None:
    make, code, word, kind = REFUSED[case]
    for call in (
        lambda: ours.save_file(make(), tmp_path / "out.safetensors"),
        lambda: ours.save(make()),
    ):
        with pytest.raises(kind, match=word) as caught:
            call()
        assert isinstance(caught.value, loadstone.Error) and caught.value.code == code
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(loadstone.Error) as caught:
        ours.save({"w": torch.ones(1)}, {"a": 1})
    assert caught.value.code == "save.tensor"


def test_parts_of_a_storage_that_do_not_overlap_are_written(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    parts = {"a": whole[:4], "b": whole[4:], "c": torch.empty(0)}
    ours.save_file(parts, tmp_path / "m")
    assert all(same(ours.load_file(tmp_path / "m")[name], parts[name]) for name in parts)
    strided = torch.zeros(4, 6)
    with pytest.raises(loadstone.PlanError) as caught:
        ours.save({"rows": strided[:, :2], "turned": strided.t()})
    assert caught.value.code == "save.shared"


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = tmp_path / "m.safetensors", {"w": torch.ones(3)}
    ours.save_file(old, path)
    mapped = theirs.load_file(path)  # keeps the old file mapped
    ours.save_file({"w": torch.zeros(3)}, path)
    assert same(mapped["w"], old["w"]) and same(ours.load_file(path)["w"], torch.zeros(3))

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, function in (("write", full), ("fsync", lambda descriptor: full(descriptor, b""))):
        with monkeypatch.context() as patched:
            patched.setattr(f"loadstone._convert.save.os.{name}", function)
            with pytest.raises(OSError, match=r"m\.safetensors") as caught:
                ours.save_file(old, path)
        assert isinstance(caught.value, loadstone.LoadError)
        assert (caught.value.code, caught.value.errno) == ("io.no_space", errno.ENOSPC)
        assert [each.name for each in tmp_path.iterdir()] == ["m.safetensors"]
        assert same(ours.load_file(path)["w"], torch.zeros(3))


def test_where_a_file_cannot_be(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with pytest.raises(FileNotFoundError) as caught:
        ours.save_file(state, tmp_path / "no" / "m")
    assert caught.value.code == "io.not_found"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/null")):
        with pytest.raises(loadstone.LoadError) as caught:
            ours.save_file(state, path)
        assert caught.value.code == "io.not_regular"
    assert Path("/dev/null").is_char_device()


def test_a_link_stays_one_and_rights_are_the_users(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    before = os.umask(0o027)
    try:
        ours.save_file({"w": torch.ones(3)}, link)
        ours.save_file({"w": torch.ones(3)}, tmp_path / "new")
    finally:
        os.umask(before)
    assert link.is_symlink() and same(ours.load_file(real)["w"], torch.ones(3))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("make", [Tied, Apart])
def test_models_there_and_back(make: type[torch.nn.Module], tmp_path: Path) -> None:
    model, fresh, other = make(), make(), make()
    ours.save_model(model, tmp_path / "ours", {"x": "y"})
    theirs.save_model(model, str(tmp_path / "theirs"), {"x": "y"})
    assert (
        theirs.load_file(tmp_path / "ours").keys() == theirs.load_file(tmp_path / "theirs").keys()
    )
    notes = [loadstone.inspect(tmp_path / each).metadata for each in ("ours", "theirs")]
    assert notes[0] == notes[1]
    assert ours.load_model(fresh, tmp_path / "theirs") == ([], [])
    assert theirs.load_model(other, tmp_path / "ours") == (set(), [])
    for name, tensor in model.state_dict().items():
        assert same(fresh.state_dict()[name], tensor) and same(other.state_dict()[name], tensor)


def test_strict(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ours.save_file({"a.weight": torch.ones(3, 4), "more": torch.ones(1)}, path)
    for load in (ours.load_model, theirs.load_model):
        missing, unexpected = load(Apart(), path, strict=False)
        assert set(missing) == {"a.bias", "b.weight", "b.bias"} and unexpected == ["more"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "a.bias"'):
            load(Apart(), path)
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_model(Apart(), path, True)
    assert caught.value.code == "plan.missing" and '"more"' in str(caught.value)
    model = Tied()
    ours.save_model(model, path)
    with pytest.raises(RuntimeError, match=r'"b.bias", "b.weight"'):
        ours.load_model(Apart(), path)  # the file has one layer, but the model has two


def test_a_model_on_meta_is_not_left_there(tmp_path: Path) -> None:
    ours.save_model(Apart(), tmp_path / "m")
    with loadstone.skeleton():
        model = Apart()
    for strict in (True, False):
        with pytest.raises(loadstone.PlanError, match=r"a\.weight") as caught:
            ours.load_model(model, tmp_path / "m", strict)
        assert caught.value.code == "plan.no_value"


def test_not_contiguous(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    model.weight = torch.nn.Parameter(torch.randn(3, 4).t())
    with pytest.raises(ValueError, match=r"use save_model\(..., force_contiguous=True\)"):
        ours.save_model(model, tmp_path / "m", force_contiguous=False)
    ours.save_model(model, tmp_path / "m")
    assert same(ours.load_file(tmp_path / "m")["weight"], model.weight.detach().contiguous())


def test_none_of_the_shared_is_all() -> None:
    model = torch.nn.Module()
    whole = torch.zeros(6)
    model.register_buffer("a", whole[:4])
    model.register_buffer("b", whole[2:])
    with pytest.raises(RuntimeError, match="a, b"):
        ours.save_model(model, "nowhere")


def test_links_out_of_the_folder_are_followed_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ours.save_file({"w": torch.ones(3)}, tmp_path / "real")
    (folder / "part.safetensors").symlink_to(tmp_path / "real")
    index = {"weight_map": {"w": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (ours.load_file, loadstone.safe_open):
        with pytest.raises(loadstone.FormatError) as caught:
            read(folder)
        assert caught.value.code == "ix.path_escape"
    assert same(ours.load_file(folder, allow_links=True)["w"], torch.ones(3))
    with loadstone.safe_open(folder, allow_links=True) as file:
        assert same(file.get_tensor("w"), torch.ones(3))


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_file_that_is_replaced_keeps_its_rights(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.touch()
    file.chmod(mode)
    loadstone.torch.save_file({"a": torch.ones(1)}, file)
    assert file.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("name", ["\u044f" * 120, "a" * 250])
def test_long_names(name: str, tmp_path: Path) -> None:
    loadstone.torch.save_file({"a": torch.ones(1)}, tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["folder/", "a\0b"])
def test_names_of_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error):
        loadstone.torch.save_file({"a": torch.ones(1)}, f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [[("a", "b")], "abc", 5])
def test_metadata_is_a_dict(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error, match="metadata"):
        loadstone.torch.save_file({"a": torch.ones(1)}, tmp_path / "x", metadata=metadata)
    assert list(tmp_path.iterdir()) == []
