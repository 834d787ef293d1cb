"""Tests that a different model's config is reported as one finding, before data is read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import (
    Case,
    by_name,
    differences,
    write_config,
    write_header_only,
    write_single_file,
)
from safetensors.torch import save_file

import loadstone
import loadstone.diffusers

pytest.importorskip("diffusers")

WAN21, WAN22 = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
IMAGE = re.compile(r"img_emb|k_img|v_img")
T2V, I2V, TI2V = by_name("wan_t2v"), by_name("wan_i2v"), by_name("wan_ti2v")

# Published values. The class's defaults are those of the 14B text-to-video model.
I2V_14B = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
TI2V_5B = {
    "in_channels": 48, "out_channels": 48, "num_layers": 30, "num_attention_heads": 24,
    "ffn_dim": 14336,
}  # fmt: skip


def full_size(changes: dict[str, Any]) -> tuple[Case, Any]:
    case = dataclasses.replace(T2V, changes=changes)
    with torch.device("meta"):
        return case, case.construct()


class Cache:
    """A hub cache to which tests add configs under the names of real repositories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, config: dict[str, Any]) -> None:
        repository = self.folder / f"models--{name.replace('/', '--')}"
        path = repository / "snapshots" / "0123" / "transformer"
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, default=str))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    from huggingface_hub import constants

    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return Cache(folder)


def config_of(model: Any) -> dict[str, Any]:
    return {"_class_name": type(model).__name__, **dict(model.config)}


def guessed(file: str) -> Any:
    """Load a file with the config that diffusers guesses for it."""
    return loadstone.diffusers.from_single_file(
        T2V.cls, file, subfolder="transformer", local_files_only=True, torch_dtype=torch.bfloat16
    )


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def only_error(error: loadstone.PlanError) -> loadstone.Finding:
    errors = [item for item in error.findings if item.severity == "error"]
    assert len(errors) == 1
    assert error.code == errors[0].code
    return errors[0]


# --- published models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, fields, counts, tensors",
    [
        (
            {"in_channels": 36},
            {"image_dim": "None", "added_kv_proj_dim": "None"},
            "208 tensors of file and model disagree (208 missing)",
            1095,
        ),
        (
            TI2V_5B,
            {name: str(value) for name, value in TI2V_5B.items()}
            | {"image_dim": "None", "added_kv_proj_dim": "None"},
            "1303 tensors of file and model disagree (478 missing, 825 of a different shape)",
            825,
        ),
    ],
    ids=["wan2.2-i2v-a14b", "wan2.2-ti2v-5b"],
)
def test_full_size_under_the_guessed_config(
    tmp_path: Path,
    cache: Cache,
    changes: dict[str, Any],
    fields: dict[str, str],
    counts: str,
    tensors: int,
) -> None:
    """diffusers mistakes either file for Wan2.1 I2V 14B. The data in the files is a hole."""
    _, guess = full_size(I2V_14B)
    cache.add(WAN21, config_of(guess))
    case, model = full_size(changes)
    state = case.original(model)
    assert len(state) == tensors
    file = write_header_only(state, tmp_path / "wan.safetensors")
    assert Path(file).stat().st_size > 9_000_000_000
    before = bytes_read()
    with pytest.raises(loadstone.PlanError) as raised:
        guessed(file)
    assert bytes_read() - before < 50_000_000
    found = only_error(raised.value)
    assert found.code == "plan.config_mismatch"
    assert found.message.startswith(counts)
    told = dict(re.findall(r"(\w+)=(\w+) \(not", found.message))
    assert told == fields
    assert "all fit" in found.message
    untried = found.message.partition("were not tried: ")[2]
    assert "'Wan-AI/Wan2.1-T2V-14B-Diffusers'" in untried
    assert WAN21 not in untried  # the cache has this config, so it was tried


# --- configs in the cache -------------------------------------------------------------------------


def wan22(folder: Path) -> tuple[Any, str]:
    """Return a tiny Wan2.2 I2V and its file."""
    case = dataclasses.replace(T2V, changes=T2V.changes | {"in_channels": 36, "eps": 1e-5})
    model = case.build()
    save_file(case.original(model), folder / "wan22.safetensors")
    return model, str(folder / "wan22.safetensors")


def test_known_config_in_the_cache(tmp_path: Path, cache: Cache) -> None:
    model, file = wan22(tmp_path)
    cache.add(WAN21, config_of(I2V.construct()))
    cache.add(WAN22, config_of(model))
    cache.add("Wan-AI/Wan2.1-T2V-14B-Diffusers", config_of(TI2V.construct()))
    with pytest.raises(loadstone.PlanError) as raised:
        guessed(file)
    found = only_error(raised.value)
    assert found.code == "plan.config_mismatch"
    assert f"config='{WAN22}', subfolder='transformer' fits" in found.message
    assert f"pass config='{WAN22}', subfolder='transformer'" in found.suggestion
    assert "T2V" not in found.message
    assert found.suggestion in str(raised.value)


def test_known_config_is_taken_on_request(tmp_path: Path, cache: Cache) -> None:
    """The cached config also corrects ``eps``, which no shape reveals."""
    model, file = wan22(tmp_path)
    cache.add(WAN21, config_of(I2V.construct()))
    cache.add(WAN22, config_of(model))
    made = loadstone.diffusers.from_single_file(
        T2V.cls, file, subfolder="transformer", local_files_only=True, config="infer"
    )
    assert differences(made, model) == []
    assert made.config.eps == 1e-5


def test_without_it_the_fields_are_corrected(tmp_path: Path, cache: Cache) -> None:
    """Control: only fields that shapes reveal are corrected, so ``eps`` stays the guessed one."""
    model, file = wan22(tmp_path)
    cache.add(WAN21, config_of(I2V.construct()))
    with pytest.raises(loadstone.PlanError) as raised:
        guessed(file)
    found = only_error(raised.value)
    assert " fits" not in found.message
    assert "image_dim=None (not 32)" in found.message
    made = loadstone.diffusers.from_single_file(
        T2V.cls, file, subfolder="transformer", local_files_only=True, config="infer"
    )
    assert differences(made, model) == []
    assert made.config.eps == 1e-6


@pytest.mark.parametrize("place", ["beside", "given"])
def test_known_config_in_a_folder(tmp_path: Path, cache: Cache, place: str) -> None:
    model, file = wan22(tmp_path)
    wrong = write_config(I2V.construct(), tmp_path / "wrong" / "transformer")
    folder = tmp_path / ("models" if place == "beside" else "wrong/transformer/other")
    right = write_config(model, folder)
    if place == "given":  # the folder of the file must have no config
        (tmp_path / "alone" / "deep" / "deeper").mkdir(parents=True)
        file = str(Path(file).rename(tmp_path / "alone/deep/deeper/wan.safetensors"))
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.diffusers.from_single_file(T2V.cls, file, config=wrong)
    found = only_error(raised.value)
    assert f"config={right!r} fits" in found.message
    assert found.suggestion.startswith(f"pass config={right!r}, or ")
    assert found.suggestion.endswith(", or pass infer_config=True")
    for options in ({"config": right}, {"config": wrong, "infer_config": True}):
        made = loadstone.diffusers.from_single_file(T2V.cls, file, **options)
        assert differences(made, model) == []


def four_blocks(folder: Path) -> tuple[Any, str, str]:
    """Return a model, its file, and the folder of a config with two blocks."""
    four = dataclasses.replace(T2V, changes=T2V.changes | {"num_layers": 4})
    model = four.build()
    save_file(four.original(model), folder / "wan.safetensors")
    return model, str(folder / "wan.safetensors"), write_config(T2V.construct(), folder / "two")


def load(file: str, **options: Any) -> Any:
    return loadstone.diffusers.from_single_file(T2V.cls, file, **options)


def test_blocks_that_the_model_lacks(tmp_path: Path, cache: Cache) -> None:
    model, file, two = four_blocks(tmp_path)
    with pytest.raises(loadstone.PlanError) as raised:
        load(file, config=two)
    found = only_error(raised.value)
    assert found.code == "plan.config_mismatch"
    assert "the file has 4 blocks 'blocks', the config 2" in found.message
    assert "with num_layers=4 (not 2) all fit" in found.message
    with pytest.warns(UserWarning, match=r"inferred: num_layers=4 \(not 2\)"):
        made = load(file, config=two, infer_config=True)
    assert differences(made, model) == []
    with loadstone.patch("diffusers"):  # as the library's own load
        assert len(T2V.cls.from_single_file(file, config=two).blocks) == 2


def test_blocks_that_the_model_of_a_folder_lacks(tmp_path: Path, cache: Cache) -> None:
    model, _, two = four_blocks(tmp_path)
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder/config.json").write_text(Path(two, "config.json").read_text())
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.diffusers.from_pretrained(T2V.cls, tmp_path / "folder")
    found = only_error(raised.value)
    assert "the file has 4 blocks 'blocks', the config 2" in found.message
    assert found.suggestion == "correct these fields of the config"  # no option infers it


def test_a_smaller_model_of_the_caller_is_loaded(tmp_path: Path) -> None:
    """A model that the caller built may have fewer blocks on purpose."""
    model, file, _ = four_blocks(tmp_path)
    with loadstone.skeleton():
        two = T2V.construct()
    loadstone.load(two, file, rules="diffusers", unexpected="ignore")
    assert torch.equal(two.blocks[1].norm2.weight, model.blocks[1].norm2.weight)


def test_the_config_next_to_the_file_is_inferred(tmp_path: Path, cache: Cache) -> None:
    """It also has the fields that no shape reveals; the library's guess is not even cached."""
    model, file = wan22(tmp_path)
    write_config(model, tmp_path)
    with pytest.warns(UserWarning, match=re.escape(f"inferred: config='{tmp_path}'")):
        made = load(file, config="infer")
    assert differences(made, model) == []
    assert made.config.eps == 1e-5
    plan = load(file, config="infer", dry_run=True)
    [found] = [each for each in plan.findings if each.code == "plan.config_mismatch"]
    assert (found.severity, found.message) == (
        "info",
        f"the config is inferred: config='{tmp_path}'",
    )


def test_an_absent_config_is_an_error_that_names_one(tmp_path: Path, cache: Cache) -> None:
    model, file = wan22(tmp_path)
    config = write_config(model, tmp_path / "near")
    with pytest.raises(loadstone.Error) as raised:
        load(file, local_files_only=True)
    assert raised.value.code == "io.not_found"
    assert f"or infer_config=True, which tries config={config!r}" in str(raised.value)
    assert differences(load(file, infer_config=True, local_files_only=True), model) == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repositories whose files diffusers requests from the hub, which fails."""
    requests: list[str] = []

    def download(name: str, *_: Any, local_files_only: bool = False, **__: Any) -> str:
        requests.extend([] if local_files_only else [name])
        raise OSError("no connection")

    monkeypatch.setattr("diffusers.configuration_utils.hf_hub_download", download)
    return requests


def test_a_local_config_is_inferred_without_the_hub(
    tmp_path: Path, cache: Cache, hub: list[str]
) -> None:
    model, file = wan22(tmp_path)
    write_config(model, tmp_path / "near")
    assert differences(load(file, config="infer"), model) == []
    assert hub == []


def test_the_hub_comes_before_changes_of_a_local_config(
    tmp_path: Path, cache: Cache, hub: list[str]
) -> None:
    model, file = wan22(tmp_path)
    write_config(I2V.construct(), tmp_path / "near")
    with pytest.warns(UserWarning, match=r"inferred: image_dim=None"):
        made = load(file, config="infer")
    assert differences(made, model) == []
    assert len(hub) == 1


def test_without_any_config_the_error_names_the_argument(tmp_path: Path, hub: list[str]) -> None:
    file = wan22(tmp_path)[1]
    with pytest.raises(loadstone.Error, match="pass config=, a folder with the model's") as raised:
        load(file, config="infer")
    assert raised.value.code == "io.not_found" and len(hub) == 1
    hub.clear()
    with pytest.raises(loadstone.OptionError, match="did you mean 'infer'"):
        load(file, config="infre")
    assert hub == []


@pytest.mark.parametrize("is_patched", [False, True])
def test_the_hub_is_named_before_it_is_asked(
    tmp_path: Path,
    cache: Cache,
    hub: list[str],
    is_patched: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    model, file = wan22(tmp_path)
    with loadstone.patch("diffusers") if is_patched else contextlib.nullcontext():
        own = T2V.cls.from_single_file if is_patched else load
        with pytest.raises(OSError, match="config"):
            own(file)
        assert hub == [WAN21]
        assert [record.name for record in caplog.records] == ["loadstone.diffusers"]
        assert f"requests the config of '{WAN21}' from the Hugging Face Hub" in caplog.text
        assert differences(own(file, config=write_config(model, tmp_path / "local")), model) == []
        caplog.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(OSError, match="config"):
            own(file)
        assert not caplog.records


def test_a_config_in_the_cache_needs_no_hub(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers.configuration_utils as library

    model = I2V.build()
    save_file(I2V.original(model), tmp_path / "wan.safetensors")
    cache.add(WAN21, config_of(model))
    download = library.hf_hub_download

    def local_download(*args: Any, local_files_only: bool = False, **kwargs: Any) -> str:
        assert local_files_only
        return download(*args, local_files_only=True, **kwargs)

    monkeypatch.setattr(library, "hf_hub_download", local_download)
    with loadstone.patch("diffusers"):
        assert differences(T2V.cls.from_single_file(str(tmp_path / "wan.safetensors")), model) == []


def test_a_pipelines_hub_is_named_before_it_is_asked(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers.loaders.single_file as library
    from diffusers_pipelines import stable_diffusion, stable_diffusion_keys

    def download(*_: Any, **__: Any) -> str:
        assert "requests the config of" in caplog.text
        raise OSError("no connection")

    monkeypatch.setattr(library, "snapshot_download", download)
    pipe = stable_diffusion(tmp_path / "pipe")
    save_file(stable_diffusion_keys(pipe), tmp_path / "sd.safetensors")
    with loadstone.patch("diffusers"), pytest.raises(OSError, match="no connection"):
        type(pipe).from_single_file(str(tmp_path / "sd.safetensors"))


@pytest.mark.parametrize("place", ["inferred", "given"])
def test_the_config_of_a_quantized_folder(tmp_path: Path, cache: Cache, place: str) -> None:
    """A single file is not quantized as the folder is, so its model's config must be plain."""
    model, file = wan22(tmp_path)
    model.save_pretrained(tmp_path / "plain")
    loadstone.convert(tmp_path / "plain", tmp_path / "a_quantized", quantize="nf4")
    assert "quantization_config" in (tmp_path / "a_quantized/config.json").read_text()
    config = str(tmp_path / "a_quantized")
    if place == "inferred":
        wrong = write_config(I2V.construct(), tmp_path / "wrong")
        with pytest.warns(UserWarning, match=re.escape(str(tmp_path / "plain"))):
            load(file, config=wrong, infer_config=True)  # plain configs come first
        shutil.rmtree(tmp_path / "plain")
        made = load(file, config=wrong, infer_config=True)
    else:
        made = load(file, config=config)
    assert differences(made, model) == []
    assert "quantization_config" not in made.config
    made.save_pretrained(tmp_path / "saved")
    again = T2V.cls.from_pretrained(tmp_path / "saved")
    assert differences(again, model) == []


def test_configs_of_other_classes_are_not_tried(tmp_path: Path, cache: Cache) -> None:
    model, file = wan22(tmp_path)
    cache.add(WAN21, config_of(I2V.construct()))
    cache.add(WAN22, config_of(model) | {"_class_name": "SkyReelsV2Transformer3DModel"})
    with pytest.raises(loadstone.PlanError) as raised:
        guessed(file)
    assert WAN22 not in str(raised.value)


# --- no config fits -------------------------------------------------------------------------------


def test_another_skeleton_is_one_finding(tmp_path: Path, cache: Cache) -> None:
    """Four config fields cause more than two hundred shape mismatches."""
    other = {"num_attention_heads": 6, "ffn_dim": 80, "text_dim": 24, "freq_dim": 16}
    many = dataclasses.replace(T2V, changes=T2V.changes | {"num_layers": 12})
    model = many.construct()
    file, _ = write_single_file(many, many.build(), tmp_path / "model.safetensors")
    wrong = dataclasses.replace(many, changes=many.changes | other).construct()
    theirs, ours = wrong.state_dict(), model.state_dict()
    clashes = sum(theirs[name].shape != ours[name].shape for name in ours)
    assert clashes > 200
    (tmp_path / "config" / "config.json").unlink()  # because the file's own config would fit
    config = write_config(wrong, tmp_path / "wrong")
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.diffusers.from_single_file(T2V.cls, file, config=config)
    found = only_error(raised.value)
    assert found.code == "plan.config_mismatch"
    assert found.message.startswith(f"{clashes} tensors of file and model disagree")
    told = dict(re.findall(r"(\w+)=(\w+) \(not", found.message))
    assert told == {name: str(many.changes[name]) for name in other}


def test_clashes_that_no_config_explains_are_one_error(tmp_path: Path, cache: Cache) -> None:
    case = dataclasses.replace(T2V, changes=T2V.changes | {"num_layers": 16})
    model = case.build()
    state = case.original(model)
    turned = [name for name in state if re.search(r"ffn\.\d\.weight", name)]
    assert len(turned) == 32
    for name in turned:
        state[name] = state[name].t().contiguous()
    save_file(state, tmp_path / "model.safetensors")
    config = write_config(model, tmp_path / "config")
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.diffusers.from_single_file(
            T2V.cls, str(tmp_path / "model.safetensors"), config=config
        )
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert {item.code for item in errors} == {"plan.shape"}
    assert {item.target for item in errors} == {
        name for name in model.state_dict() if re.search(r"ffn\.net.*weight", name)
    }
    text = str(raised.value)
    assert "32 errors: 32 plan.shape" in text
    assert "'blocks.0.ffn.net.0.proj.weight' is [64, 96] in the checkpoint" in text
    assert [line.rpartition(" (")[2] for line in text.splitlines() if " like it)" in line] == [
        "and 15 like it)",
        "and 14 like it)",  # the first line has one more
    ]
