"""Tests that advice in messages ("pass ...", "call ...") works when a caller follows it.

The test collects the messages from the package's source, and each needs a row in ROWS.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from advice_of_libraries import (
    a_gap_in_a_series,
    a_gguf_file_that_a_server_quantizes,
    an_adapter_of_a_pipeline,
    refused,
    traced_rules,
)
from safetensors.torch import load_file, save_file

import loadstone

PACKAGE = Path(loadstone.__file__).parent
_VERBS = (
    "pass|call|use|set|give|install|name|load|save|open|choose|leave|remove|fetch|convert|build|"
    "make|place|write|put"
)
_ADVICE = re.compile(
    rf"(?:^|[;:,] |and |or )(?:{_VERBS}) [\w`'{{}}.]+|^\w+=\w+ \w+s ", re.IGNORECASE
)


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield every string in code except docstrings, with braces for the values of f-strings."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            if id(node) not in skipped:
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "{}"  # type: ignore[misc]
                    for part in node.values
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in skipped:
            yield from [node.value] if isinstance(node.value, str) else []


def messages(package: Path = PACKAGE) -> dict[str, str]:
    """Return each message with advice, prefixed with its file, mapped to the file's path."""
    return {
        f"{(file := path.relative_to(package).as_posix())}: {text}": file
        for path in sorted(package.rglob("*.py"))
        for text in texts(ast.parse(path.read_text()))
        if " " in text and _ADVICE.search(text) and "_PREFIX" not in text
    }


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    save_file({"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(3)}, path)
    return path


def skeleton() -> Net:
    with loadstone.skeleton():
        return Net()


def whole(model: Net) -> None:
    assert torch.equal(model.layer.weight, torch.ones(3, 4))


def a_plan_without_a_model(file: Path) -> None:
    loadstone.plan(skeleton(), file).save(file.parent / "plan.json")
    plan = loadstone.Plan.load(file.parent / "plan.json")
    model = skeleton()
    refused(plan.execute, "pass model=")
    refused(lambda: plan.execute(model=model, into=model), "pass the model as")
    for way in ("model", "into"):
        model = skeleton()
        plan.execute(**{way: model})
        whole(model)


def no_name_matches(file: Path) -> None:
    other = file.parent / "prefixed.safetensors"
    save_file({"net.layer.weight": torch.ones(3, 4), "net.layer.bias": torch.ones(3)}, other)
    rules = [
        {"op": "rename", "sources": [rf"net\.layer\.{leaf}"], "targets": [f"layer.{leaf}"]}
        for leaf in ("weight", "bias")
    ]
    with pytest.warns(UserWarning, match="and pass rules= or strip_prefix="):
        loadstone.load(Net(), other, strict=False)
    for options in ({"strip_prefix": "net."}, {"rules": rules}):
        model = skeleton()
        loadstone.load(model, other, **options)
        whole(model)


def strict_and_another(file: Path) -> None:
    def load(**options: Any) -> None:
        loadstone.load(skeleton(), file, **options)

    refused(lambda: load(strict=True, missing="zeros"), "pass strict, or the other two")
    load(strict=True)
    load(missing="zeros", unexpected="ignore")


def a_single_file_has_no_shards(file: Path) -> None:
    out = file.parent / "out.safetensors"
    refused(lambda: loadstone.convert(file, out, shard_size="1GB"), "pass a folder")
    loadstone.convert(file, file.parent / "out", shard_size="1GB")
    model = skeleton()
    loadstone.load(model, file.parent / "out")
    whole(model)


def not_contiguous(file: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).T
    out = file.parent / "saved.safetensors"
    refused(lambda: loadstone.torch.save_file({"a": value}, out), "call .contiguous()")
    loadstone.torch.save_file({"a": value.contiguous()}, out)
    assert torch.equal(loadstone.torch.load_file(out)["a"], value)


def a_conjugate_view(file: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    out = file.parent / "saved.safetensors"
    refused(lambda: loadstone.torch.save_file({"a": value}, out), "call .clone()")
    loadstone.torch.save_file({"a": value.clone().resolve_conj()}, out)


def a_model_on_meta(file: Path) -> None:
    model = skeleton()
    refused(lambda: loadstone.torch.load_model(model, file), "use loadstone.load()")
    loadstone.load(model, file)
    whole(model)


def a_tied_head_of_another_size(file: Path) -> None:
    """In the file, the embedding, the head or both have a different size than in the model."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=40, num_attention_heads=4, tie_word_embeddings=True, **small
    )
    cls = transformers.LlamaForCausalLM
    cls(config).save_pretrained(file.parent)
    state = load_file(file.parent / "model.safetensors")
    del state["model.embed_tokens.weight"]
    for embedding, head in itertools.product((40, 48, None), repeat=2):
        if 48 not in (embedding, head):
            continue
        names = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        folder = file.parent / f"{embedding}-{head}"
        config.save_pretrained(folder)
        given = {name: torch.randn(rows, 32) for name, rows in names.items() if rows}
        save_file(state | given, folder / "model.safetensors", {"format": "pt"})

        def load(folder: Path = folder, **options: Any) -> Any:
            return loadstone.transformers.from_pretrained(cls, folder, **options)

        refused(load, "ignore_mismatched_sizes=True initialises it instead")
        model = load(ignore_mismatched_sizes=True)
        assert loadstone.audit(model).ok
        for name, rows in names.items():
            if rows == 40:  # tensors of the right size are still loaded
                assert torch.equal(model.get_parameter(name), given[name])
        assert model(torch.arange(4)[None]).logits.isfinite().all()


def a_cluster(file: Path) -> None:
    def run(source: Any = None, out: str = "parts", **options: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            given = file if source is None else source
            loadstone.convert(given, file.parent / out, cluster=pool, **options)

    refused(lambda: run(loadstone.inspect(file)), "pass its path, not a catalog")
    for wrong in ({"part": (0, 2)}, {"finish": True}, {"parts": 0}):
        refused(
            lambda wrong=wrong: run(**wrong), "omit part= and finish=, and pass parts of 1 or more"
        )
    run(parts=2, shard_size="1GB")
    model = skeleton()
    loadstone.load(model, file.parent / "parts")
    whole(model)


def an_initialiser_that_is_not_there(file: Path) -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)
            self.scale = torch.nn.Parameter(torch.ones(2))

    def load(source: Path = file, **options: Any) -> Any:
        with loadstone.skeleton():
            model = Bare()
        loadstone.load(model, source, **options)
        return model

    refused(lambda: load(missing="initialise"), "put scale into the checkpoint, or choose")
    assert not load(missing="zeros").scale.any()
    save_file(load_file(file) | {"scale": torch.full((2,), 7.0)}, file.parent / "more.safetensors")
    assert torch.equal(load(file.parent / "more.safetensors").scale, torch.full((2,), 7.0))


class Reads(Net):
    """A module that reads values while a state dict is loaded."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if state[f"{prefix}layer.bias"].sum().item() > 0:
            state[f"{prefix}layer.bias"] = state[f"{prefix}layer.bias"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


def a_hook_that_reads_values(file: Path) -> None:
    refused(lambda: loadstone.load(Reads(), file), "or load it with load_state_dict")
    model = Reads()
    model.load_state_dict(loadstone.torch.load_file(file))
    whole(model)
    assert torch.equal(model.layer.bias, torch.full((3,), 2.0))


class Extra(Net):
    """A module whose extra state is not a tensor."""

    def get_extra_state(self) -> Any:
        return {"step": 1}

    def set_extra_state(self, state: Any) -> None:
        self.step = state["step"]


def an_extra_state_that_is_no_tensor(file: Path) -> None:
    path = file.parent / "extra.pt"
    torch.save(Extra().state_dict() | {"_extra_state": {"step": 5}}, path)
    refused(lambda: loadstone.load(Extra(), path), "load this model with load_state_dict")
    model = Extra()
    model.load_state_dict(torch.load(path))
    assert model.step == 5


class Overlapping(torch.nn.Module):
    """Two parameters that share memory; with ``is_one``, a single parameter."""

    def __init__(self, is_one: bool = False) -> None:
        super().__init__()
        both = torch.zeros(6)
        self.a = torch.nn.Parameter(both if is_one else both[:4])
        if not is_one:
            self.b = torch.nn.Parameter(both[2:])


def parameters_that_overlap(file: Path) -> None:
    path = file.parent / "two.safetensors"
    state = {"a": torch.arange(4.0), "b": torch.arange(10.0, 14.0)}
    save_file(state, path)
    refused(lambda: loadstone.load(Overlapping(), path), "share memory, so the value of one")
    with loadstone.skeleton():
        model: Any = Overlapping()
    loadstone.load(model, path)
    assert torch.equal(model.a, state["a"]) and torch.equal(model.b, state["b"])
    with loadstone.skeleton():
        findings = loadstone.plan(Overlapping(), path, missing="zeros").findings
    assert any("make them one parameter" in each.suggestion for each in findings)
    save_file({"a": torch.arange(6.0)}, path)
    model = Overlapping(is_one=True)
    loadstone.load(model, path)
    assert torch.equal(model.a, torch.arange(6.0))
    with loadstone.skeleton():
        findings = loadstone.plan(Overlapping(is_one=True), path).findings
    assert not any("one parameter" in each.suggestion for each in findings)


def a_tensor_on_disk_by_its_own_name(file: Path) -> None:
    cls = pytest.importorskip("diffusers").UNet2DModel
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    cls(8, block_out_channels=(8,), norm_num_groups=4, **blocks).save_pretrained(file.parent / "m")

    def load(place: str) -> Any:
        options = {"device_map": {"": "cpu", place: "disk"}, "offload_folder": file.parent / "off"}
        return loadstone.diffusers.from_pretrained(cls, file.parent / "m", **options)

    refused(lambda: load("conv_out.weight"), "place the whole module")
    assert loadstone.audit(load("conv_out")).not_held.keys() == {"conv_out.weight", "conv_out.bias"}


def strides_of_a_saved_model(file: Path) -> None:
    model = Net()
    model.layer.weight = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).T)
    out = file.parent / "saved.safetensors"

    def save(**options: Any) -> None:
        loadstone.torch.save_model(model, out, **options)

    refused(lambda: save(force_contiguous=False), "use save_model(..., force_contiguous=True)")
    save(force_contiguous=True)
    assert torch.equal(load_file(out)["layer.weight"], model.layer.weight)


def options_of_servers(file: Path) -> None:
    from loadstone._adapters.serving.options import Options

    refused(
        lambda: Options.from_mapping({"receipt": "r", "quantize": "fp8"}),
        "convert the folder first, with",
    )
    loadstone.convert(file, file.parent / "out", receipt="xxh3-128")
    model = skeleton()
    loadstone.load(model, file.parent / "out")
    whole(model)


# Part of a message, and the function or test ("file::name") that follows the message's advice.
ROWS: dict[str, Callable[[Path], None] | str] = {
    "pass the model as model= or as into=": a_plan_without_a_model,
    "this plan has no model: pass model=": a_plan_without_a_model,
    "and pass rules= or strip_prefix=": no_name_matches,
    "strict replaces missing and unexpected: pass strict": strict_and_another,
    "shard_size requires several files: pass a folder": a_single_file_has_no_shards,
    "the tensor is non contiguous; call": not_contiguous,
    "conjugates or negates; call .clone()": a_conjugate_view,
    "cannot be copied into; use loadstone.load()": a_model_on_meta,
    "pass its path, not a catalog": a_cluster,
    "a cluster runs and finishes all parts": a_cluster,
    "into the checkpoint, or choose missing='zeros'": an_initialiser_that_is_not_there,
    "write rules for the names, convert": a_hook_that_reads_values,
    "load this model with load_state_dict": an_extra_state_that_is_no_tensor,
    "build the model under loadstone.skeleton(), or make": parameters_that_overlap,
    "the converter of {} maps these names": "test_accelerate_advice.py::"
    "test_a_single_file_in_original_names_names_the_rules",
    "must also change the other, make them one parameter": parameters_that_overlap,
    "no hook can load a tensor without its module": a_tensor_on_disk_by_its_own_name,
    "Or use save_model(..., force_contiguous=True)": strides_of_a_saved_model,
    "loadstone cannot write a receipt of weights": options_of_servers,
    "Make the objects that refer to them": "test_held_elsewhere.py::"
    "test_the_error_for_an_optimizer_of_a_skeleton_advises_and_the_advice_works",
    "this file names; pass trust_code=True": "test_llama_cpp.py::"
    "test_code_of_the_folder_is_not_run",
    "install a tested release or a newer loadstone": "test_sites.py::"
    "test_which_releases_are_untried",
    "ignore_mismatched_sizes=True initialises it": a_tied_head_of_another_size,
    "call the model's state_dict() first": "test_bitsandbytes_graphs.py::"
    "test_a_rearranged_weight_is_not_recorded_and_the_advice_works",
    "call the model class's own from_pretrained": "test_transformers_quantizers.py::"
    "test_a_direct_call_is_refused_and_its_advice_works",
    "a pipeline has several models: call the function of each": "test_diffusers_options.py::"
    "test_a_dry_run_of_a_pipeline_is_refused",
    "pass a strategy, or leave max_memory out": "test_diffusers_options.py::"
    "test_limits_of_a_pipelines_given_map_are_refused",
    "not supported: call the library's from_pretrained": "test_diffusers_unexpected.py::"
    "test_sizes_that_the_library_ignores",
    "load the model without offloading this layer": "test_adapters.py::"
    "test_what_needs_an_offloaded_weight_is_refused_by_name",
    "call the model's own load_adapter()": "test_adapters.py::"
    "test_a_peft_model_over_a_disk_is_refused_by_name",
    "block around it, in no_split_module_classes": "test_accelerate_patch.py::"
    "test_a_map_that_no_hook_can_serve_is_refused",
    "call heal() before it is moved": "test_bitsandbytes_offload.py::"
    "test_scales_that_are_gone_are_refused_by_name_and_nothing_is_changed",
    "hooks are on modules around it (preload_": "test_bitsandbytes_offload.py::"
    "test_preloaded_blocks_work_inside_patch",
    "heal(model) before the model runs": "test_bitsandbytes_moves.py::"
    "test_a_forward_pass_leaves_every_byte",
    "build the model under loadstone.skeleton(), or call mtq": "test_modelopt_loading.py::"
    "test_a_model_with_numbers_is_refused",
    'exclude it with {"quantizer_name"': "test_modelopt_loading.py::"
    "test_a_format_that_cannot_be_written_is_refused_by_name",
    "in place; set deferred to false": "test_serving_deferred.py::"
    "test_changes_where_they_stand_are_refused_by_name",
    "dispatch the model first, and put wrappers around": "test_checkpoint_wrapper.py::"
    "test_a_dispatched_model_may_be_wrapped",
    "Leave the whole model on meta on all ranks": "test_ranks_accelerate.py::"
    "test_a_first_rank_that_lacks_values_is_named_on_all",
    "place its module in memory, or do not quantize": "test_bitsandbytes_loading.py::"
    "test_experts_are_not_put_on_disk",
    "load the model again, and give models that exist": "test_diffusers_hooks_audit.py::"
    "test_files_that_hooks_read_must_not_change",
    "Save the model before this offload, or load it again": "test_diffusers_hooks_audit.py::"
    "test_group_offload_to_disk_leaves_no_values",
    "audit and save the model before this offload": "test_diffusers_hooks_audit.py::"
    "test_group_offload_to_disk_leaves_no_values",
    "not supported: call the class's own function": "test_diffusers_patch.py::"
    "test_torch_files_are_left_to_the_library",
    "call the class's own from_pretrained": "test_bitsandbytes_diffusers.py::"
    "test_what_the_librarys_own_call_is_advised_for",
    "choose missing='zeros', and initialise this": "test_ranks.py::"
    "test_initialisers_make_no_slices",
    "SGLang cannot quantize during the load": "test_sglang.py::"
    "test_a_folder_that_is_converted_first_is_loaded_with_its_codes",
    "install a supported one, or": "test_sites.py::test_the_advice_for_another_release_works",
    "load with the library's own functions": "test_sites.py::"
    "test_the_advice_for_another_release_works",
    "write the file with the library's own script": "test_llama_cpp.py::"
    "test_another_release_is_refused_and_the_advice_works",
    "; set deferred to false": "test_serving_deferred.py::"
    "test_changes_where_they_stand_are_refused_by_name",
    "pass converter= (on the command line --converter)": "test_llama_cpp.py::"
    "test_without_a_converter_one_error_says_how_to_get_it",
    "pass them to the model's load_state_dict": "test_failures.py::"
    "test_a_state_dict_is_no_checkpoint",
    "pass infer_config=True": "test_diffusers_diagnosis.py::test_known_config_in_a_folder",
    "_adapters/diffusers/config_mismatch.py: pass {}": (
        "test_diffusers_diagnosis.py::test_known_config_in_a_folder"
    ),
    "_adapters/diffusers/local_configs.py: ": "test_diffusers_diagnosis.py::"
    "test_the_hub_is_named_before_it_is_asked",
    "max_memory limits the device map of a pipeline: pass": "test_diffusers_options.py::"
    "test_limits_of_a_pipeline_need_a_map",
    "that it chooses for this file": "test_diffusers_diagnosis.py::"
    "test_an_absent_config_is_an_error_that_names_one",
    "_adapters/diffusers/failures.py: ": "test_diffusers_failures.py::"
    "test_advice_about_folders_works",
    "would quantize them again: leave rules out": "test_bitsandbytes_stored.py::"
    "test_codes_under_rules_of_a_library",
    "requires saved rules: save them with save_recipes": traced_rules,
    "require the catalog that they were traced": traced_rules,
    "had no effect: use it in a with statement": "test_patch.py::"
    "test_a_patch_that_is_never_used_warns",
    "a pipeline has several models: load one of them": an_adapter_of_a_pipeline,
    "while it is served: convert it first": a_gguf_file_that_a_server_quantizes,
    "or rename them so that the numbers have no gaps": a_gap_in_a_series,
}

# Texts that only look like advice, and the next steps of `check`, which name other programs.
NOT_ADVICE = (
    "_adapters/check.py: ",
    "_adapters/llama_cpp/check.py: ",
    "_adapters/transformers/check.py: ",
    "full_state_dict=False loads this process's part",
    "set by the config of ModelOpt",
    "Write the conversions of a model type as rules",
)


@pytest.mark.parametrize("part", [part for part, row in ROWS.items() if callable(row)])
def test_advice_works(part: str, file: Path) -> None:
    row = ROWS[part]
    assert callable(row)
    row(file)


def test_every_row_is_of_a_message_and_every_named_test_is_there() -> None:
    found = messages()
    files = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for part, row in ROWS.items():
        assert any(part in text for text in found), f"no message has: {part}"
        if isinstance(row, str):
            name, _, test = row.partition("::")
            assert f"def {test}(" in files[name].read_text(), row


def without_a_row(found: dict[str, str]) -> dict[str, int]:
    known = (*ROWS, *NOT_ADVICE)
    counts = Counter(
        file for text, file in found.items() if not any(part in text for part in known)
    )
    return dict(counts)


def test_new_advice_has_a_row() -> None:
    assert without_a_row(messages()) == {}


def test_control_advice_in_a_new_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('raise ValueError(f"it is {1}; pass twice=True")')
    assert without_a_row(messages(tmp_path)) == {"new.py": 1}
