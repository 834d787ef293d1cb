"""Opens cells with transformers itself, and compares with the values of the layout's library.

``tools/opens_where.py`` writes the outcomes to ``docs/opens-where.md``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from readback_cells import SOURCES, Cell, Output, Source, model_state

import loadstone

PAGE = Path(__file__).parents[3] / "docs" / "opens-where.md"
RULES = Path(loadstone.__file__).with_name("_adapters") / "check_rules.json"
# Libraries whose releases affect the outcomes.
LIBRARIES = ("transformers", "compressed-tensors", "bitsandbytes", "nvidia-modelopt")
BF16 = torch.bfloat16


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def load_alone(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load with transformers, dequantized if possible; return model and loading information."""
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    method = AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    given: dict[str, Any] = {"dtype": BF16, "output_loading_info": True}
    if method == "compressed-tensors":
        given["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(folder, **given)
    if getattr(model, "is_quantized", False):
        model.dequantize()
    return model, info


def outcome(cell: Cell, output: Output) -> str:
    """Return ``"right"`` if all tensors match bit for bit, otherwise the page's description."""
    try:
        with _quiet():
            model, info = load_alone(output.folder)
    except Exception as reason:
        return f"`{type(reason).__name__}`"
    if info["missing_keys"]:
        return "random weights"
    state = model.state_dict()
    for name, tensor in model_state(output.numbers, cell.source).items():
        found = state[name]
        if found.shape != tensor.shape or not torch.equal(found.to(BF16), tensor):
            return "wrong numbers"
    return "right"


# ---- the page


def column(source: Source) -> str:
    return source.model if source.layout == "separate" else f"{source.model}, {source.layout}"


def releases() -> str:
    """Return the names and versions of the installed libraries, as the page lists them."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)


def row(encoding: str, style: str | None, outcomes: dict[Source, str]) -> str:
    cells = [f"`{encoding}`", style or "bitsandbytes", *(outcomes[each] for each in SOURCES)]
    return f"| {' | '.join(cells)} |"


def head() -> list[str]:
    names = ["encoding", "style", *map(column, SOURCES)]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def documented(cell: Cell) -> str | None:
    """Return the outcome that the page lists; ``None`` if the page does not list the cell."""
    start = f"| `{cell.encoding}` | {cell.style or 'bitsandbytes'} | "
    for line in PAGE.read_text().splitlines():
        if line.startswith(start):
            outcomes = line.removeprefix(start).removesuffix(" |").split(" | ")
            return outcomes[SOURCES.index(cell.source)]
    return None


def documented_releases() -> str:
    """Return the names and versions of the libraries with which the page was generated."""
    found = re.search(r"<!-- made with (.*) -->", PAGE.read_text())
    assert found is not None
    return found[1]


# ---- the rules of loadstone.check


def opening(outcomes: dict[Source, str], output: Output) -> dict[str, Any]:
    """Return the rule for an encoding in a style: its outcomes, and the components' dtypes."""
    experts = [outcome for source, outcome in outcomes.items() if source.has_experts]
    catalog = loadstone.inspect(output.folder)
    first = catalog._core.quantized()[0]
    return {
        "dense": next(outcomes[source] for source in SOURCES if not source.has_experts),
        "experts": next((each for each in experts if each != "right"), "right"),
        "components": {part: catalog.encodings()[name] for part, name in first[3].items()},
    }


def write_rules(openings: dict[str, dict[str, Any]]) -> None:
    """Replace the measured rules, and keep the others."""
    found = json.loads(RULES.read_text())
    found["transformers"] = {
        "source": "measured by tools/opens_where.py, as in docs/opens-where.md",
        "releases": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "expert_models": sorted({source.model for source in SOURCES if source.has_experts}),
        "openings": openings,
    }
    RULES.write_text(json.dumps(found, indent=1) + "\n")
