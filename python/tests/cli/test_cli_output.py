"""Output of the commands, for people and as JSON."""

import json
import os
import shutil
from pathlib import Path

import pytest

HOSTILE_NAMES = [
    'quote " backslash \\ end',
    "line\nbreak\ttab",
    "\x1b]0;title\x07\x1b[2J",
    "\u202eright to left",
    "\u2028line separator",
    "\u009b31m C1",
    "emoji \U0001f9f2 and \u00e9",
    "{braces} %s %n $1",
    " ",
    "../../etc/passwd",
]


@pytest.fixture
def hostile_names(tmp_path, write_safetensors):
    tensors = {name: ("U8", [1]) for name in HOSTILE_NAMES}
    return write_safetensors(
        tmp_path / "names.safetensors",
        tensors,
        bytes(len(tensors)),
        metadata={"\x1b[31m": "\x1b[0m\n\u202e"},
    )


@pytest.mark.parametrize("arguments", [["inspect", "--tensors"], ["plan"], ["load"], ["verify"]])
def test_hostile_names(run, hostile_names, arguments):
    document = json.loads(run(*arguments, hostile_names, "--json", status=0).stdout)
    text = run(*arguments, hostile_names, status=0).stdout
    for steering in ["\x1b", "\u009b", "\u202e", "\u2028"]:
        assert steering not in text
    assert "line\nbreak" not in text
    rows = document.get("tensors") or document.get("targets") or document.get("provenance") or []
    if isinstance(rows, dict):
        rows = [{"name": name} for name in rows]
    names = {row.get("name", row.get("target")) for row in rows}
    if arguments != ["verify"]:
        assert names == set(HOSTILE_NAMES)


def test_inspect_json(run, small):
    document = json.loads(run("inspect", small, "--json", status=0).stdout)
    assert document.keys() >= {"tensors", "metadata", "total_bytes", "findings"}
    assert document["total_bytes"] == 36
    assert document["metadata"] == {"made by": "a test"}


def test_inspect_text(run, small):
    short = run("inspect", small, status=0).stdout
    long = run("inspect", small, "--tensors", status=0).stdout
    assert short.startswith(f"{small}: ")
    assert "F32" in short
    assert "BF16" in short
    assert "embed.weight" not in short
    assert "embed.weight" in long


def test_a_bare_file_is_known_by_its_name(run, small):
    shown = run("inspect", small.name, cwd=small.parent, status=0).stdout
    assert shown.startswith(f"{small.name}: ")


def test_what_is_not_there_is_said_once(run, tmp_path):
    said = run("inspect", tmp_path / "gone", status=4).stderr
    assert said.count("no such file") == 1 and "No such file" not in said


def test_several_files_are_one_checkpoint(run, tmp_path, write_safetensors):
    paths = [
        write_safetensors(tmp_path / f"{name}.safetensors", {name: ("F32", [3])}) for name in "ab"
    ]
    assert json.loads(run("inspect", *paths, "--json", status=0).stdout)["total_bytes"] == 24
    assert json.loads(run("load", *paths, "--json", status=0).stdout)["bytes_read"] == 24


def test_plan_json_is_the_saved_plan(run, small, tmp_path):
    done = run("plan", small, "-o", tmp_path / "plan.json", "--json", status=0)
    shown = json.loads(done.stdout)
    assert shown.pop("duration")
    assert shown == json.loads((tmp_path / "plan.json").read_text())


def test_saved_plan_is_loaded(run, small, tmp_path):
    run("plan", small, "--dtype", "f32", "-o", tmp_path / "plan.json", status=0)
    document = json.loads(run("load", "--plan", tmp_path / "plan.json", "--json", status=0).stdout)
    assert {row["dtype"] for row in document["provenance"].values()} == {"F32"}


def test_saved_plan_of_a_file_of_another_time(run, small, tmp_path):
    run("plan", small, "-o", tmp_path / "plan.json", status=0)
    assert "io.time" not in run("load", "--plan", tmp_path / "plan.json", status=0).stderr
    os.utime(small, (1, 1))
    assert "[io.time]" in run("load", "--plan", tmp_path / "plan.json", status=0).stderr
    run("load", "--plan", tmp_path / "plan.json", "--strict", status=3)


def test_saved_plan_of_a_file_that_changed(run, small, tmp_path):
    run("plan", small, "-o", tmp_path / "plan.json", status=0)
    header = small.read_bytes()
    small.write_bytes(header.replace(b'"dtype": ', b'"dtype":\n', 1))  # same size, different bytes
    done = run("load", "--plan", tmp_path / "plan.json", status=4)
    assert "[io.changed]" in done.stderr


def test_saved_plan_of_files_that_moved(run, small, tmp_path):
    run("plan", small, "-o", tmp_path / "plan.json", status=0)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    small.rename(moved / small.name)
    run("load", "--plan", tmp_path / "plan.json", status=4)
    run("load", moved, "--plan", tmp_path / "plan.json", status=0)


def test_saved_plan_of_files_that_were_copied(run, small, tmp_path):
    run("plan", small, "-o", tmp_path / "plan.json", status=0)
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    shutil.copyfile(small, copied / small.name)  # the copy has a new modification time, as with cp
    small.unlink()
    done = run("load", copied, "--plan", tmp_path / "plan.json", status=0)
    assert "[io.time]" in done.stderr


def test_saved_plan_writes_only_where_the_user_says(run, small, tmp_path):
    evil = tmp_path / "victim"
    arguments = ["--dtype", "bf16", "--device-map", "disk", "--offload-folder", evil]
    run("plan", small, *arguments, "-o", tmp_path / "plan.json", status=0)
    refused = run("load", "--plan", tmp_path / "plan.json", status=1)
    assert "[plan.offload_folder]" in refused.stderr
    assert str(evil) in refused.stderr
    assert not evil.exists()
    mine = tmp_path / "mine"
    run("load", "--plan", tmp_path / "plan.json", "--offload-folder", mine, status=0)
    assert (mine / "index.json").exists()
    assert not evil.exists()


def test_saved_plan_that_leads_elsewhere_needs_the_users_word(run, small, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    shutil.copy2(small, private / small.name)
    plans = tmp_path / "plans"
    plans.mkdir()
    run("plan", small, "-o", plans / "plan.json", status=0)
    document = json.loads((plans / "plan.json").read_text())
    document["root"] = str(private)
    (plans / "plan.json").write_text(json.dumps(document))
    assert "[io.changed]" in run("load", "--plan", plans / "plan.json", status=4).stderr
    run("load", private, "--plan", plans / "plan.json", status=0)


@pytest.mark.parametrize("name", ["plan", "load"])
def test_html(run, small, tmp_path, name):
    page = tmp_path / "plan.html"
    run(name, small, "--html", page, status=0)
    assert "embed.weight" in page.read_text()


def test_readers_are_part_of_the_plan(run, small, tmp_path):
    """A saved plan contains the number of threads, and its execution may use a different number."""
    plan = tmp_path / "plan.json"
    for threads in (1, 3):
        run("plan", small, "--threads", threads, "-o", plan, status=0)
        assert json.loads(plan.read_text())["threads"] == threads
        run("load", "--plan", plan, "--threads", 4, status=0)
    assert "0 to 256" in run("plan", small, "--threads", 257, status=2).stderr


def test_load_json(run, small):
    document = json.loads(run("load", small, "--json", status=0).stdout)
    assert document.keys() >= {"provenance", "seconds", "bytes_read", "peak_bytes", "findings"}
    assert document["bytes_read"] == 36
    assert document["peak_bytes"]["cpu"] >= 36
    process = document["process"]
    assert process["resident_bytes_peak"] >= process["anonymous_bytes_peak"] > 0
    assert document["audit"] == {"ok": True, "on_meta": [], "unaccounted": [], "not_held": []}


def test_load_text(run, small):
    text = run("load", small, status=0).stdout
    assert "GB/s" in text
    assert "peak" in text
    assert "audit" in text


def test_verify_json(run, small, tmp_path, write_safetensors):
    same = json.loads(run("verify", small, small, "--json", status=0).stdout)
    assert same["ok"] is True
    assert same["differences"] == []
    other = write_safetensors(tmp_path / "other.safetensors", {"embed.weight": ("F32", [4, 2])})
    document = json.loads(run("verify", small, other, "--json", status=1).stdout)
    assert document["ok"] is False
    [difference] = document["differences"]
    assert difference["name"] == "norm.weight"
    assert difference.keys() >= {"name", "kind", "found", "expected"}


def test_verify_lists_the_first_differences_of_a_kind(run, tmp_path, write_safetensors):
    names = {f"layers.{i}.weight": ("F32", [2]) for i in range(25)}
    model = write_safetensors(tmp_path / "model.safetensors", names)
    other = write_safetensors(tmp_path / "other.safetensors", {"norm": ("F32", [2])})
    lines = run("verify", model, other, status=1).stdout.splitlines()
    assert sum("  missing    'layers." in line for line in lines) == 20
    assert "  missing    5 more" in lines
    document = json.loads(run("verify", model, other, "--json", status=1).stdout)
    assert len(document["differences"]) == 26


def test_verify_sees_through_sharding(run, tmp_path, write_safetensors):
    values = bytes(range(24))
    tensors = {name: ("F32", [3]) for name in "ab"}
    whole = write_safetensors(tmp_path / "whole.safetensors", tensors, values)
    parts = tmp_path / "parts"
    parts.mkdir()
    write_safetensors(parts / "1.safetensors", {"a": ("F32", [3])}, values[:12])
    write_safetensors(parts / "2.safetensors", {"b": ("F32", [3])}, values[12:])
    run("verify", whole, parts / "*.safetensors", status=0)
    write_safetensors(parts / "2.safetensors", {"b": ("F32", [3])}, values[12:23] + b"!")
    document = json.loads(run("verify", whole, parts / "*.safetensors", "--json", status=1).stdout)
    assert [d["name"] for d in document["differences"]] == ["b"]


def test_explain(run):
    everything = json.loads(run("explain", "--json", status=0).stdout)
    assert [row["code"] for row in everything] == sorted(row["code"] for row in everything)
    listed = run("explain", status=0).stdout
    for row in everything:
        assert row["code"] in listed
        one = run("explain", row["code"], status=0).stdout
        assert row["meaning"] in one
        assert row["advice"] in one
    assert json.loads(run("explain", "io.changed", "--json").stdout)["exit_status"] == 4


# ---- placement


def devices_of(run, checkpoint, *arguments: str) -> dict[str, str]:
    document = json.loads(run("plan", checkpoint, *arguments, "--json", status=0).stdout)
    return {row["name"]: row["device"] for row in document["targets"]}


def test_device_map_forms(run, small, tmp_path):
    folder = ["--offload-folder", str(tmp_path / "offload")]
    expected = {"embed.weight": "disk", "norm.weight": "cpu"}
    (tmp_path / "map.json").write_text('{"embed": "disk", "": "cpu"}')
    for form in ["embed=disk,=cpu", '{"embed": "disk", "": "cpu"}', str(tmp_path / "map.json")]:
        assert devices_of(run, small, "--device-map", form, *folder) == expected
    everywhere = devices_of(run, small, "--device-map", "disk", *folder)
    assert set(everywhere.values()) == {"disk"}


@pytest.mark.parametrize("mode", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_computed_device_map(run, small, tmp_path, mode):
    """Placement modes do not need --max-memory, because the command reads the machine's memory."""
    assert set(devices_of(run, small, "--device-map", mode).values()) == {"cpu"}
    limited = ["--max-memory", "cpu=8", "--offload-folder", str(tmp_path / "offload")]
    devices = devices_of(run, small, "--device-map", mode, *limited)
    assert devices["embed.weight"] == "disk"


def test_offloaded_tensors_are_not_held(run, tmp_path, small):
    folder = tmp_path / "offload"
    arguments = ["--dtype", "f64", "--device-map", "embed=disk,=cpu", "--offload-folder", folder]
    document = json.loads(run("load", small, *arguments, "--json", status=0).stdout)
    assert [name for name in document["audit"]["not_held"] if "embed.weight" in name]
    written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    assert written >= 8 * 8
