"""Tests loadstone's ``from_pretrained``: its options, and values that transformers leaves unset."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_state, filled_memory, library_load
from edited_models import copied, edit
from safetensors.torch import load_file, save_file
from transformers_models import by_name, write_checkpoint

import loadstone

transformers = pytest.importorskip("transformers")

ours = loadstone.transformers.from_pretrained


class ToyConfig(transformers.PretrainedConfig):
    model_type = "loadstone_toy"


class Toy(transformers.PreTrainedModel):
    """A model with a parameter and buffers that neither the file nor ``_init_weights`` sets."""

    config_class = ToyConfig
    base_model_prefix = "toy"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.lin = torch.nn.Linear(8, 8)
        self.extra = torch.nn.Parameter(torch.full((64,), 3.0))
        self.large = torch.nn.Parameter(torch.arange(300_000.0))
        self.register_buffer("table", torch.arange(4096.0) * 0.5, persistent=False)
        self.register_buffer("kept", torch.arange(8.0) + 1)
        self.freqs = [torch.arange(4.0) - 1]
        self.post_init()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    model = Toy(ToyConfig())
    model.config.save_pretrained(folder)
    state = {"lin.weight": torch.randn(8, 8), "lin.bias": torch.randn(8)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(by_name("mixtral"), tmp_path_factory.mktemp("mixtral"), "public")


# --- every tensor has a value ---------------------------------------------------------------------


def test_what_neither_file_nor_initialiser_gives_has_the_constructors_value(toy: Path):
    library = library_load(Toy, toy)
    assert {"extra", "table", "large", "kept"} <= library.uninitialised  # control
    with filled_memory():
        model, info = ours(Toy, toy, output_loading_info=True)
    assert torch.equal(model.extra, torch.full((64,), 3.0))
    assert torch.equal(model.large, torch.arange(300_000.0))
    assert torch.equal(model.table, torch.arange(4096.0) * 0.5)
    assert torch.equal(model.kept, torch.arange(8.0) + 1)
    assert torch.equal(model.freqs[0], torch.arange(4.0) - 1)
    assert info["missing_keys"] == library.info["missing_keys"] == {"extra", "large", "kept"}
    audit = loadstone.audit(model)
    assert audit.ok
    assert {name: audit.provenance[name].origin for name in ("extra", "table", "lin.bias")} == {
        "extra": "constructor",
        "table": "constructor",
        "lin.bias": "checkpoint",
    }


def test_what_is_missing_is_named(toy: Path):
    with loadstone.skeleton():
        model = Toy(ToyConfig())
    plan = loadstone.plan(model, toy, rules="transformers")
    missing = {finding.target for finding in plan.findings if finding.code == "plan.missing"}
    assert missing == {"extra", "large", "kept"}
    assert not plan.ok
    with pytest.raises(loadstone.PlanError, match="extra"):
        ours(Toy, toy, missing="error")


def test_missing_as_zeros(toy: Path):
    model = ours(Toy, toy, missing="zeros")
    assert torch.equal(model.extra, torch.zeros(64))
    assert loadstone.audit(model).provenance["extra"].origin == "zeros"


def test_an_initialiser_that_writes_is_left_its_word(tmp_path: Path):
    """The checkpoint of Bert's body lacks the head, which the initialiser fills."""
    write_checkpoint(by_name("bert"), tmp_path, "public")
    edit(tmp_path, lambda state: [state.pop(name) for name in list(state) if "cls." in name])
    cls = by_name("bert").cls
    library = library_load(cls, tmp_path)
    with filled_memory():
        model, info = ours(cls, tmp_path, output_loading_info=True)
    assert library.info["missing_keys"]
    assert_same_state(
        model, library.model, info, library.info, library.random, library.uninitialised
    )
    audit = loadstone.audit(model)
    origins = {audit.provenance[name].origin for name in library.info["missing_keys"]}
    assert origins <= {"initialiser", "tie"}


def test_a_later_init_weights_changes_nothing_that_was_loaded(mixtral: Path):
    model = ours(by_name("mixtral").cls, mixtral)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    model.initialize_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- errors before data is read -------------------------------------------------------------------


def test_a_lost_expert_is_named_with_its_layer_and_key(mixtral: Path, tmp_path: Path):
    folder = copied(mixtral, tmp_path / "broken")
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit(folder, lambda state: state.pop(lost))
    cut = folder / "model.safetensors"
    content = cut.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with cut.open("wb") as file:  # writes the header, then a hole as large as the data
        file.write(content[:header])
        file.truncate(len(content))
    with pytest.raises(loadstone.PlanError) as caught:
        ours(by_name("mixtral").cls, folder)
    assert caught.value.code == "plan.missing"
    (finding,) = [finding for finding in caught.value.findings if finding.severity == "error"]
    assert finding.target == "model.layers.1.mlp.experts.gate_up_proj"
    assert finding.sources == [lost]
    assert "layer 1" in finding.message
    assert "expert 2" in finding.message
    assert lost in finding.message


def test_a_whole_projection_that_is_lost_is_named(mixtral: Path, tmp_path: Path):
    folder = copied(mixtral, tmp_path / "broken")
    lost = [f"model.layers.0.block_sparse_moe.experts.{index}.w1.weight" for index in range(4)]
    edit(folder, lambda state: [state.pop(name) for name in lost])
    with pytest.raises(loadstone.PlanError) as caught:
        ours(by_name("mixtral").cls, folder)
    (finding,) = [finding for finding in caught.value.findings if finding.severity == "error"]
    assert sorted(finding.sources) == lost


def test_a_projection_that_no_layer_has_is_named(mixtral: Path, tmp_path: Path):
    folder = copied(mixtral, tmp_path / "broken")
    edit(folder, lambda state: [state.pop(name) for name in list(state) if ".w3." in name])
    with pytest.raises(loadstone.PlanError) as caught:
        ours(by_name("mixtral").cls, folder)
    lost = sorted(
        name for finding in caught.value.findings for name in finding.sources if ".w3." in name
    )
    assert lost == sorted(
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"
        for layer in range(2)
        for expert in range(4)
    )


def test_all_lost_experts_are_found_at_once(mixtral: Path, tmp_path: Path):
    folder = copied(mixtral, tmp_path / "broken")
    lost = [
        "model.layers.0.block_sparse_moe.experts.3.w2.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight",
        "model.layers.1.block_sparse_moe.experts.0.w3.weight",
    ]
    edit(folder, lambda state: [state.pop(name) for name in lost])
    with pytest.raises(loadstone.PlanError) as caught:
        ours(by_name("mixtral").cls, folder)
    errors = [finding for finding in caught.value.findings if finding.severity == "error"]
    assert sorted(name for error in errors for name in error.sources) == lost


def test_gaps_are_filled_where_the_library_reads_too(toy: Path):
    """Under a patch transformers loads unsupported files, and loadstone fills the gaps."""
    unread = {"sparse": torch.eye(2).to_sparse()}
    torch.save(load_file(toy / "model.safetensors") | unread, toy / "pytorch_model.bin")
    (toy / "model.safetensors").unlink()
    assert {"extra", "table"} <= library_load(Toy, toy).uninitialised  # control
    with loadstone.patch("transformers"), filled_memory():
        model = Toy.from_pretrained(toy)
    assert torch.equal(model.extra, torch.full((64,), 3.0))
    assert torch.equal(model.table, torch.arange(4096.0) * 0.5)


# --- the library's readers do not run -------------------------------------------------------------


def test_no_weight_is_read_by_another_library(
    mixtral: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    import safetensors
    from transformers import core_model_loading, modeling_utils

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a weight was read by another library")

    monkeypatch.setattr(safetensors, "safe_open", forbidden)
    monkeypatch.setattr(safetensors.torch, "load_file", forbidden)
    monkeypatch.setattr(modeling_utils, "safe_open", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(core_model_loading, "spawn_materialize", forbidden)
    cls = by_name("mixtral").cls
    with pytest.raises(AssertionError, match="another library"):
        cls.from_pretrained(mixtral)  # control
    assert loadstone.audit(ours(cls, mixtral)).ok


# --- left to the library, or rejected -------------------------------------------------------------


OF_RANKS = ("tp_plan", "tp_size", "distributed_config")
LOADING = getattr(transformers, "core_model_loading", None)  # exists in releases from 5.0 on
MAKES_DTENSORS = hasattr(LOADING, "DtensorShardOperation")


@pytest.mark.parametrize("name", [*(() if MAKES_DTENSORS else OF_RANKS), "state_dict", "gguf_file"])
def test_other_ways_of_loading_are_refused_by_name(name: str, mixtral: Path):
    value: Any = {"state_dict": {}, "tp_size": 1}.get(name, "auto")
    with pytest.raises(loadstone.Error, match=name) as caught:
        ours(by_name("mixtral").cls, mixtral, **{name: value})
    assert caught.value.code == "plan.options"


def test_a_quantizer_that_quantizes_on_load_is_refused_by_name(mixtral: Path):
    pytest.importorskip("torchao")
    config = transformers.TorchAoConfig("int8_weight_only")
    with pytest.raises(loadstone.Error, match="quantization_config"):
        ours(by_name("mixtral").cls, mixtral, quantization_config=config)


def test_errors_of_the_library_are_passed_on(tmp_path: Path):
    cls = by_name("mixtral").cls
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(OSError) as expected:
            cls.from_pretrained(folder)
        with pytest.raises(OSError) as ours_raised:
            ours(cls, folder)
        assert str(ours_raised.value) == str(expected.value)


def test_the_library_is_as_before_after_a_load_and_after_a_failure(mixtral: Path, tmp_path: Path):
    before = dict(vars(transformers.PreTrainedModel))
    ours(by_name("mixtral").cls, mixtral)
    with pytest.raises(OSError):
        ours(by_name("mixtral").cls, tmp_path / "nowhere")
    assert dict(vars(transformers.PreTrainedModel)) == before


# --- arguments -----------------------------------------------------------------------------------


def test_auto_classes_variants_and_subfolders(mixtral: Path, tmp_path: Path):
    cls = by_name("mixtral").cls
    folder = tmp_path / "deep" / "inside"
    library_model = cls.from_pretrained(mixtral)
    library_model.save_pretrained(folder, variant="half")
    for auto in (cls, transformers.AutoModelForCausalLM):
        model = ours(auto, tmp_path / "deep", subfolder="inside", variant="half")
        assert type(model) is cls
        assert_same_bytes(model, library_model)


def test_a_base_model_from_a_checkpoint_with_a_head(mixtral: Path):
    library = library_load(transformers.AutoModel, mixtral)
    model, info = ours(transformers.AutoModel, mixtral, output_loading_info=True)
    assert_same_state(model, library.model, info, library.info)
    assert info["unexpected_keys"] == {"lm_head.weight"}


def test_key_mapping(mixtral: Path, tmp_path: Path):
    folder = copied(mixtral, tmp_path / "renamed")
    edit(
        folder,
        lambda state: [state.__setitem__(f"old_{name}", state.pop(name)) for name in list(state)],
    )
    mapping = {"^old_": ""}
    cls = by_name("mixtral").cls
    library = library_load(cls, folder, key_mapping=mapping)
    model, info = ours(cls, folder, key_mapping=mapping, output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_state(model, library.model, info, library.info)


def test_a_config_of_ones_own_and_an_attention_implementation(mixtral: Path):
    cls = by_name("mixtral").cls
    config = transformers.AutoConfig.from_pretrained(mixtral, num_hidden_layers=1)
    options = {"config": config, "attn_implementation": "eager", "dtype": "float32"}
    library = library_load(cls, mixtral, **options)
    model, info = ours(cls, mixtral, output_loading_info=True, **options)
    assert model.config._attn_implementation == "eager"
    assert_same_state(model, library.model, info, library.info)


def test_a_hub_cache_of_links(mixtral: Path, tmp_path: Path):
    """transformers' own hub code resolves the name; the shard is a link into ``blobs``."""
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(mixtral.iterdir())):
        blob = repository / "blobs" / f"{number:040d}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    cls = by_name("mixtral").cls
    options = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    model = ours(cls, "some/model", **options)
    assert_same_state(model, cls.from_pretrained("some/model", **options), None, None)
    with pytest.raises(OSError, match="cached files"):
        ours(cls, "some/other", **options)


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class FarConfig(PretrainedConfig):
    model_type = "far"

class FarModel(PreTrainedModel):
    config_class = FarConfig
    def __init__(self, config):
        super().__init__(config)
        self.lin = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0) * SCALE, persistent=False)
        self.post_init()
    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_()
"""


def test_remote_code_that_registers_nothing(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "far"
    folder.mkdir()
    (folder / "modeling_far.py").write_text(REMOTE.replace("SCALE", "2"))
    auto = {"AutoConfig": "modeling_far.FarConfig", "AutoModel": "modeling_far.FarModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "far", "auto_map": auto}))
    state = {"lin.weight": torch.randn(4, 4), "lin.bias": torch.randn(4)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = ours(transformers.AutoModel, folder, trust_remote_code=True)
    assert torch.equal(model.lin.weight, state["lin.weight"])
    assert torch.equal(model.table, torch.arange(4.0) * 2)
    assert loadstone.audit(model).ok
    files = set(cache_folder.iterdir())
    (folder / "modeling_far.py").write_text(REMOTE.replace("SCALE", "3"))
    again = ours(transformers.AutoModel, folder, trust_remote_code=True)
    assert torch.equal(again.table, torch.arange(4.0) * 3)
    assert set(cache_folder.iterdir()) > files  # changed code gets new recipes


def test_adapters_are_left_to_the_library(mixtral: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    cls = by_name("mixtral").cls
    base = cls.from_pretrained(mixtral)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    text = json.loads(config.read_text()) | {"base_model_name_or_path": str(mixtral)}
    config.write_text(json.dumps(text))
    library = cls.from_pretrained(tmp_path / "adapter")
    model = ours(cls, tmp_path / "adapter")
    assert_same_state(model, library, None, None)


# --- threads -------------------------------------------------------------------------------------


def test_loads_in_several_threads(mixtral: Path):
    """Threads use different dtypes, although transformers sets torch's process-wide default."""
    cls = by_name("mixtral").cls
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    wanted = {dtype: cls.from_pretrained(mixtral, dtype=dtype) for dtype in dtypes}
    problems: list[BaseException] = []

    def run(dtype: torch.dtype) -> None:
        try:
            for _ in range(3):
                assert_same_state(ours(cls, mixtral, dtype=dtype), wanted[dtype], None, None)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


# --- plans for use outside Python -----------------------------------------------------------------


def test_a_saved_plan_gives_the_same_bytes_by_the_command_alone(mixtral: Path, tmp_path: Path):
    cls = by_name("mixtral").cls
    model = ours(cls, mixtral)
    with loadstone.skeleton():
        bare = cls(model.config)
    plan = loadstone.plan(bare.to(torch.bfloat16), mixtral, rules="transformers")
    assert any(target.boxes > 1 for target in plan.targets)
    plan.save(tmp_path / "plan.json")
    loaded = loadstone.Plan.load(tmp_path / "plan.json")
    with loadstone.skeleton():
        other = cls(model.config).to(torch.bfloat16)
    loaded.execute(model=other)
    assert_same_bytes(other, model)
    command = Path(sys.executable).with_name("loadstone")
    done = subprocess.run(
        [command, "load", "--plan", tmp_path / "plan.json", "--json"],
        capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    provenance = json.loads(done.stdout)["provenance"]
    origins = (
        {row["target"]: row["origin"] for row in provenance.values()}
        if isinstance(provenance, dict)
        else {row["target"]: row["origin"] for row in provenance}
    )
    assert origins["model.layers.0.mlp.experts.gate_up_proj"] == "checkpoint"


def assert_same_bytes(model: torch.nn.Module, wanted: torch.nn.Module) -> None:
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_plan_of_forty_five_thousand_tensors(tmp_path: Path, cache_folder: Path):
    """The file has DeepSeek-V3's names and shapes, with a hole as its data."""
    from bench import large_plan

    config = transformers.DeepseekV3Config(num_hidden_layers=61, n_routed_experts=256)
    with loadstone.skeleton():
        model = transformers.DeepseekV3ForCausalLM(config)
    listed = large_plan.tensors(model.state_dict())
    assert len(listed) == 45_395
    large_plan.write(tmp_path, listed)
    texts = []
    for _ in ("cold", "cached"):
        options = {"dtype": "bfloat16", "max_memory": {"cpu": "unlimited"}}
        plan = loadstone.plan(model, tmp_path, rules="transformers", **options)
        assert plan.ok
        texts.append(plan.to_json())
    assert texts[0] == texts[1]
    assert len(list(cache_folder.iterdir())) == 1
    assert sum(len(target.sources) for target in plan.targets) == 45_395
    files = list(tmp_path.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.open("rb").read(8), "little") for file in files)
    assert plan.bytes_to_read == sum(file.stat().st_size for file in files) - headers
