#!/usr/bin/env python3
"""Take pictures of a plan's HTML page; needs Chromium.

    python tools/screenshots.py [FOLDER]

`make screenshots` writes the pictures of docs/images, and `make docs` those of the site.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COMMAND = str(Path(sys.executable).with_name("loadstone"))


def llama(layers: int, width: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama by name, all zeros."""
    inner = width * 11 // 4
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 4, width),
        "self_attn.v_proj": (width // 4, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {
        f"model.layers.{layer}.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.zeros(16 * width, width, dtype=torch.bfloat16)
    return tensors


def skeleton_with_errors(tensors: dict[str, torch.Tensor]) -> str:
    targets: list[dict[str, Any]] = [
        {"name": name, "shape": list(tensor.shape), "dtype": "BF16", "kind": "parameter"}
        for name, tensor in tensors.items()
    ]
    targets[3]["name"] = "model.layers.0.self_attn.output.weight"
    targets[5]["shape"] = [7, 7]
    return json.dumps({"targets": [{**target, "tie_of": None} for target in targets]})


def page(checkpoint: Path, command: str, *options: object) -> Path:
    """Write the page of a plan with the command, even if the plan has errors."""
    path = checkpoint.with_suffix(".html")
    words = [COMMAND, command, checkpoint.name, "--html", path.name, *options]
    subprocess.run(
        [str(word) for word in words],
        cwd=checkpoint.parent,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return path


def shoot(path: Path, target: Path, width: int, height: int, *flags: str) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={width},{height}", f"--screenshot={target}", *flags]
    subprocess.run([*command, path.as_uri()], check=True, capture_output=True)
    print(target)


def main(images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        tensors = llama(16, 512)
        save_file(tensors, model)
        shoot(
            page(model, "load", "--max-memory", "cpu=300MB"), images / "plan-loaded.png", 1100, 1060
        )
        dark = "--blink-settings=preferredColorScheme=0"
        shoot(page(model, "plan", "--dtype", "f32"), images / "plan-dark.png", 1100, 1300, dark)
        shoot(page(model, "plan"), images / "plan-narrow.png", 480, 1300)
        skeleton = Path(folder) / "skeleton.json"
        skeleton.write_text(skeleton_with_errors(tensors), encoding="utf-8")
        shoot(page(model, "plan", "--skeleton", skeleton), images / "plan-errors.png", 1100, 700)
        many = Path(folder) / "many.safetensors"
        save_file(
            {
                f"layers.{layer}.experts.{expert}.{part}.weight": torch.zeros(1)
                for layer in range(65)
                for expert in range(257)
                for part in ("gate", "up", "down")
            },
            many,
        )
        shoot(page(many, "plan"), images / "plan-50000-rows.png", 1100, 1300)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else IMAGES)
