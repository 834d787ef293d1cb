"""Tests the advice for names that a model's library maps itself, and links in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from accelerate_models import TOKENS, empty, saved
from diffusers_models import assert_same, by_name, write_single_file
from safetensors.torch import save_file

import loadstone
from loadstone import accelerate as ours


@pytest.mark.parametrize("entry", ["accelerate", "plan", "load"])
def test_a_single_file_in_original_names_names_the_rules(tmp_path, entry):
    """loadstone guesses no rules, which would be wrong for names that fit equally well."""
    case = by_name("autoencoder_kl")
    file, _ = write_single_file(case, case.build(), tmp_path / "vae.safetensors")
    with loadstone.skeleton():
        model = case.construct()
    if entry == "plan":
        findings = loadstone.plan(model, file).findings
    else:
        load = ours.load_checkpoint_and_dispatch if entry == "accelerate" else loadstone.load
        with pytest.raises(loadstone.PlanError, match=r"call loadstone\.load") as caught:
            load(model, file)
        findings = caught.value.findings
    advice = {f.suggestion for f in findings if f.code == "plan.missing"}
    assert advice == {
        "the converter of diffusers maps these names to the model's: call "
        "loadstone.load(..., rules='diffusers')"
    }
    loadstone.load(model, file, rules="diffusers")
    assert_same(model, case.build())


def test_other_missing_tensors_of_a_diffusers_model_keep_their_suggestions(tmp_path):
    case = by_name("autoencoder_kl")
    state = case.build().state_dict()
    state["decoder.conv_out.wieght"] = state.pop("decoder.conv_out.weight")
    save_file(state, tmp_path / "vae.safetensors")
    with loadstone.skeleton():
        model = case.construct()
    [finding] = [
        f for f in loadstone.plan(model, tmp_path / "vae.safetensors").findings
        if f.code == "plan.missing"
    ]  # fmt: skip
    assert finding.suggestion.startswith("did you mean 'decoder.conv_out.wieght'? A rule")


def test_links_are_followed_as_by_the_library(tmp_path):
    reference, path = saved(tmp_path)
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(path / "model.safetensors" if path.is_dir() else path)
    model = empty()
    ours.load_checkpoint_and_dispatch(model, folder)
    assert torch.equal(model(TOKENS), reference(TOKENS))
