"""Each exit status, with a real cause; and which stream each message goes to."""

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

HOSTILE = Path(__file__).resolve().parents[3] / "tests/hostile"
ERROR_MEMBERS = {"code", "message", "path", "tensor", "byte_offset", "field", "found", "expected"}


def error_of(done: subprocess.CompletedProcess[str]) -> dict:
    """Return the error of a --json run, and check that it is on stdout only."""
    assert done.stderr == ""
    error = json.loads(done.stdout)["error"]
    assert error.keys() >= ERROR_MEMBERS
    return error


def assert_said_on_stderr(done: subprocess.CompletedProcess[str], code: str) -> None:
    assert done.stdout == ""
    assert f"[{code}]" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("name", ["inspect", "plan", "load", "verify"])
def test_done(run, small, name):
    done = run(name, small, status=0)
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("name", [None, "inspect", "plan", "load", "verify", "explain"])
def test_help(run, name, option):
    done = run(*[name] if name else [], option, status=0)
    assert "loadstone" in done.stdout
    assert done.stderr == ""


def test_version(run):
    assert run("--version", status=0).stdout.startswith("loadstone ")


# ---- 1: a problem was found


def test_incomplete_plan(run, small, incomplete):
    done = run("plan", small, "--skeleton", incomplete, status=1)
    assert "head.weight" in done.stdout
    assert "head.bias" in done.stdout


def test_incomplete_plan_is_not_loaded(run, small, incomplete):
    done = run("load", small, "--skeleton", incomplete, status=1)
    assert_said_on_stderr(done, "plan.missing")
    assert "head.bias" in done.stderr


def test_incomplete_plan_is_not_loaded_json(run, small, incomplete):
    done = run("load", small, "--skeleton", incomplete, "--json", status=1)
    assert error_of(done)["code"] == "plan.missing"
    findings = json.loads(done.stdout)["findings"]
    assert {f["target"] for f in findings} >= {"head.weight", "head.bias"}


def test_missing_as_zeros(run, small, incomplete):
    done = run("load", small, "--skeleton", incomplete, "--missing", "zeros", "--json", status=0)
    origins = {name: row["origin"] for name, row in json.loads(done.stdout)["provenance"].items()}
    assert origins["head.weight"] == "zeros"
    assert origins["embed.weight"] == "checkpoint"


def test_unexpected(run, small, write_skeleton):
    skeleton = write_skeleton({"embed.weight": ("F32", [4, 2])})
    assert "plan.unexpected" in run("load", small, "--skeleton", skeleton, status=0).stderr
    quiet = run("load", small, "--skeleton", skeleton, "--unexpected", "ignore", status=0)
    assert quiet.stderr == ""
    refused = run("load", small, "--skeleton", skeleton, "--unexpected", "error", status=1)
    assert_said_on_stderr(refused, "plan.unexpected")


def test_difference(run, small, tmp_path, write_safetensors):
    shapes = {"embed.weight": ("F32", [4, 2]), "norm.weight": ("BF16", [2])}
    other = write_safetensors(tmp_path / "other.safetensors", shapes, b"\x01" + b"\0" * 35)
    done = run("verify", small, other, status=1)
    assert "embed.weight" in done.stdout
    assert run("verify", small, small, status=0).stderr == ""


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("safetensors/st_bool_two.safetensors", "st.bool_value"),
        ("gguf/gg_nan_scale.gguf", "gg.scale_nan"),
    ],
)
def test_bad_value(run, file, code):
    """Headers contain no values, so only `verify` can detect an invalid value."""
    run("inspect", HOSTILE / file, status=0)
    assert code in run("verify", HOSTILE / file, status=1).stdout
    document = json.loads(run("verify", HOSTILE / file, "--json", status=1).stdout)
    assert document["ok"] is False
    assert [finding["code"] for finding in document["findings"]] == [code]


# ---- 2: wrong usage


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["inspct"],
        ["inspect"],
        ["inspect", "--no-such-option", "x"],
        ["plan"],
        ["load"],
        ["load", "--plan", "p.json", "--dtype", "bf16"],
        ["load", "x", "--threads", "-1"],
        ["load", "x", "--threads", "many"],
        ["load", "x", "--missing", "initialise"],
        ["plan", "x", "--rules", "r.json"],
        ["plan", "x", "--dtype", "float31"],
        ["plan", "x", "--staging", "nan"],
        ["plan", "x", "--staging", "-1"],
        ["plan", "x", "--max-memory", "8GiB"],
        ["plan", "x", "--max-memory", "cpu=much"],
        ["plan", "x", "--device-map", "layers.0="],
        ["plan", "x", "--device-map", "{not json"],
        ["verify"],
        ["verify", "a", "b", "c"],
        ["explain", "plan.mising"],
        ["explain", "a", "b"],
    ],
    ids=" ".join,
)
def test_wrong_usage(run, arguments):
    done = run(*arguments, status=2)
    assert_said_on_stderr(done, "usage")
    assert len(done.stderr.splitlines()) == 1
    assert "--help" in done.stderr
    assert error_of(run(*arguments, "--json", status=2))["code"] == "usage"


def test_unknown_code_names_the_nearest(run):
    assert "plan.missing" in run("explain", "plan.mising", status=2).stderr


# ---- 3: a bad or unsupported file


@pytest.mark.parametrize("name", ["inspect", "plan", "load", "verify"])
@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("safetensors/st_off_hole.safetensors", "st.hole"),
        ("safetensors/st_empty.safetensors", "st.file_too_small"),
        ("gguf/gg_magic.gguf", "gg.magic"),
        ("sharded/ix_missing_shard", "ix.missing_shard"),
    ],
)
def test_malformed(run, name, file, code):
    done = run(name, HOSTILE / file, status=3)
    assert_said_on_stderr(done, code)
    error = error_of(run(name, HOSTILE / file, "--json", status=3))
    assert error["code"] == code
    assert file in error["path"]


@pytest.mark.parametrize("name", ["inspect", "load", "verify"])
def test_every_damaged_shard_is_listed(run, small, tmp_path, name):
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, end in (("a", -1), ("b", None), ("c", -1)):
        (folder / f"{shard}.safetensors").write_bytes(small.read_bytes()[:end])
    done = run(name, folder, status=3)
    first, second = done.stderr.splitlines()
    assert "a.safetensors: " in first and "(1 more of 3 files cannot be opened: 'c.saf" in first
    assert "c.safetensors: " in second and "st.truncated" in second
    document = json.loads(run(name, folder, "--json", status=3).stdout)
    (other,) = document["more_errors"]
    assert other.keys() == document["error"].keys()
    assert other["path"].endswith("c.safetensors")


@pytest.mark.parametrize("name", ["inspect", "plan", "verify"])
def test_warnings_and_strict(run, name):
    folder = HOSTILE / "sharded/ix_total_size_lies"
    assert "ix." in run(name, folder, "--json", status=0).stdout
    run(name, folder, "--strict", status=3)


def test_strict_load_reads_nothing(run):
    folder = HOSTILE / "sharded/ix_total_size_lies"
    assert "ix." in run("load", folder, status=0).stderr
    assert run("load", folder, "--strict", status=3).stdout == ""


# ---- 4: input/output


@pytest.mark.parametrize("name", ["inspect", "plan", "load", "verify"])
def test_path_that_does_not_exist(run, tmp_path, name):
    gone = tmp_path / "gone.safetensors"
    done = run(name, gone, status=4)
    assert_said_on_stderr(done, "io.not_found")
    error = error_of(run(name, gone, "--json", status=4))
    assert error["path"] == str(gone)


@pytest.mark.parametrize("option", ["--skeleton", "--plan"])
def test_other_file_that_does_not_exist(run, small, tmp_path, option):
    error = error_of(run("load", small, option, tmp_path / "gone", "--json", status=4))
    assert error["path"] == str(tmp_path / "gone")


def test_output_that_cannot_be_written(run, small, tmp_path):
    done = run("plan", small, "-o", tmp_path / "no" / "plan.json", status=4)
    assert "[io." in done.stderr
    assert run("plan", small, "-o", "/dev/full", status=4).stdout == ""


@pytest.mark.parametrize("arguments", [["inspect"], ["explain"]])
def test_full_standard_output(command, small, arguments):
    paths = [] if arguments == ["explain"] else [small]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [command, *arguments, *paths], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 4
    assert b"[io.no_space]" in done.stderr


# Python ignores SIGXFSZ, and the command inherits this setting.
def test_standard_output_that_may_not_grow(command, small, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [command, "inspect", small],
            stdout=out,
            stderr=subprocess.PIPE,
            restore_signals=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            check=False,
        )
    assert done.returncode == 4
    assert b"[io.no_space]" in done.stderr


def test_named_pipe_is_refused_at_once(run, tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert_said_on_stderr(run("inspect", tmp_path / "pipe.safetensors", status=3), "ix.not_regular")


# ---- 5: does not fit


@pytest.mark.parametrize("name", ["plan", "load"])
def test_over_budget(run, small, name):
    done = run(name, small, "--max-memory", "cpu=1", "--json", status=5)
    assert "plan.over_budget" in done.stdout


def test_more_than_the_machine_has(run, tmp_path, write_safetensors):
    """A hole in a file takes no space, so the test can use a 1 TiB model."""
    huge = write_safetensors(tmp_path / "huge.safetensors", {"w": ("F32", [1 << 38])})
    run("inspect", huge, status=0)
    assert_said_on_stderr(run("load", huge, status=5), "memory.host")
    assert error_of(run("load", huge, "--json", status=5))["code"] == "memory.host"


def test_device_that_the_command_cannot_reach(run, small):
    for device in ("cuda:0", "0", "xpu", "npu:1", "mps"):
        run("plan", small, "--device-map", device, status=0)
    assert_said_on_stderr(run("load", small, "--device-map", "cuda:0", status=5), "memory.device")


def test_a_plan_names_devices_that_this_machine_lacks(run, small, tmp_path):
    words = ["plan", small, "--device-map", "cuda:99", "-o", tmp_path / "plan.json"]
    text = run(*words, status=0).stdout
    assert "this machine does not have 'cuda:99', on which the plan places tensors" in text
    assert run(*words, "--strict", status=3)
    assert "plan.device_absent" not in (tmp_path / "plan.json").read_text()
    found = json.loads(run(*words, "--json", status=0).stdout)["findings"]
    assert [each["sources"] for each in found] == [["cuda:99"]]
    assert "device_absent" not in run("plan", small, "--device-map", "disk", status=0).stdout


def test_a_computed_map_keeps_layers_whole(run, tmp_path, write_safetensors):
    names = {f"layers.{i}.{part}.weight": ("F32", [100]) for i in range(4) for part in "abc"}
    file = write_safetensors(tmp_path / "layers.safetensors", names)
    words = ["plan", file, "--device-map", "auto", "--max-memory", "cpu=4000", "--json"]
    plan = json.loads(run(*words, status=0).stdout)
    devices = {}
    for target in plan["targets"]:
        devices.setdefault(target["name"].split(".")[1], set()).add(target["device"])
    assert devices == {"0": {"cpu"}, "1": {"cpu"}, "2": {"disk"}, "3": {"disk"}}
