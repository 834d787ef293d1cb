"""Time the plan of DeepSeek-V3's 45,395 tensors: names and shapes, no data.

    python -m bench.large_plan

Run by ``make bench``. The shards consist of headers and holes. One plan traces the recipes, because
the cache folder is empty (cold), and the others read them from the cache (cached). For comparison,
the table shows how long transformers takes to rename all keys once, and to copy a converter for
each key, as its loader does.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, SHARDS = 61, 256, 163


def tensors(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the published layout, one tensor per expert and projection."""
    made: list[tuple[str, tuple[int, ...]]] = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            half = (shape[1] // 2, shape[2])
            for expert in range(EXPERTS):
                for part in ("gate", "up"):
                    made.append(
                        (name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), half)
                    )
        elif name.endswith("experts.down_proj"):
            for expert in range(EXPERTS):
                made.append((name.replace("down_proj", f"{expert}.down_proj.weight"), shape[1:]))
        else:
            made.append((name, shape))
    return made


def write(folder: Path, listed: list[tuple[str, tuple[int, ...]]]) -> None:
    """Write shards whose headers describe bf16 tensors, with a hole in place of the data."""
    weight_map = {}
    each = -(-len(listed) // SHARDS)
    for number in range(0, len(listed), each):
        part, header, end = listed[number : number + each], {}, 0
        file = folder / f"model-{number // each + 1:05d}-of-{SHARDS:05d}.safetensors"
        for name, shape in part:
            begin, size = end, 2
            for extent in shape:
                size *= extent
            end += size
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def library_seconds(model: Any, keys: list[str]) -> tuple[float, float]:
    """Time renaming all keys, and copying a converter per key; the loader discards most copies."""
    from transformers import conversion_mapping, core_model_loading

    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, core_model_loading.WeightConverter)]
    state = model.state_dict()
    begin = time.process_time()
    for key in keys:
        core_model_loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
    renamed = time.process_time() - begin
    begin = time.process_time()
    for _ in range(1000):
        copy.deepcopy(converters[0])
    return renamed, (time.process_time() - begin) / 1000 * len(keys)


def main() -> None:
    """Print wall and CPU seconds of one cold and two cached plans."""
    import transformers

    import loadstone

    config = transformers.DeepseekV3Config(num_hidden_layers=LAYERS, n_routed_experts=EXPERTS)
    with loadstone.skeleton():
        model = transformers.DeepseekV3ForCausalLM(config)
    with tempfile.TemporaryDirectory() as where:
        os.environ["XDG_CACHE_HOME"] = where
        folder = Path(where)
        listed = tensors(model.state_dict())
        write(folder, listed)
        print(f"\nDeepSeek-V3: {len(listed)} tensors in {SHARDS} shards")
        for kind in ("cold", "cached", "cached"):
            begin, cpu = time.perf_counter(), time.process_time()
            plan = loadstone.plan(model, folder, rules="transformers", dtype="bfloat16")
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            print(f"  plan, {kind:7s}{seconds:7.2f} s ({cpu:.2f} s of CPU)", flush=True)
            assert plan.ok and plan.bytes_to_read > 1e12
        renamed, copied = library_seconds(model, [name for name, _ in listed])
        print(
            f"  transformers: renaming alone {renamed:.2f} s of CPU, "
            f"a converter copied for each key {copied:.2f} s"
        )


if __name__ == "__main__":
    main()
