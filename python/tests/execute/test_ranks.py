"""Tensors sharded over ranks: each rank gets its slice of the values of a whole load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codec_files import CODECS, Files, each_once, rounded
from codec_models import assert_equal, model_of
from command import run
from rank_models import LAYOUTS, chunk, coordinates, local_of, rank, spread
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.utils.parametrizations import weight_norm

import loadstone
import loadstone._execute.execute


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return each_once(tmp_path_factory.mktemp)


def parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_of(each.detach()) for name, each in model.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_in_every_layout(codec: str, layout: str, files: Files) -> None:
    file = files(codec)
    shape, placements_of = LAYOUTS[layout]
    dtype = torch.bfloat16
    for number, coordinate in enumerate(coordinates(shape)):
        with rank(number, shape) as mesh:
            model = spread(model_of(file.numbers, dtype), mesh, placements_of, coordinate)
            loadstone.load(model, file.path)
            loadstone.audit(model).require_real()
            found = parts(model)
        expected = {}
        for name, tensor in file.numbers.items():
            whole = rounded(tensor, dtype)
            is_spread = tensor.is_floating_point() and tensor.dim() > 0
            places = placements_of(tensor.dim()) if is_spread else ()
            expected[name] = chunk(whole, places, coordinate, shape) if is_spread else whole
        assert_equal(found, expected)


ROWS, COLUMNS = 64, 48


@pytest.fixture
def matrix(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """Write a checkpoint with one matrix; return the file and the matrix."""
    whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": whole}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", whole


def spread_matrix(whole: torch.Tensor, number: int, mesh, dim: int = 0) -> torch.nn.Module:
    return spread(model_of({"a.weight": whole}), mesh, lambda _: (Shard(dim),), (number,))


def test_a_rank_reads_its_share_and_nothing_else(matrix) -> None:
    file, whole = matrix
    read = []
    for number in range(4):
        with rank(number, (4,)) as mesh:
            model = spread_matrix(whole, number, mesh)
            plan = loadstone.plan(model, file)
            report = plan.execute()
            assert plan.targets[0].shape == (16, COLUMNS)
            assert plan.targets[0].slice_begin == (16 * number, 0)
            assert [each.code for each in plan.findings] == ["plan.slice"]
            assert plan.bytes_to_read == report.bytes_read == whole.nbytes // 4
            read.append(local_of(model.get_parameter("a.weight").detach()))
    assert torch.equal(torch.cat(read), whole)


@pytest.mark.parametrize(
    ("run", "ranks", "dtype", "joined"),
    [
        (4096, 2, None, True),  # values without a cast: reads include holes of up to 4 KiB
        (4112, 2, None, False),
        (4080, 17, None, True),  # runs below 4 KiB: reads include holes of up to 64 KiB
        (4080, 18, None, False),
        (64 << 10, 2, "float64", True),  # values with a cast: reads include holes of up to 64 KiB
        ((64 << 10) + 16, 2, "float64", False),
    ],
)
def test_what_a_rank_reads_of_columns(
    run: int, ranks: int, dtype: str | None, joined: bool, tmp_path: Path
) -> None:
    """A rank reads whole rows if its columns are close together, and else only its columns."""
    rows, width = 5, run // 4
    whole = torch.randn(rows, ranks * width)
    save_file({"a.weight": whole}, tmp_path / "m.safetensors")
    for number in (0, ranks - 1):
        with rank(number, (ranks,)) as mesh:
            model = spread_matrix(whole, number, mesh, dim=1)
            plan = loadstone.plan(model, tmp_path / "m.safetensors", dtype=dtype)
            report = plan.execute()
            found = local_of(model.get_parameter("a.weight").detach())
        assert torch.equal(found, whole[:, number * width :][:, :width].to(found.dtype))
        assert report.bytes_read == (((rows - 1) * ranks + 1) * run if joined else rows * run)
        assert plan.bytes_to_read == report.bytes_read


@pytest.mark.parametrize(("cast", "hole"), [(False, 4 << 10), (True, 64 << 10)])
@pytest.mark.parametrize("further", [0, 16])
def test_slices_of_rows_are_joined_over_small_holes(
    cast: bool, hole: int, further: int, tmp_path: Path
) -> None:
    """Reads include holes of up to 4 KiB, or of up to 64 KiB if the values are cast."""
    rows = 2 * (hole + further) // 16  # the hole is the second half of the first tensor
    tensors = {f"{name}.weight": torch.randn(rows, 4) for name in "ab"}
    save_file(tensors, tmp_path / "m.safetensors")
    dtype = "bfloat16" if cast else None
    with rank(0, (2,)) as mesh:
        model = spread(model_of(tensors), mesh, lambda _: (Shard(0),), (0,))
        report = loadstone.load(model, tmp_path / "m.safetensors", dtype=dtype)
        found = parts(model)
    for name, whole in tensors.items():
        assert torch.equal(found[name], whole[: rows // 2].to(found[name].dtype))
    share = 2 * (hole + further)
    assert report.bytes_read == share + (hole if not further else 0)


def test_a_plan_is_that_of_its_rank(matrix, tmp_path: Path) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        plan = loadstone.plan(spread_matrix(whole, 1, mesh), file)
        plan.save(tmp_path / "plan.json")
        again = loadstone.Plan.load(tmp_path / "plan.json")
        model = spread_matrix(whole, 1, mesh)
        again.execute(into=model)
        assert torch.equal(local_of(model.get_parameter("a.weight").detach()), whole[16:32])
    with rank(2, (4,)) as mesh:
        other = spread_matrix(whole, 2, mesh)
        for each in (plan, again):
            with pytest.raises(loadstone.PlanError, match=r"\[32, 0\].*another rank") as caught:
                each.execute(into=other)
            assert caught.value.code == "plan.model_changed"
        assert other.get_parameter("a.weight").is_meta


def test_a_parameter_stays_what_it_was(matrix) -> None:
    file, whole = matrix
    with rank(3, (4,)) as mesh:
        model = spread_matrix(whole, 3, mesh)
        before = model.get_parameter("a.weight")
        before.requires_grad_(False)
        before.of_a_user = "kept"
        loadstone.load(model, file)
        after = model.get_parameter("a.weight")
        assert isinstance(after, torch.nn.Parameter) and isinstance(after, DTensor)
        assert (after.placements, after.device_mesh) == (before.placements, before.device_mesh)
        assert (after.shape, after.stride()) == (before.shape, before.stride())
        assert not after.requires_grad and after.of_a_user == "kept" and not after.is_meta


@pytest.mark.parametrize("in_place", [False, True])
def test_a_live_model_keeps_its_parameters(matrix, in_place: bool) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        model = spread(
            torch.nn.ModuleDict({"a": torch.nn.Linear(COLUMNS, ROWS, bias=False)}),
            mesh,
            lambda _: (Shard(0),),
            (1,),
        )
        before = model.get_parameter("a.weight")
        loadstone.load(model, file, in_place=in_place)
        assert model.get_parameter("a.weight") is before
        assert torch.equal(local_of(before.detach()), whole[16:32])


def test_ties_stay_ties(tmp_path: Path) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    save_file({"a.weight": whole}, tmp_path / "m.safetensors")
    with rank(2, (4,)) as mesh:
        model = spread(
            model_of({"a.weight": whole, "b.weight": whole}), mesh, lambda _: (Shard(0),), (2,)
        )
        model.b.weight = model.a.weight
        loadstone.load(model, tmp_path / "m.safetensors")
        assert model.b.weight is model.a.weight
        assert torch.equal(local_of(model.a.weight.detach()), whole[32:48])


def test_experts_are_stacked_of_those_that_the_rank_holds(tmp_path: Path) -> None:
    experts = torch.randn(8, 6, 10)
    save_file({f"e.{i}.w": each for i, each in enumerate(experts)}, tmp_path / "m.safetensors")
    rules = [{"op": "stack", "sources": [r"e\.(\d+)\.w"], "targets": ["e.w"], "dim": 0}]
    for dim in (0, 1, 2):
        for number in range(4):
            with rank(number, (4,)) as mesh:
                model = spread(
                    model_of({"e.w": experts}), mesh, lambda _, dim=dim: (Shard(dim),), (number,)
                )
                plan = loadstone.plan(model, tmp_path / "m.safetensors", rules=rules)
                plan.execute()
                found = local_of(model.get_parameter("e.w").detach())
            assert torch.equal(found, chunk(experts, (Shard(dim),), (number,), (4,)))
            assert len(plan.targets[0].sources) == (2 if dim == 0 else 8)


def test_the_command_loads_a_ranks_slice(matrix, tmp_path: Path) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        loadstone.save_skeleton(spread_matrix(whole, 1, mesh, dim=1), tmp_path / "rank1.json")
    target = json.loads((tmp_path / "rank1.json").read_text())["targets"][0]
    assert target["shape"] == [ROWS, COLUMNS]
    assert target["slice"] == {"begin": [0, 12], "shape": [ROWS, 12]}
    done = run("load", file, "--skeleton", tmp_path / "rank1.json", "--json")
    assert done.returncode == 0, done.stderr
    done = run("plan", file, "--skeleton", tmp_path / "rank1.json", "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    plan = loadstone.Plan.load(tmp_path / "plan.json")
    with rank(1, (4,)) as mesh:
        model = spread_matrix(whole, 1, mesh, dim=1)
        plan.execute(into=model)
        found = local_of(model.get_parameter("a.weight").detach())
    assert torch.equal(found, whole[:, 12:24])


def test_what_is_refused_is_named(matrix) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        local = torch.empty(ROWS, COLUMNS, device="meta")
        partial = torch.nn.Module()
        partial.a = torch.nn.Module()
        partial.a.weight = torch.nn.Parameter(
            DTensor.from_local(local, mesh, (Partial(),), run_check=False)
        )
        with pytest.raises(loadstone.PlanError, match=r"a\.weight.*partial sum") as caught:
            loadstone.load(partial, file)
        assert caught.value.code == "plan.tensor_class"
        wrong = spread_matrix(whole, 1, mesh)
        wrong.a.weight = torch.nn.Parameter(
            DTensor.from_local(
                torch.empty(3, COLUMNS, device="meta"),
                mesh,
                (Shard(0),),
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        )
        with pytest.raises(loadstone.PlanError, match=r"shape \[3, 48\] .* specify \[16, 48\]"):
            loadstone.load(wrong, file)


def test_initialisers_make_no_slices(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(1)}, tmp_path / "m.safetensors")
    with rank(1, (4,)) as mesh:
        with loadstone.skeleton():
            plain = torch.nn.ModuleDict({"a": torch.nn.Linear(COLUMNS, ROWS, bias=False)})
        model = spread(plain, mesh, lambda _: (Shard(0),), (1,))
        plan = loadstone.plan(
            model, tmp_path / "m.safetensors", missing="initialise", unexpected="ignore"
        )
        with pytest.raises(
            loadstone.PlanError, match="initialisers can fill only whole tensors"
        ) as caught:
            plan.execute()
        assert "choose missing='zeros', and initialise this tensor" in str(caught.value)
        zeros = loadstone.plan(
            model, tmp_path / "m.safetensors", missing="zeros", unexpected="ignore"
        )
        with pytest.warns(loadstone.FilledWarning):
            zeros.execute()
        found = local_of(model.get_parameter("a.weight").detach())
        assert torch.equal(found, torch.zeros(16, COLUMNS))
        model.a.reset_parameters()  # as the error suggests
        assert found.count_nonzero() == found.numel() and loadstone.audit(model).ok


def test_experts_of_transformers_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """Recipes that were traced from transformers' conversion rules are sliced too."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from docs_worlds import qwen_moe

    qwen_moe(tmp_path / "model")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    shape, placements_of = LAYOUTS["both"]
    for number, coordinate in enumerate(coordinates(shape)):
        with rank(number, shape) as mesh:
            with loadstone.skeleton():
                model = transformers.AutoModelForCausalLM.from_config(config)
            spread(model, mesh, placements_of, coordinate)
            loadstone.load(model, tmp_path / "model", rules="transformers")
            loadstone.audit(model).require_real()
            found = parts(model)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            places = placements_of(tensor.dim())
            assert torch.equal(found[name], chunk(tensor, places, coordinate, shape)), name


def renaming(module: torch.nn.Module) -> torch.nn.Module:
    """Rename ``old`` to ``weight`` on load, as models do for older checkpoints."""

    def hook(_, state, prefix, *rest) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    module.register_load_state_dict_pre_hook(hook)
    return module


@pytest.mark.parametrize(
    ("build", "renamed"),
    [
        (lambda: renaming(torch.nn.Linear(6, 16)), {"a.weight": "a.old"}),
        (lambda: weight_norm(torch.nn.Linear(6, 16)), {}),
        (lambda: torch.nn.BatchNorm1d(16), {"a.num_batches_tracked": ""}),
    ],
    ids=["renames", "parametrization", "counter that old files lack"],
)
def test_code_of_the_model_sees_whole_tensors(build, renamed, tmp_path: Path) -> None:
    with loadstone.skeleton():
        whole = {
            key: value.shape
            for key, value in torch.nn.ModuleDict({"a": build()}).state_dict().items()
        }
    values = {name: torch.randn(shape) for name, shape in whole.items()}
    stored = {renamed.get(name, name): each for name, each in values.items()}
    stored.pop("", None)
    save_file(stored, tmp_path / "m.safetensors")
    for number in range(4):
        with rank(number, (4,)) as mesh:
            with loadstone.skeleton():
                plain = torch.nn.ModuleDict({"a": build()})
            model = spread(plain, mesh, lambda _: (Shard(0),), (number,))
            loadstone.load(model, tmp_path / "m.safetensors")
            for name, parameter in model.named_parameters():
                expected = chunk(values[name], (Shard(0),), (number,), (4,))
                assert torch.equal(local_of(parameter.detach()), expected), name


def test_a_receipt_is_of_the_slice(matrix) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        model = spread_matrix(whole, 1, mesh)
        loadstone.load(model, file, receipt="xxh3-128")
        assert loadstone.audit(model, receipt=True).proved == ["a.weight"]
        local_of(model.get_parameter("a.weight").detach())[0, 0] += 1
        assert loadstone.audit(model, receipt=True).changed == ["a.weight"]


def test_slices_are_not_placed_on_disk(matrix, tmp_path: Path) -> None:
    file, whole = matrix
    with rank(1, (4,)) as mesh:
        model = spread_matrix(whole, 1, mesh)
        with pytest.raises(
            loadstone.PlanError, match="offload folder can contain only whole"
        ) as caught:
            loadstone.load(model, file, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert caught.value.code == "plan.slice"


def test_a_failure_leaves_the_model_as_it_was(matrix, monkeypatch) -> None:
    file, whole = matrix
    refresh_fsdp = loadstone._execute.execute.refresh_fsdp
    with rank(1, (4,)) as mesh:
        model = spread_matrix(whole, 1, mesh)
        before = model.get_parameter("a.weight")

        def fails(model) -> None:
            monkeypatch.setattr(loadstone._execute.execute, "refresh_fsdp", refresh_fsdp)
            raise RuntimeError("late")

        monkeypatch.setattr(loadstone._execute.execute, "refresh_fsdp", fails)
        with pytest.raises(RuntimeError, match="late"):
            loadstone.load(model, file)
        assert model.get_parameter("a.weight") is before and before.is_meta


def refused_once(model: torch.nn.Module, path: Path, **options: object) -> str:
    """Return the error of a plan with read_once."""
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.plan(model, path, read_once=True, **options)
    assert caught.value.code == "plan.options" and caught.value.field == "read_once"
    return str(caught.value)


def test_reading_together_needs_ranks_and_plain_numbers(matrix, tmp_path: Path) -> None:
    path, whole = matrix
    alone = model_of({"a.weight": whole})
    assert "no process group" in refused_once(alone, path)
    on_disk = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    assert "disk" in refused_once(alone, path, **on_disk)
    assert "file_view" in refused_once(alone, path, mmap=True)
    loadstone.save_skeleton(alone, tmp_path / "skeleton.json")
    assert "requires the model" in refused_once(tmp_path / "skeleton.json", path)
    with rank(1, (4,)) as mesh:  # torch's fake process group supports tensors on the host
        model = spread_matrix(whole, 1, mesh)
        plan = loadstone.plan(model, path, read_once=True)
        with pytest.raises(loadstone.PlanError, match="read_once cannot be saved"):
            plan.to_json()
        with pytest.raises(loadstone.PlanError, match="does not support receipt"):
            plan.execute(receipt="xxh3-128")
        beside = loadstone.plan(model, path).peak_bytes["cpu"]
        assert plan.peak_bytes["cpu"] == beside + 2 * whole.nbytes
