"""New weights for a model in use: its memory stays, and an audit names half-written tensors."""

import ctypes
import multiprocessing

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

ROWS, STEPS = 700_000, ("one", "two")


def net():
    return nn.ModuleDict({name: nn.Linear(3, ROWS) for name in ("first", "second")})


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Write folders of two checkpoints with the same header; return the folders and tensors."""
    folder = tmp_path_factory.mktemp("steps")
    states = {}
    for seed, step in enumerate(STEPS):
        torch.manual_seed(seed)
        states[step] = {name: torch.randn_like(each) for name, each in net().state_dict().items()}
        (folder / step).mkdir()
        save_file(states[step], folder / step / "model.safetensors")
    return folder, states


@pytest.fixture
def live(steps):
    model = net()
    loadstone.load(model, steps[0] / "one")
    return model


@pytest.fixture
def plan(steps, tmp_path):
    """Return a plan made for the first checkpoint, with the second one as its root."""
    loadstone.plan(net(), steps[0] / "one").save(tmp_path / "plan.json")
    return loadstone.Plan.load(tmp_path / "plan.json", root=steps[0] / "two")


def is_equal(model, state):
    return all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def addresses(model):
    return [each.data_ptr() for each in model.state_dict().values()]


@pytest.mark.parametrize("threads", [1, 3])
def test_new_weights_come_into_the_memory_that_is_there(live, plan, steps, threads):
    before, shared = addresses(live), live["first"].weight.detach()
    optimizer = torch.optim.SGD(live.parameters())
    report = plan.execute(into=live, threads=threads)
    assert is_equal(live, steps[1]["two"]) and addresses(live) == before
    assert torch.equal(shared, steps[1]["two"]["first.weight"])
    assert all(each in set(live.parameters()) for each in optimizer.param_groups[0]["params"])
    assert loadstone.audit(live).ok and set(report.provenance) == set(live.state_dict())


def test_into_is_model_and_in_place_in_one(live, plan):
    with pytest.raises(loadstone.PlanError, match="into="):
        plan.execute(model=live, into=live)
    before = addresses(live)
    plan.execute(model=live)  # control: without `into`, the model gets new memory
    assert addresses(live) != before


def _read(address, pipe):
    """Read the memory in a forked process, which cannot use torch's threads."""
    for _ in range(2):
        pipe.recv()
        pipe.send(ctypes.c_float.from_address(address).value)


def test_processes_that_share_the_memory_see_the_new_values(live, plan, steps):
    live.share_memory()
    ours, theirs = multiprocessing.Pipe()
    address = live["second"].weight.data_ptr()
    process = multiprocessing.get_context("fork").Process(target=_read, args=(address, theirs))
    process.start()
    for step in STEPS:
        if step == "two":
            plan.execute(into=live)
        ours.send(None)
        assert ours.poll(60)
        assert ours.recv() == steps[1][step]["second.weight"][0, 0].item()
    process.join()


def interrupt(done, total):
    """Raise KeyboardInterrupt when all tensors have been written."""
    if done == total:
        raise KeyboardInterrupt


@pytest.mark.parametrize("in_place", ["into", "planned"])
def test_a_failure_names_what_it_wrote_to_and_the_next_load_repairs_it(
    live, plan, steps, in_place, tmp_path
):
    names = list(live.state_dict())
    if in_place == "planned":
        plan = loadstone.plan(live, steps[0] / "two", in_place=True)
    again = {"into": live} if in_place == "into" else {}
    with pytest.raises(KeyboardInterrupt) as stopped:
        plan.execute(progress=interrupt, **again)
    assert all(name in str(stopped.value.__notes__) for name in names)
    audit = loadstone.audit(live)
    assert not audit.ok and audit.unaccounted == names
    with pytest.raises(loadstone.AuditError):
        audit.require_real()
    plan.execute(**again)
    assert is_equal(live, steps[1]["two"]) and loadstone.audit(live).ok


@pytest.mark.parametrize("into", ["model", "in_place"])
@pytest.mark.parametrize("is_new", [True, False], ids=["never loaded", "loaded"])
@pytest.mark.parametrize("how", [{"strict": False}, {"missing": {"second.*": "keep"}}], ids=str)
@pytest.mark.parametrize("way", ["load", "plan", "saved"])
def test_a_load_that_would_keep_what_is_half_written_is_refused(
    live, plan, steps, tmp_path, way, how, is_new, into
):
    model = net() if is_new else live
    part = {name: each for name, each in steps[1]["two"].items() if name.startswith("first")}
    save_file(part, tmp_path / "part.safetensors")

    def load(checkpoint):
        if way == "load":
            return loadstone.load(model, checkpoint, in_place=into == "in_place", **how)
        made = loadstone.plan(model, checkpoint, **how)
        if way == "saved":
            made.save(tmp_path / "kept.json")
            made = loadstone.Plan.load(tmp_path / "kept.json")
        return made.execute(**({"into": model} if into == "in_place" else {"model": model}))

    load(tmp_path / "part.safetensors")  # control: the interrupted load left its tensors intact
    with pytest.raises(KeyboardInterrupt):
        plan.execute(into=model, progress=interrupt)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(
        loadstone.AuditError, match=r"2 tensors .* 'second\.weight', 'second\.bias'"
    ):
        load(tmp_path / "part.safetensors")
    assert is_equal(model, before)
    assert not loadstone.audit(model).ok
    load(steps[0] / "two")
    assert is_equal(model, steps[1]["two"]) and loadstone.audit(model).ok
    load(tmp_path / "part.safetensors")  # repaired
    assert loadstone.audit(model).ok


def test_what_shares_memory_is_half_written_by_its_own_elements(live, steps, tmp_path):
    """A load completes half-written views if it writes them, but not if it keeps them."""
    whole = torch.zeros(4, 3)
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("first", "second")})
    model["first"].weight.data, model["second"].weight.data = whole[:2], whole[2:]
    state = {f"{name}.weight": torch.ones(2, 3) for name in model}
    save_file(state, tmp_path / "both.safetensors")
    for name in model:
        save_file({f"{name}.weight": torch.ones(2, 3)}, tmp_path / f"{name}.safetensors")
    for written, kept in (("first", "second"), ("second", "first")):
        loadstone.load(model, tmp_path / "both.safetensors", in_place=True)
        one = loadstone.plan(model, tmp_path / f"{written}.safetensors", strict=False)
        with pytest.raises(KeyboardInterrupt):
            one.execute(into=model, progress=interrupt)
        other = loadstone.plan(model, tmp_path / f"{kept}.safetensors", strict=False)
        with pytest.raises(loadstone.AuditError, match=f"1 tensor .* '{written}"):
            other.execute(into=model)
        one.execute(into=model)  # does not write the tensor that it keeps
        other.execute(into=model)
        assert loadstone.audit(model).ok


@pytest.mark.parametrize("in_place", [True, False])
def test_a_load_that_fails_at_its_end_leaves_the_memory_half_written(live, plan, steps, in_place):
    """All values were written, but the model's record is still that of the previous load."""
    from loadstone._execute import execute

    def fail(folder, report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        options = execute.ExecuteOptions()
        execute.execute_plan(plan._planned, live, options, in_place=in_place, finalize_offload=fail)
    assert loadstone.audit(live).ok is not in_place
    plan.execute(into=live)
    assert loadstone.audit(live).ok


def test_a_failure_of_a_load_into_new_memory_names_nothing(live, plan, steps):
    with pytest.raises(KeyboardInterrupt) as stopped:
        plan.execute(model=live, progress=interrupt)
    assert not hasattr(stopped.value, "__notes__")
    assert is_equal(live, steps[1]["one"]) and loadstone.audit(live).ok


def test_a_part_that_is_half_written_is_so_in_the_whole(live, steps, tmp_path):
    """An audit of the whole model also reports half-written tensors of a module."""
    state = {"weight": torch.ones(ROWS, 3), "bias": torch.ones(ROWS)}
    save_file(state, tmp_path / "part.safetensors")
    part = loadstone.plan(live["first"], tmp_path / "part.safetensors")
    with pytest.raises(KeyboardInterrupt):
        part.execute(into=live["first"], progress=interrupt)
    assert loadstone.audit(live).unaccounted == ["first.weight", "first.bias"]
    part.execute(into=live["first"])
    assert loadstone.audit(live["first"]).ok


def test_a_plan_that_casts_writes_the_memory_it_can(live, steps):
    """The load overwrites tensors that have the dtype, and replaces the others."""
    plan = loadstone.plan(live, steps[0] / "two", dtype=torch.float16)
    plan.execute(into=live)
    expected = {name: each.half() for name, each in steps[1]["two"].items()}
    assert is_equal(live, expected)
