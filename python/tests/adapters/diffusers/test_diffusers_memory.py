"""Tests that the predicted peak counts tables that no file contains: 273 MB in CogVideoX."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import loadstone

TABLE_BYTES = 273_039_360
ROOM = 64 << 20

# Script that measures after the constructor, whose scratch memory a plan does not count.
CHILD = """
import json, sys, threading, time
import torch
from diffusers import CogVideoXTransformer3DModel
import loadstone
from bench.measure import memory

before = memory()["RssAnon"]
with loadstone.skeleton():
    model = CogVideoXTransformer3DModel(num_layers=1)
plan = loadstone.plan(model, sys.argv[1], dtype=torch.bfloat16)
peak, done = memory()["RssAnon"], threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, memory()["RssAnon"])

watcher = threading.Thread(target=watch)
watcher.start()
plan.execute()
done.set()
watcher.join()
table = model.patch_embed.pos_embedding
print(json.dumps({
    "predicted": plan.peak_bytes["cpu"],
    "table": table.numel() * table.element_size(),
    "grown": peak - before,
    "end": memory()["RssAnon"] - before,
}))
"""


@pytest.fixture(scope="module")
def shapes():
    from diffusers import CogVideoXTransformer3DModel

    with loadstone.skeleton():
        model = CogVideoXTransformer3DModel(num_layers=1)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_the_table_of_cogvideox_is_in_the_predicted_peak(shapes, tmp_path):
    file = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        for name, shape in shapes.items()
    }
    weights = sum(2 * tensor.numel() for tensor in state.values())
    save_file(state, file)
    del state
    output = subprocess.run(
        [sys.executable, "-c", CHILD, str(file)], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    print(found)
    assert found["table"] == TABLE_BYTES
    assert found["predicted"] >= weights + TABLE_BYTES
    # Control: a prediction without the table would be too low.
    assert found["grown"] > found["predicted"] - TABLE_BYTES + ROOM
    assert found["grown"] <= found["predicted"] + ROOM
