"""Every failure has a code, leaves the model unchanged, and leaves no partial results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from models import Tiny, randomise, save, save_sharded
from safetensors.torch import save_file

import loadstone
from loadstone._base.errors import from_core, new_error


@pytest.fixture
def state(tmp_path):
    return save(randomise(Tiny()), tmp_path / "good.safetensors")


def skeleton():
    with loadstone.skeleton():
        return Tiny()


def snapshot(model):
    """Return the model's tensor objects and their values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (id(tensor), tensor.is_meta, None if tensor.is_meta else tensor.clone())
        for name, tensor in tensors.items()
    }


def assert_untouched(model, before):
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, (identity, is_meta, value) in after.items():
        assert (identity, is_meta) == before[name][:2], name
        assert is_meta or torch.equal(value, before[name][2]), name


def refused(model, path, code, **arguments):
    """Check that the load fails with this code and leaves the model unchanged."""
    before = snapshot(model)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model, path, **arguments)
    assert caught.value.code == code
    assert_untouched(model, before)
    return caught.value


def test_missing_tensor_is_named_with_all_findings(state, tmp_path):
    del state["blocks.0.linear.weight"], state["blocks.1.norm.bias"]
    save_file(state, tmp_path / "x.safetensors")
    error = refused(skeleton(), tmp_path / "x.safetensors", "plan.missing")
    missing = {f.target for f in error.findings if f.code == "plan.missing"}
    assert missing == {"blocks.0.linear.weight", "blocks.1.norm.bias"}
    assert isinstance(error, loadstone.PlanError)


def test_a_renamed_tensor_is_suggested(state, tmp_path):
    state["blocks.0.linear.wieght"] = state.pop("blocks.0.linear.weight")
    save_file(state, tmp_path / "x.safetensors")
    error = refused(skeleton(), tmp_path / "x.safetensors", "plan.missing")
    assert "blocks.0.linear.wieght" in error.findings[0].suggestion


def test_unexpected_tensor(state, tmp_path):
    state["stranger"] = torch.zeros(2)
    save_file(state, tmp_path / "x.safetensors")
    refused(skeleton(), tmp_path / "x.safetensors", "plan.unexpected", unexpected="error")
    plan = loadstone.plan(skeleton(), tmp_path / "x.safetensors")
    assert plan.ok
    assert [f.sources for f in plan.findings if f.code == "plan.unexpected"] == [["stranger"]]
    quiet = loadstone.plan(skeleton(), tmp_path / "x.safetensors", unexpected="ignore")
    assert "plan.unexpected" not in {f.code for f in quiet.findings}


def test_wrong_shape(state, tmp_path):
    state["blocks.0.linear.weight"] = torch.zeros(8, 9)
    save_file(state, tmp_path / "x.safetensors")
    error = refused(skeleton(), tmp_path / "x.safetensors", "plan.shape")
    assert "[8, 9]" in str(error.findings[0].found) and "[8, 8]" in error.findings[0].expected


def test_integers_for_a_float_are_refused(state, tmp_path):
    state["blocks.0.linear.weight"] = torch.zeros(8, 8, dtype=torch.int32)
    save_file(state, tmp_path / "x.safetensors")
    refused(skeleton(), tmp_path / "x.safetensors", "plan.dtype")


def test_missing_shard(state, tmp_path):
    files = save_sharded(state, tmp_path / "sharded")
    files[1].unlink()
    error = refused(skeleton(), tmp_path / "sharded", "ix.missing_shard")
    assert files[1].name in str(error)


def test_truncated_shard(state, tmp_path):
    files = save_sharded(state, tmp_path / "sharded")
    os.truncate(files[2], files[2].stat().st_size - 3)
    error = refused(skeleton(), tmp_path / "sharded", "st.truncated")
    assert files[2].name in error.path and error.tensor


def test_cut_header(state, tmp_path):
    files = save_sharded(state, tmp_path / "sharded")
    os.truncate(files[0], 50)
    error = refused(skeleton(), tmp_path / "sharded", "st.header_len")
    assert files[0].name in error.path


def test_absent_and_unreadable_file(state, tmp_path):
    refused(skeleton(), tmp_path / "nowhere", "io.not_found")
    closed = tmp_path / "closed.safetensors"
    save_file(state, closed)
    closed.chmod(0)
    if os.geteuid() == 0:  # root can read every file, so inspect it as a different user
        program = textwrap.dedent(f"""
            import os, loadstone
            inspect = loadstone.inspect  # loads its module
            os.setgid(65534); os.setuid(65534)
            try: inspect({str(closed)!r})
            except loadstone.LoadError as error: print(error.code)
        """)
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents:
            if parent.stat().st_uid == os.geteuid() and str(parent).count("pytest"):
                parent.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.strip() == "io.denied", done.stderr
    else:
        refused(skeleton(), closed, "io.denied")


def test_a_state_dict_is_no_checkpoint(state):
    with pytest.raises(loadstone.PlanError, match="load_state_dict") as raised:
        loadstone.load(skeleton(), state)
    assert (raised.value.field, raised.value.found) == ("checkpoint", "dict")
    model = skeleton()
    model.load_state_dict(state, strict=False, assign=True)  # as the error suggests
    assert all(torch.equal(model.state_dict()[name], each) for name, each in state.items())


def test_a_shard_that_changed_after_the_plan(state, tmp_path):
    model = skeleton()
    plan = loadstone.plan(model, tmp_path / "good.safetensors")
    before = snapshot(model)
    os.utime(tmp_path / "good.safetensors", (1, 1))
    with pytest.raises(loadstone.LoadError) as caught:
        plan.execute()
    assert caught.value.code == "io.changed"
    assert_untouched(model, before)


def test_a_model_that_changed_after_the_plan(tmp_path, state):
    model = skeleton()
    plan = loadstone.plan(model, tmp_path / "good.safetensors")
    model.extra = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(loadstone.PlanError) as caught:
        plan.execute()
    assert caught.value.code == "plan.model_changed" and "extra" in str(caught.value)


class Table(torch.nn.Module):
    """A tensor whose kind (parameter or buffer) depends on the constructor's argument."""

    def __init__(self, kind):
        super().__init__()
        if kind == "parameter":
            self.table = torch.nn.Parameter(torch.arange(4.0))
        else:
            self.register_buffer("table", torch.arange(4.0), persistent=kind == "persistent")


@pytest.mark.parametrize("found", ["parameter", "persistent", "non_persistent"])
@pytest.mark.parametrize("planned", ["parameter", "persistent", "non_persistent"])
def test_a_plan_is_for_the_kinds_of_its_model(planned, found, tmp_path):
    """Regression: if the kinds differed, a load ignored a value of the checkpoint, left a parameter
    on meta, or reported a buffer as a parameter."""
    save_file({"table": torch.full((4,), 9.0)}, tmp_path / "model.safetensors")
    loadstone.plan(Table(planned), tmp_path).save(tmp_path / "plan.json")
    with loadstone.skeleton():
        model = Table(found)
    plan = loadstone.Plan.load(tmp_path / "plan.json")
    if planned == found:
        plan.execute(model=model)
        value = torch.arange(4.0) if found == "non_persistent" else torch.full((4,), 9.0)
        assert torch.equal(model.table, value)
        return
    before = snapshot(model)
    with pytest.raises(loadstone.PlanError, match=r"table.*a different kind") as caught:
        plan.execute(model=model)
    assert caught.value.code == "plan.model_changed"
    assert_untouched(model, before)


class Mixed(torch.nn.Module):
    """Tensors of each kind; the checkpoint contains only the first of them."""

    def __init__(self):
        super().__init__()
        self.read = torch.nn.Parameter(torch.ones(4))
        self.zeros = torch.nn.Parameter(torch.ones(4))
        self.fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("count", torch.ones(4, dtype=torch.int64))
        self.register_buffer("made", torch.arange(4.0), persistent=False)
        self.register_buffer("index", torch.arange(4), persistent=False)
        self.plain = torch.arange(4.0)


SAVED = ("read", "zeros", "fixed", "saved", "count")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
FIELDS = {
    "dtype": list(WIDTHS),
    "kind": ["parameter", "persistent_buffer", "non_persistent_buffer", "attribute"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in FIELDS for value in FIELDS[field]]
)
@pytest.mark.parametrize("name", [*SAVED, "made", "index", "plain"])
def test_a_plan_that_was_changed_by_hand_fits_its_model(name, field, value, tmp_path):
    """Regression: a buffer was cast to integers, so torch raised in the middle of a load."""
    save_file({"read": torch.full((4,), 9.0)}, tmp_path / "model.safetensors")
    loadstone.plan(Mixed(), tmp_path, missing="zeros").save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    target = next(each for each in document["targets"] if each["name"] == name)
    planned, target[field] = target[field], value
    if field == "dtype":  # the plan's totals must agree with the changed dtype
        grown = 4 * (WIDTHS[value] - WIDTHS[planned])
        grown += 16 if name == "read" and value != planned else 0  # a cast needs staging
        document["peak_bytes"] = {"cpu": document["peak_bytes"]["cpu"] + grown}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    model = Mixed()
    before = snapshot(model)
    casts = field == "dtype" and name in SAVED and {planned, value} <= FLOATS.keys()
    try:
        loadstone.Plan.load(tmp_path / "plan.json").execute(model=model)
    except loadstone.Error as error:
        assert value != planned and not casts
        assert name in str(error) and error.code in ("plan.model_changed", "plan.box", "plan.json")
        assert_untouched(model, before)
        return
    assert value == planned or casts
    loadstone.audit(model).require_real()
    if value in FLOATS:
        assert getattr(model, name).dtype == FLOATS[value]


def test_a_buffer_that_became_persistent_after_the_plan(tmp_path):
    save_file({"table": torch.full((4,), 9.0)}, tmp_path / "model.safetensors")
    model = Table("non_persistent")
    plan = loadstone.plan(model, tmp_path)
    model._non_persistent_buffers_set.clear()
    with pytest.raises(loadstone.PlanError, match="expected non persistent buffer") as caught:
        plan.execute()
    assert caught.value.code == "plan.model_changed"


def test_an_error_in_the_progress_callback_stops_the_load(state, tmp_path):
    model = skeleton()
    before = snapshot(model)

    def fail(done, total):
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        loadstone.load(model, tmp_path / "good.safetensors", progress=fail)
    assert_untouched(model, before)


def test_interrupt_leaves_the_model_as_it_was(tmp_path):
    """Ctrl-C in the middle of a load of 400 MB that a slow progress callback delays."""
    program = textwrap.dedent("""
        import os, signal, sys, time, torch, loadstone
        from safetensors.torch import save_file
        path = sys.argv[1]
        save_file({"w": torch.zeros(100_000_000)}, path)
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.empty(100_000_000, device="meta"))
        sent = []
        def interrupt(done, total):
            if not sent and done < total:
                sent.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGINT)
        try:
            loadstone.load(model, path, progress=interrupt)
            print("finished")
        except KeyboardInterrupt:
            print("interrupted", model.w.is_meta, time.perf_counter() - sent[0])
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "big.safetensors")],
        capture_output=True,
        text=True,
    )
    words = done.stdout.split()
    assert words[:2] == ["interrupted", "True"], done.stdout + done.stderr
    print(f"interrupted after {float(words[2]):.3f} s")


def test_signal_handlers_are_those_of_the_caller(state, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    loadstone.load(skeleton(), tmp_path / "good.safetensors")
    assert signal.getsignal(signal.SIGINT) is before


def test_policies_for_what_is_missing_go_by_name(tmp_path):
    """The first pattern that matches the whole name applies; a name without a match is an error."""
    model = randomise(Tiny())
    state = save(model, tmp_path / "model.safetensors")
    for name in ("blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.linear.bias"):
        del state[name]
    save_file(state, tmp_path / "model.safetensors")
    with loadstone.skeleton():
        bare = Tiny()
    policies = {r".*\.norm\.bias": "zeros", r".*\.norm\..*": "initialise"}
    plan = loadstone.plan(bare, tmp_path / "model.safetensors", missing=policies)
    errors = [finding for finding in plan.findings if finding.severity == "error"]
    assert [finding.target for finding in errors] == ["blocks.1.linear.bias"]
    policies[r"blocks\.1\.linear\.bias"] = "zeros"
    report = loadstone.load(bare, tmp_path / "model.safetensors", missing=policies)
    assert torch.equal(bare.blocks[0].norm.bias, torch.zeros(8))
    assert torch.equal(bare.blocks[1].norm.weight, torch.ones(8))
    assert report.provenance["blocks.0.norm.bias"].origin == "zeros"
    assert report.provenance["blocks.1.norm.weight"].origin == "initialiser"
    with pytest.raises(loadstone.Error, match="missing") as caught:
        loadstone.plan(bare, tmp_path / "model.safetensors", missing={"*": "zeros"})
    assert caught.value.code == "plan.options"


def test_a_message_names_its_tensor_once():
    twice, once = "'w': 'w' is [7] [plan.shape]", "'w' is [7] [plan.shape]"
    assert str(from_core(twice, "plan.shape", "'w' is [7]", "", "w")) == once
    assert str(new_error("plan.shape", "'w' is [7]", tensor="w")) == once
    named = "'w': it is [7] [plan.shape]"  # control: the reason does not repeat the name
    assert str(from_core(named, "plan.shape", "it is [7]", "", "w")) == named
    assert str(new_error("plan.shape", "it is [7]", tensor="w")) == "w: it is [7] [plan.shape]"
