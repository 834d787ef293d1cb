"""Checkpoints with more shards than the limit on open file descriptors allows."""

import json
import resource
from functools import partial

import pytest

SHARDS = 300
LIMITS = [64, 256]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, write_safetensors):
    folder = tmp_path_factory.mktemp("sharded")
    weight_map = {}
    for number in range(1, SHARDS + 1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        values = number.to_bytes(4, "little") * 8
        write_safetensors(folder / name, {f"w.{number}": ("F32", [2, 4])}, values)
        weight_map[f"w.{number}"] = name
    index = {"metadata": {"total_size": SHARDS * 32}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(params=LIMITS)
def limited(request, run):
    """Run the command with a limited number of descriptors."""
    limits = (request.param, request.param)
    set_limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    return partial(run, preexec_fn=set_limit, status=0)


@pytest.mark.parametrize("name", ["inspect", "plan", "verify", "load"])
def test_commands_read_any_number_of_shards(limited, sharded, name):
    document = json.loads(limited(name, sharded, "--json").stdout)
    if name in ("verify", "load"):
        assert document["bytes_read"] == SHARDS * 32


@pytest.mark.parametrize("threads", [1, 16])
def test_two_checkpoints_are_compared(limited, sharded, threads):
    report = json.loads(limited("verify", sharded, sharded, "--threads", threads, "--json").stdout)
    assert report["ok"]


def test_a_saved_plan_is_loaded(limited, sharded, tmp_path):
    limited("plan", sharded, "-o", tmp_path / "plan.json")
    limited("load", "--plan", tmp_path / "plan.json")


@pytest.mark.parametrize("shard_size", ["5GB", "64B"])
def test_conversions_read_and_write_any_number_of_shards(
    limited, run, sharded, tmp_path, shard_size
):
    target = tmp_path / "out"
    limited("convert", sharded, target, "--shard-size", shard_size)
    run("verify", sharded, target, status=0)
