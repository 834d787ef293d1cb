"""Tests files that lack tensors: one error names all targets and keys; a policy fills them."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_gguf import BLOCK_CASES, Kind, packed
from diffusers_models import (
    CASES,
    Case,
    by_name,
    differences,
    library_converted,
    write_config,
)
from safetensors.torch import load_file, save_file
from transformers_models import own_state

import loadstone
import loadstone.diffusers
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint
from loadstone._adapters.diffusers.conversion import Conversion, find_missing_keys
from loadstone._adapters.diffusers.expected_keys import prefix
from loadstone._execute.audit import last_report

diffusers = pytest.importorskip("diffusers")

COMFY = "model.diffusion_model."
SMALL = [case for case in CASES if not case.is_wide]
# Cases whose converter takes tensors by name, and one case per other kind of converter.
SAMPLE = (
    "sd35",
    "sana",
    "sdxl_unet",
    "wan_t2v",
    "z_image",
    "autoencoder_kl",
    "auraflow",
    "ltx_vae",
)
SD35, SANA, WAN = by_name("sd35"), by_name("sana"), by_name("wan_t2v")
QKV = f"{COMFY}joint_blocks.1.x_block.attn.qkv.weight"
NORM = f"{COMFY}joint_blocks.0.x_block.attn.ln_q.weight"
POSITIONS = f"{COMFY}pos_embed"
QKV_TARGETS = {f"transformer_blocks.1.attn.to_{each}.weight" for each in "qkv"}

pytestmark = pytest.mark.filterwarnings("error::loadstone.FilledWarning")


def sampled(cases: list[Case]) -> list[Any]:
    return [
        case if case.name in SAMPLE else pytest.param(case, marks=pytest.mark.sweep)
        for case in cases
    ]


class File:
    """A file of a case, without the tensors in ``gone``."""

    def __init__(self, folder: Path, case: Case, *gone: str, own: bool = False) -> None:
        self.case = case
        self.model = case.build()
        self.state = own_state(self.model) if own else case.original(self.model)
        self.path = folder / "model.safetensors"
        self.config = write_config(self.model, folder / "config")
        self.gone = gone
        save_file({name: self.state[name] for name in self.state if name not in gone}, self.path)

    def load(self, **options: Any) -> Any:
        return loadstone.diffusers.from_single_file(
            self.case.cls, str(self.path), config=self.config, **options
        )

    def filled(self, **options: Any) -> tuple[Any, str]:
        """Load the file; return the model and the text of the only warning."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = self.load(**options)
        reported = [item for item in caught if item.category is loadstone.FilledWarning]
        assert len(reported) == 1
        assert reported[0].filename == __file__  # the warning has the line of the load's caller
        return model, str(reported[0].message)

    def refused(self, **options: Any) -> loadstone.PlanError:
        with pytest.raises(loadstone.PlanError) as raised:
            self.load(**options)
        assert raised.value.code == "plan.missing"
        return raised.value

    def lost(self) -> dict[str, set[str]]:
        """Return, per missing tensor, the targets that diffusers' converter makes from it."""
        made = {}
        for name in self.gone:
            state = dict(self.state)
            state[name] = torch.full_like(state[name], float("nan"))
            converted = library_converted(self.case, state, self.model)
            made[name] = {key for key, each in converted.items() if each.isnan().any()}
        return made


def errors(error: loadstone.PlanError) -> dict[str, list[str]]:
    """Return, per missing target, the names in the file that the error gives."""
    found = {}
    for item in error.findings:
        if item.severity == "error":
            assert item.code == "plan.missing"
            found[item.target] = item.sources
    return found


def with_values(model: Any, values: Mapping[str, torch.Tensor]) -> Any:
    expected = copy.deepcopy(model)
    state = expected.state_dict()
    for name, value in values.items():
        state[name].copy_(value)
    return expected


# --- every layout --------------------------------------------------------------------------------


def some_names(case: Case) -> list[str]:
    """Return six names that the model needs, spread over the file, and one that is split."""
    state = case.original(case.build())
    names = [name for name in state if state[name].is_floating_point()]
    places = [len(names) * each // 6 for each in range(6)]
    cut = [name for name in names if re.search(r"qkv|kv_linear|linear1", name)][:1]
    return list(dict.fromkeys([*(names[place] for place in places), *cut]))


@pytest.mark.parametrize("case", sampled(SMALL), ids=repr)
def test_all_that_is_missing_is_named_and_filled(tmp_path: Path, case: Case) -> None:
    """The expected targets come from diffusers' converter on real tensors."""
    file = File(tmp_path, case, *some_names(case))
    lost = {name: targets for name, targets in file.lost().items() if targets}
    assert len(lost) >= 5
    found = errors(file.refused())
    assert found.keys() == set().union(*lost.values())
    named = {source for sources in found.values() for source in sources}
    unnamed = lost.keys() - named
    assert len(unnamed) <= UNNAMED.get(case.name, 0), unnamed
    for name in lost.keys() & named:
        assert {target for target in found if found[target] == [name]} == lost[name]
    model, reported = file.filled(missing="zeros")
    zeros = {name: torch.zeros(()) for name in found}
    assert differences(model, with_values(file.model, zeros)) == []
    assert {item.target for item in last_report(model).filled} == found.keys()
    assert reported.startswith(f"{len(found)} tensors of the model are not in the checkpoint")
    assert loadstone.audit(model).ok


# Number of missing tensors, per case, whose name in the file cannot be derived from the other
# tensors or the converter's code.
UNNAMED = {"z_image": 3, "wan_animate": 2, "wan_vae": 2, "cosmos": 1, "auraflow": 1}


@pytest.mark.parametrize("case", sampled(SMALL), ids=repr)
def test_missing_in_the_librarys_own_names(tmp_path: Path, case: Case) -> None:
    """diffusers also converts incomplete files that have its own names; loadstone must not."""
    names = list(own_state(case.build()))
    gone = [names[len(names) // 3], names[2 * len(names) // 3]]
    file = File(tmp_path, case, *gone, own=True)
    assert errors(file.refused()).keys() == set(gone)
    model, _ = file.filled(missing="zeros")
    zeros = {name: torch.zeros(()) for name in gone}
    assert differences(model, with_values(file.model, zeros)) == []


# --- keys that converters request -----------------------------------------------------------------


def test_what_the_library_says_of_it(tmp_path: Path) -> None:
    """diffusers' error names only the first key that its converter requests."""
    file = File(tmp_path, SD35, QKV, NORM)
    with pytest.raises(KeyError, match=r"joint_blocks\.1\.x_block\.attn\.qkv\.weight|ln_q"):
        SD35.cls.from_single_file(str(file.path), config=file.config)


def test_a_key_that_three_targets_are_cut_from(tmp_path: Path) -> None:
    file = File(tmp_path, SD35, QKV, NORM)
    found = errors(file.refused())
    assert found == {target: [QKV] for target in QKV_TARGETS} | {
        "transformer_blocks.0.attn.norm_q.weight": [NORM]
    }
    assert "4 errors: 4 plan.missing" in str(file.refused())


def test_policies_by_name_for_parts_of_one_key(tmp_path: Path) -> None:
    file = File(tmp_path, SD35, QKV)
    with pytest.raises(loadstone.PlanError) as raised:
        file.load(missing={r".*to_[qk]\.weight": "zeros"})
    assert errors(raised.value) == {"transformer_blocks.1.attn.to_v.weight": [QKV]}
    policies = {r".*to_[qk]\.weight": "zeros", r".*to_v\.weight": "initialise"}
    model, reported = file.filled(missing=policies)
    attention = model.transformer_blocks[1].attn
    assert not attention.to_q.weight.any()
    assert not attention.to_k.weight.any()
    assert attention.to_v.weight.std() > 0.01
    assert "2 with zeros and 1 by the model's initialisers" in reported


def test_a_key_that_nothing_is_made_of_does_no_harm(tmp_path: Path) -> None:
    """The converter requests these keys only to drop them."""
    file = File(tmp_path, SANA, f"{COMFY}pos_embed", f"{COMFY}y_embedder.y_embedding")
    model = file.load()
    assert differences(model, file.model) == []
    reported = [item for item in last_report(model).findings if item.code == "plan.missing"]
    assert {item.severity for item in reported} == {"info"}
    assert {source for item in reported for source in item.sources} == set(file.gone)
    with pytest.raises(KeyError, match="pos_embed"):
        SANA.cls.from_single_file(str(file.path), config=file.config)


def test_keys_of_the_converters_own_dictionary(tmp_path: Path) -> None:
    """Two of the four keys are present; without any of them, the error would be the config."""
    gone = [f"{COMFY}label_emb.0.{each}" for each in ("0.weight", "0.bias")]
    file = File(tmp_path, by_name("sdxl_unet"), *gone)
    assert errors(file.refused()) == {
        "add_embedding.linear_1.weight": [gone[0]],
        "add_embedding.linear_1.bias": [gone[1]],
    }
    with pytest.raises(KeyError, match=r"label_emb\.0\.0"):
        file.case.cls.from_single_file(str(file.path), config=file.config)


def test_what_is_passed_over_with_a_missing_neighbour(tmp_path: Path) -> None:
    """The converter copies this layer's bias only if the weight exists."""
    gone = "first_stage_model.encoder.down.0.downsample.conv.weight"
    file = File(tmp_path, by_name("autoencoder_kl"), gone)
    target = "encoder.down_blocks.0.downsamplers.0.conv.weight"
    assert errors(file.refused()) == {target: [gone]}
    model, _ = file.filled(missing="zeros")
    assert differences(model, with_values(file.model, {target: torch.zeros(())})) == []


def fused(folder: Path, monkeypatch: pytest.MonkeyPatch, *gone: str) -> File:
    """Write a file in which a matrix is in two parts, and make the converter join them."""
    from diffusers.loaders import single_file_model

    row = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["SanaTransformer2DModel"]
    whole = "final_layer.linear.weight"
    original = single_file_model.convert_sana_transformer_to_diffusers

    def convert(checkpoint: Any, **kwargs: Any) -> Any:
        parts = [checkpoint.pop(f"{COMFY}{whole}.{part}") for part in "ab"]
        checkpoint[COMFY + whole] = torch.cat(parts)
        return original(checkpoint=checkpoint, **kwargs)

    monkeypatch.setitem(row, "checkpoint_mapping_fn", convert)
    file = File(folder, SANA)
    first, second = file.state.pop(COMFY + whole).chunk(2)
    file.state |= {f"{COMFY}{whole}.a": first, f"{COMFY}{whole}.b": second}
    state = {name: each.contiguous() for name, each in file.state.items() if name not in gone}
    save_file(state, file.path)
    return file


def test_a_target_of_one_part_that_is_there_and_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, gone = (f"{COMFY}final_layer.linear.weight.{part}" for part in "ab")
    assert differences((file := fused(tmp_path, monkeypatch)).load(), file.model) == []
    file = fused(tmp_path, monkeypatch, gone)
    error = file.refused()
    assert errors(error) == {"proj_out.weight": [gone]}
    assert f"made from '{there}', which the checkpoint has, and '{gone}'" in str(error)
    model, _ = file.filled(missing="zeros")
    assert differences(model, with_values(file.model, {"proj_out.weight": torch.zeros(())})) == []
    reported = [
        item.message for item in last_report(model).findings if item.target == "proj_out.weight"
    ]
    assert any("loadstone fills all of it" in message for message in reported)


def test_what_cannot_be_worked_out_is_refused_by_its_key(tmp_path: Path) -> None:
    """The converter reshapes a missing tensor to a shape that cannot be derived."""
    file = File(tmp_path, SANA, f"{COMFY}t_block.1.weight", f"{COMFY}x_embedder.proj.bias")
    checkpoint = SymbolicCheckpoint.open([str(file.path)])

    def convert(checkpoint: Any) -> Any:
        first = checkpoint.pop(f"{COMFY}x_embedder.proj.bias")
        return {"a": first, "b": checkpoint.pop(f"{COMFY}t_block.1.weight").view(7, 11, 13)}

    conversion = Conversion(checkpoint, convert, {}, {"b": (7, 11, 13)})
    with pytest.raises(loadstone.PlanError) as raised:
        find_missing_keys(conversion)
    assert raised.value.code == "plan.missing"
    named = {source for item in raised.value.findings for source in item.sources}
    assert named == set(file.gone)


# --- block formats and dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fills_of_a_packed_model_have_the_dtype_of_computation(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    case = BLOCK_CASES[1]
    file = File(tmp_path, case)
    tensors = packed(file.state, lambda _: Kind.Q4_K)
    del tensors.data[QKV]
    file.path = Path(tensors.write(tmp_path / "model.gguf"))
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    assert errors(file.refused(quantization_config=quantization)).keys() == QKV_TARGETS
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    model, _ = file.filled(missing="zeros", quantization_config=quantization)
    attention = model.transformer_blocks[1].attn
    for projection in (attention.to_q, attention.to_k, attention.to_v):
        assert projection.weight.dtype == dtype
        assert not projection.weight.any()
    assert attention.to_out[0].weight.dtype == torch.uint8
    assert loadstone.audit(model).ok


# --- the three layers of a fill ------------------------------------------------------------------


def outputs(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        made: torch.Tensor = model(
            hidden_states=torch.randn(1, 16, 8, 8, generator=generator),
            encoder_hidden_states=torch.randn(1, 4, 32, generator=generator),
            pooled_projections=torch.randn(1, 48, generator=generator),
            timestep=torch.tensor([3]),
        ).sample
    return made


def test_buffers_that_no_file_holds_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load must not warn, because no saved tensor is missing."""
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    file = File(tmp_path, WAN)
    model = file.load(missing="zeros")  # pytest turns a warning into an error
    assert torch.equal(model.rope.freqs_cos, file.model.rope.freqs_cos)
    assert model.rope.freqs_cos.abs().sum() > 0
    assert last_report(model).filled == []


def test_a_persistent_buffer_is_filled_with_a_warning(tmp_path: Path) -> None:
    """The policy "initialise" gives the constructor's value; "zeros" changes the output."""
    file = File(tmp_path, SD35, POSITIONS)
    constructed = SD35.construct().pos_embed.pos_embed
    assert not torch.equal(constructed, file.model.pos_embed.pos_embed)
    made = {}
    for policy, value in {"initialise": constructed, "zeros": torch.zeros(())}.items():
        model, reported = file.filled(missing=policy)
        expected = with_values(file.model, {"pos_embed.pos_embed": value})
        assert differences(model, expected) == []
        size = constructed.numel() * 4
        assert f"pos_embed.pos_embed ({size / 1000:.1f} kB)" in reported
        made[policy] = outputs(model)
        assert torch.equal(made[policy], outputs(expected))
    assert not torch.equal(made["initialise"], made["zeros"])
    assert not torch.equal(made["initialise"], outputs(file.model))


def test_a_parameter_is_filled_with_a_warning(tmp_path: Path) -> None:
    """A norm has no initialiser except its constructor, which sets the weight to ones."""
    file = File(tmp_path, SD35, NORM)
    target = "transformer_blocks.0.attn.norm_q.weight"
    module = file.model.transformer_blocks[0].attn.norm_q
    assert not hasattr(module, "reset_parameters")
    made = {}
    for policy, value in {"initialise": torch.ones(()), "zeros": torch.zeros(())}.items():
        model, reported = file.filled(missing=policy)
        expected = with_values(file.model, {target: value})
        assert differences(model, expected) == []
        assert f"{target} (64 B)" in reported
        (item,) = last_report(model).filled
        assert (item.target, item.origin) == (
            target,
            "zeros" if policy == "zeros" else "initialiser",
        )
        made[policy] = outputs(model)
    assert not torch.equal(made["initialise"], made["zeros"])
    assert not torch.equal(made["initialise"], outputs(file.model))


def test_nothing_is_filled_without_a_word(tmp_path: Path) -> None:
    """Complete files cause no warning, and the default policy fills nothing."""
    assert last_report(File(tmp_path, SD35).load(missing="zeros")).filled == []
    File(tmp_path, SD35, POSITIONS).refused()


@pytest.mark.parametrize(
    "policy", [{"(": "zeros"}, {"[a-": "initialise"}, {".*": "random"}, "random"], ids=str
)
def test_policies_that_mean_nothing(tmp_path: Path, policy: Any) -> None:
    file = File(tmp_path, WAN, f"{COMFY}blocks.0.norm3.weight")
    with loadstone.skeleton():
        bare = WAN.construct()
    for load in (
        lambda: file.load(missing=policy),
        lambda: loadstone.plan(bare, file.path, missing=policy),
        lambda: loadstone.plan(bare, file.path, rules="diffusers", missing=policy),
    ):
        with pytest.raises(loadstone.Error) as raised:
            load()
        assert raised.value.code == "plan.options"
        assert raised.value.field == "missing"


# --- pairs ---------------------------------------------------------------------------------------


def test_missing_and_unexpected_of_one_shape_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without loadstone's rule, the converter leaves this tensor of first-last-frame files."""
    from loadstone._adapters.diffusers import conversion

    case = by_name("wan_flf2v")
    key, target = f"{COMFY}img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"
    file = File(tmp_path, case)
    assert differences(file.load(), file.model) == []
    monkeypatch.delitem(conversion.UNMAPPED_KEYS, "img_emb.emb_pos")
    error = file.refused()
    assert errors(error) == {target: [key]}
    assert f"'{key}', which the model does not use, has the same shape" in str(error)
    unexpected = [item for item in error.findings if item.code == "plan.unexpected"]
    assert [target in item.suggestion for item in unexpected] == [True]


def test_others_are_not_paired(tmp_path: Path) -> None:
    """Different shapes, or two candidates of one shape, are not paired."""
    gone = f"{COMFY}blocks.0.norm3.weight"
    for extra in ({"a": (3,)}, {"a": (64,), "b": (64,)}):
        file = File(tmp_path, WAN, gone)
        state = {name: each for name, each in file.state.items() if name != gone}
        save_file(
            state | {f"{COMFY}{name}": torch.ones(shape) for name, shape in extra.items()},
            file.path,
        )
        assert errors(file.refused()) == {"blocks.0.norm2.weight": [gone]}
        assert "same shape" not in str(file.refused())


def test_two_missing_of_one_shape_are_not_paired(tmp_path: Path) -> None:
    gone = {f"blocks.0.norm2.{x}": f"{COMFY}blocks.0.norm3.{x}" for x in ("bias", "weight")}
    file = File(tmp_path, WAN, *gone.values())
    save_file(load_file(file.path) | {f"{COMFY}a": torch.ones(64)}, file.path)
    assert errors(file.refused()) == {target: [key] for target, key in gone.items()}


def test_flux_lacks_keys_of_its_single_blocks(tmp_path: Path) -> None:
    """The file has no data, because the converter knows only the published model's width."""
    with torch.device("meta"):
        model = by_name("flux").construct()
    state = by_name("flux").original(model)
    gone = [
        f"{COMFY}single_blocks.0.linear1.weight", f"{COMFY}single_blocks.0.linear1.bias",
        f"{COMFY}time_in.in_layer.weight", f"{COMFY}final_layer.adaLN_modulation.1.bias",
    ]  # fmt: skip
    from diffusers_models import write_header_only

    file = write_header_only(
        {name: each for name, each in state.items() if name not in gone},
        tmp_path / "flux.safetensors",
    )
    config = write_config(model, tmp_path / "config")
    with pytest.raises(loadstone.PlanError) as raised:
        loadstone.diffusers.from_single_file(
            by_name("flux").cls, file, config=config, torch_dtype=torch.bfloat16
        )
    found = errors(raised.value)
    single = "single_transformer_blocks.0."
    parts = [f"{single}{each}" for each in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    assert found == {
        **{f"{part}.weight": [gone[0]] for part in parts},
        **{f"{part}.bias": [gone[1]] for part in parts},
        "time_text_embed.timestep_embedder.linear_1.weight": [gone[2]],
        "norm_out.linear.bias": [gone[3]],
    }


def test_names_of_a_case_with_one_layer(tmp_path: Path) -> None:
    """If one layer gives no pattern for names, the error must not guess one."""
    case = dataclasses.replace(WAN, changes=WAN.changes | {"num_layers": 1})
    gone = f"{COMFY}blocks.0.cross_attn.norm_k.weight"
    (sources,) = errors(File(tmp_path, case, gone).refused()).values()
    assert sources in ([gone], ["blocks.0.attn2.norm_k.weight"])


def test_the_prefix_of_a_file_with_one_key() -> None:
    assert prefix({"a.weight": "model.diffusion.b.weight"}) == "model.diffusion.b."
    assert prefix({"a.weight": "model.a.weight"}) == "model."
    assert prefix({}) == ""
