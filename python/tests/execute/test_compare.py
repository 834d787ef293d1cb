"""The comparison that other tests use: equal loads are equal, and each difference is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from transformers_models import by_name, write_checkpoint

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> compare.Loaded:
    """Load a model with ties, buffers and a generation config."""
    folder = write_checkpoint(by_name("bart"), tmp_path_factory.mktemp("bart"), "public")
    return compare.library_load(by_name("bart").cls, folder, dtype="auto")


def twin(model: Any) -> Any:
    """Return a deep copy, with the flags of parameters that ``deepcopy`` drops."""
    made = copy.deepcopy(model)
    for name, tensor in compare.all_tensors(model).items():
        if hasattr(tensor, "_is_hf_initialized"):
            compare.all_tensors(made)[name]._is_hf_initialized = tensor._is_hf_initialized
    return made


def lines(ours: Any, loaded: compare.Loaded, **more: Any) -> list[str]:
    return compare.differences(ours, loaded.model, loaded.info, loaded.info, **more)


def test_a_copy_is_equal(bart: compare.Loaded):
    assert lines(twin(bart.model), bart) == []
    compare.assert_same_state(twin(bart.model), bart.model, bart.info, bart.info)


HEAD = "model.decoder.layers.1.fc1"


def in_place(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        with torch.no_grad():
            change(model)

    return run


def swap_bits(model: Any) -> None:
    """Change the last bit of one value, which a tolerance would miss."""
    model.get_parameter(HEAD + ".bias").view(torch.int16)[3] ^= 1


def negative_zero(model: Any) -> None:
    model.final_logits_bias.zero_()
    model.final_logits_bias.neg_()


def untie(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def tie(model: Any) -> None:
    model.model.decoder.layers[0].fc1.bias = model.model.decoder.layers[1].fc1.bias


def add_buffer(model: Any) -> None:
    model.model.register_buffer("extra", torch.zeros(1), persistent=False)


def become_persistent(model: Any) -> None:
    model._non_persistent_buffers_set.add("final_logits_bias")


def cast(model: Any) -> None:
    model.get_submodule(HEAD).float()


def shape(model: Any) -> None:
    model.get_submodule(HEAD).bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))


def freeze(model: Any) -> None:
    model.get_parameter(HEAD + ".weight").requires_grad_(False)


def to_meta(model: Any) -> None:
    model.get_submodule(HEAD).to("meta")


def hook(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.get_submodule(HEAD), AlignDevicesHook())


def conversions(model: Any) -> None:
    from transformers.core_model_loading import WeightRenaming

    model._weight_conversions = [*(model._weight_conversions or ()), WeightRenaming("a", "b")]


def set_on(path: str, name: str, value: Any) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        target = model
        for part in filter(None, path.split(".")):
            target = getattr(target, part)
        setattr(target, name, value)

    return run


CONTROLS = {
    "the last bit": (in_place(swap_bits), HEAD + ".bias: 1 of"),
    "values differ": (in_place(lambda m: m.final_logits_bias.add_(1)), "final_logits_bias: "),
    "untied": (untie, "tied in the library only"),
    "tied": (tie, "tied in ours only"),
    "a buffer more": (add_buffer, "tensor names differ"),
    "persistence": (become_persistent, "names of the state dict differ"),
    "dtype": (cast, HEAD + ".weight: dtype"),
    "shape": (shape, HEAD + ".bias: shape"),
    "requires_grad": (freeze, HEAD + ".weight: requires_grad"),
    "device": (to_meta, HEAD + ".weight: device"),
    "training": (lambda m: m.train(), "training: True"),
    "training of a module": (set_on(HEAD, "training", True), HEAD + ": training"),
    "generation config": (set_on("generation_config", "max_length", 7), "generation_config: "),
    "config": (set_on("config", "d_model", 7), "config: {'d_model': 7}, library {'d_model': 64}"),
    "config.dtype": (set_on("config", "dtype", torch.float16), "config.dtype: "),
    "conversions": (conversions, "_weight_conversions: "),
    "quantizer": (set_on("", "hf_quantizer", object()), "hf_quantizer: "),
    "device map": (set_on("", "hf_device_map", {"": "cpu"}), "hf_device_map: "),
    "another attribute": (set_on("", "something", 1), "attributes of the model"),
    "accelerate's hook": (hook, HEAD + ": _hf_hook"),
    "torch's hook": (
        lambda m: m.get_submodule(HEAD).register_forward_pre_hook(lambda *_: None),
        HEAD + ": torch hooks",
    ),
    "flag of a tensor": (
        lambda m: setattr(m.get_parameter(HEAD + ".weight"), "_is_hf_initialized", "no"),
        HEAD + ".weight: _is_hf_initialized",
    ),
    "flag of a module": (
        set_on(HEAD, "_is_hf_initialized", "no"),
        HEAD + ": _is_hf_initialized",
    ),
    "class of a module": (
        set_on("model.decoder.layers", "__class__", torch.nn.Sequential),
        "model.decoder.layers: class",
    ),
    "a module more": (lambda m: m.add_module("more", torch.nn.Identity()), "modules differ"),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_a_difference_is_seen(what: str, bart: compare.Loaded):
    change, line = CONTROLS[what]
    ours = twin(bart.model)
    change(ours)
    assert any(line in found for found in lines(ours, bart)), lines(ours, bart)
    with pytest.raises(AssertionError):
        compare.assert_same_state(ours, bart.model, bart.info, bart.info)


def test_the_sign_of_zero_is_seen(bart: compare.Loaded):
    library = twin(bart.model)
    library.final_logits_bias.zero_()
    ours = twin(library)
    negative_zero(ours)
    assert torch.equal(ours.final_logits_bias, library.final_logits_bias)
    found = compare.differences(ours, library, None, None)
    assert len(found) == 1 and "final_logits_bias" in found[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("missing_keys", {"a"}),
        ("unexpected_keys", {"a"}),
        ("mismatched_keys", {("a", (1,), (2,))}),
        ("error_msgs", ["a"]),
    ],
)
def test_loading_information_is_compared(name: str, value: Any, bart: compare.Loaded):
    library = {**bart.info, name: value}
    found = compare.differences(bart.model, bart.model, bart.info, library)
    assert len(found) == 1 and found[0].startswith(f"{name}: only in ours [], only in")
    as_list = {**bart.info, "missing_keys": list(bart.info["missing_keys"])}
    assert compare.differences(bart.model, bart.model, as_list, bart.info)
    assert compare.differences(bart.model, bart.model, None, bart.info)


def test_random_names_are_compared_by_all_but_their_values(bart: compare.Loaded):
    ours, name = twin(bart.model), HEAD + ".weight"
    weight = ours.get_parameter(name)
    with torch.no_grad():
        weight.add_(1)
    assert lines(ours, bart)
    assert lines(ours, bart, random_names={name}) == []
    with torch.no_grad():
        weight.zero_()
    assert "the same number throughout" in lines(ours, bart, random_names={name})[0]
    with torch.no_grad():
        weight.fill_(float("inf"))
    assert "not finite" in lines(ours, bart, random_names={name})[0]
    # The library fills the tensor with a constant, which is not random, so it is compared.
    library = twin(bart.model)
    with torch.no_grad():
        library.get_parameter(name).fill_(1)
    found = compare.differences(bart.model, library, None, None, random_names={name})
    assert len(found) == 1 and "values differ" in found[0]


def test_unwritten_memory_must_be_finite_in_ours(bart: compare.Loaded):
    library, name = twin(bart.model), HEAD + ".weight"
    with torch.no_grad():
        library.get_parameter(name)[0, 0] = float("nan")
    assert compare.uninitialised_names(library) == {name}
    assert compare.differences(bart.model, library, None, None, uninitialised={name}) == []
    found = compare.differences(library, library, None, None, uninitialised={name})
    assert len(found) == 1 and "not finite" in found[0]


def toy() -> Any:
    """Return a model whose class initialises no missing tensors."""
    from transformers import PreTrainedConfig, PreTrainedModel

    class ToyConfig(PreTrainedConfig):
        model_type = "compare_toy"

    class Toy(PreTrainedModel):
        config_class = ToyConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(8, 8)
            self.extra = torch.nn.Parameter(torch.full((64,), 3.0))
            self.register_buffer("table", torch.arange(16.0), persistent=False)
            self.register_buffer("counts", torch.arange(16), persistent=False)
            self.post_init()

    return Toy(ToyConfig())


def test_memory_that_the_library_leaves_unwritten_is_named(tmp_path: Path):
    from safetensors.torch import save_file

    model = toy()
    model.config.save_pretrained(tmp_path)
    save_file(
        {f"linear.{name}": value for name, value in model.linear.state_dict().items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = compare.library_load(type(model), tmp_path)
    assert loaded.uninitialised == {"extra", "table", "counts"}
    assert loaded.random == {"extra"} == loaded.info["missing_keys"]
    # A correct load leaves the constructor's values, like those of `model`.
    loaded.model.linear = copy.deepcopy(loaded.model.linear)
    found = compare.differences(
        model.eval(), loaded.model, loaded.info, loaded.info, loaded.random, loaded.uninitialised
    )
    values = [line for line in found if line.split(":")[0] in loaded.uninitialised]
    assert not any("finite" in line or "differ" in line for line in values), values


def test_torch_is_left_as_it_was():
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), compare.filled_memory():
        assert torch.empty(4).isnan().all()
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with compare.filled_memory():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
