"""Unusual ranks: empty slices, ranks outside of the mesh, and parameters with other references."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from codec_models import model_of
from rank_models import chunk, local_of, rank, spread
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import loadstone
import loadstone._execute.execute

ROWS, COLUMNS = 64, 8
NAME = "a.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({NAME: torch.randn(ROWS, COLUMNS)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def slices(mesh: DeviceMesh, place: int, rows: int = ROWS) -> torch.nn.Module:
    model = model_of({NAME: torch.empty(rows, COLUMNS)})
    model.get_parameter(NAME).requires_grad_(True)
    return spread(model, mesh, lambda _: (Shard(0),), (place,))


def held(model: torch.nn.Module) -> torch.Tensor:
    return local_of(model.get_parameter(NAME).detach())


def quarter(file: Path, number: int) -> torch.Tensor:
    return load_file(file)[NAME][16 * number : 16 * (number + 1)]


@pytest.fixture
def second(file: Path) -> Iterator[torch.nn.Module]:
    """Yield the model of the second of four ranks."""
    with rank(1, (4,)) as mesh:
        yield slices(mesh, 1)


def test_a_parameter_on_meta_stays_the_object_that_an_optimizer_has(
    second: torch.nn.Module, file: Path
) -> None:
    before = second.get_parameter(NAME)
    optimizer = torch.optim.SGD([before], lr=1.0)
    second.others = [before]
    loadstone.load(second, file)
    assert second.get_parameter(NAME) is before is second.others[0]
    assert not before.is_meta and before.is_leaf and before.requires_grad
    assert torch.equal(local_of(before.detach()), quarter(file, 1))
    before.grad = torch.ones_like(before)
    optimizer.step()
    assert torch.equal(local_of(before.detach()), quarter(file, 1) - 1)


def test_also_where_torch_is_told_to_swap(second: torch.nn.Module, file: Path) -> None:
    """FSDP would reject the parameters, because swapping changes their objects."""
    before = second.get_parameter(NAME)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        loadstone.load(second, file)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert second.get_parameter(NAME) is before and not before.is_meta


def fail_late(model: torch.nn.Module, file: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a load fail after it has installed the values."""

    def fail(*_: object) -> None:
        raise RuntimeError("late")

    with patch.context() as context:
        context.setattr(loadstone._execute.execute, "make_report", fail)
        with pytest.raises(RuntimeError, match="late"):
            loadstone.load(model, file)


def test_a_failure_takes_the_values_out_again(
    second: torch.nn.Module, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = second.get_parameter(NAME)
    fail_late(second, file, monkeypatch)
    assert second.get_parameter(NAME) is before and before.is_meta
    loadstone.load(second, file)
    assert second.get_parameter(NAME) is before
    assert torch.equal(held(second), quarter(file, 1))


def test_what_cannot_get_another_content_is_replaced(
    second: torch.nn.Module, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch cannot swap a tensor that has weak references."""
    before = second.get_parameter(NAME)
    reference = weakref.ref(before)
    second.others = [before]
    fail_late(second, file, monkeypatch)
    assert second.get_parameter(NAME) is before is second.others[0] and before.is_meta
    loadstone.load(second, file)
    after = second.get_parameter(NAME)
    assert after is not before and after is second.others[0] and reference() is before
    assert torch.equal(held(second), quarter(file, 1))


@pytest.mark.parametrize("rows", [0, 1, 3, 5])
def test_ranks_without_an_element_load_like_others(rows: int, tmp_path: Path) -> None:
    whole = {NAME: torch.randn(rows, COLUMNS)}
    save_file(whole, tmp_path / "m.safetensors")
    for number in range(4):
        with rank(number, (4,)) as mesh:
            model = slices(mesh, number, rows)
            before = model.get_parameter(NAME)
            expected = chunk(whole[NAME], (Shard(0),), (number,), (4,))
            for options in ({"receipt": "xxh3-128"}, {}, {"in_place": True}):
                report = loadstone.load(model, tmp_path / "m.safetensors", **options)
                assert report.bytes_read == expected.nbytes
                assert model.get_parameter(NAME) is before and not before.is_meta
                assert torch.equal(held(model), expected)
                assert loadstone.audit(model).ok


def in_world(number: int, places: list[int]) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=number, world_size=4, store=FakeStore())
    try:
        yield DeviceMesh("cpu", places, mesh_dim_names=(f"rank{number}_of_{places}",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("places", [[2, 3], [3, 1, 0, 2]])
def test_the_place_in_the_mesh_says_which_slice(places: list[int], file: Path) -> None:
    """A rank's coordinate in the mesh determines its slice, and not its global rank."""
    whole = load_file(file)[NAME]
    for place, number in enumerate(places):
        for mesh in in_world(number, places):
            model = slices(mesh, place)
            loadstone.load(model, file)
            assert torch.equal(held(model), whole.chunk(len(places))[place])


def test_a_rank_outside_of_the_mesh_is_told(file: Path) -> None:
    for mesh in in_world(0, [2, 3]):
        model = model_of({NAME: torch.empty(ROWS, COLUMNS)})
        spread_over = DTensor.from_local(
            torch.empty(0, COLUMNS, device="meta"),
            mesh,
            (Shard(0),),
            run_check=False,
            shape=(ROWS, COLUMNS),
            stride=(COLUMNS, 1),
        )
        model.a.weight = torch.nn.Parameter(spread_over)
        with pytest.raises(
            loadstone.PlanError, match="this rank is not in the tensor's device mesh"
        ) as caught:
            loadstone.load(model, file)
        assert caught.value.code == "plan.tensor_class"


def test_buffers_are_slices_too(tmp_path: Path) -> None:
    whole = {NAME: torch.randn(ROWS, COLUMNS), "saved": torch.arange(8.0)}
    save_file(whole, tmp_path / "m.safetensors")
    with rank(1, (4,)) as mesh:
        model = slices(mesh, 1)

        def buffer(placement: Shard | Replicate, value: float) -> DTensor:
            return DTensor.from_local(
                torch.full((2,), value),
                mesh,
                (placement,),
                run_check=False,
                shape=(8,) if isinstance(placement, Shard) else (2,),
                stride=(1,),
            )

        model.register_buffer("saved", buffer(Shard(0), 0.0))
        model.register_buffer("part", buffer(Shard(0), 7.0), persistent=False)
        model.register_buffer("copy", buffer(Replicate(), 7.0), persistent=False)
        loadstone.load(model, tmp_path / "m.safetensors")
        assert loadstone.audit(model).ok
        assert torch.equal(local_of(model.saved), whole["saved"][2:4])
        for name in ("part", "copy"):
            assert torch.equal(local_of(getattr(model, name)), torch.full((2,), 7.0))
            assert isinstance(getattr(model, name), DTensor)


def test_a_plan_of_slices_is_for_no_whole_model_and_the_other_way_round(file: Path) -> None:
    whole = model_of({NAME: torch.empty(ROWS, COLUMNS)})
    small = model_of({NAME: torch.empty(16, COLUMNS)})  # has the shape of a slice
    with rank(1, (4,)) as mesh:
        model = slices(mesh, 1)
        pairs = [(loadstone.plan(model, file), each) for each in (whole, small)]
        pairs.append((loadstone.plan(whole, file), model))
        for plan, other in pairs:
            with pytest.raises(loadstone.PlanError) as caught:
                plan.execute(into=other)
            assert caught.value.code == "plan.model_changed"
            assert all(each.is_meta for each in other.parameters())


def test_a_plan_of_slices_is_for_the_tensors_that_they_are_of(file: Path) -> None:
    """A slice with the planned rows does not fit the plan if the whole tensor is larger."""
    with rank(1, (4,)) as mesh:
        plan = loadstone.plan(slices(mesh, 1), file)
    with rank(1, (8,)) as mesh:
        other = slices(mesh, 1, 2 * ROWS)
        assert held(other).shape == plan.targets[0].shape
        with pytest.raises(loadstone.PlanError, match=r"slice of \[128, 8\].*\[64, 8\]") as caught:
            plan.execute(into=other)
        assert caught.value.code == "plan.model_changed"


def test_threads_load_slices_at_the_same_time(file: Path) -> None:
    """Four of the threads load into the same model."""
    failures: list[BaseException] = []
    with rank(1, (4,)) as mesh:
        models = [slices(mesh, 1) for _ in range(4)]
        before = [model.get_parameter(NAME) for model in models]

        def work(model: torch.nn.Module) -> None:
            try:
                loadstone.load(model, file)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(each,)) for each in [*models, *models[:1] * 3]
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert failures == []
        for model, parameter in zip(models, before, strict=True):
            assert model.get_parameter(NAME) is parameter
            assert torch.equal(held(model), quarter(file, 1))
