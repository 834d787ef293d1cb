"""Write docs/transformers-types.md: the support of transformers' model types.

    python tools/coverage_table.py            writes the table
    python tools/coverage_table.py --check    fails if the table is out of date

Every key of the library's conversion registry has a row. This script contains no conversions. It
reads the registry, and builds tiny models to find the keys that they use. It runs every converter
on real tensors, and traces it on symbols. Then it executes the traced recipes, and compares the
results byte for byte.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib.metadata
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "transformers-types.md"
BEGIN, END = "<!-- coverage: made by tools/coverage_table.py -->", "<!-- end of coverage -->"

sys.path.insert(0, str(ROOT / "python" / "tests" / "support"))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers_models import CASES  # noqa: E402

# Keys that have a class but no tiny model, with the reason.
NO_MODEL = {
    "timm": ("timm_wrapper", "DetrModel", "DetrForSegmentation", "ConditionalDetrModel",
             "ConditionalDetrForSegmentation", "deformable_detr"),
}  # fmt: skip
EXPERTS = 6


def registry() -> dict[str, list[Any]]:
    """Map keys (model type or class name) to the library's transforms, in their order."""
    from transformers import conversion_mapping

    return conversion_mapping._build_checkpoint_conversion_mapping()


# --- keys that tiny models use -------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def keys_used(model: Any) -> dict[str, set[int]]:
    """Return the keys of the registry that the library looks up for a model and finds.

    Returns:
        By key the positions of the transforms that match a tensor when the model is loaded, either
        from a ``save_pretrained`` folder or from names as in older files.
    """
    from transformers import conversion_mapping, core_model_loading

    original, found = conversion_mapping.get_checkpoint_conversion_mapping, []

    def look_up(key: str) -> Any:
        transforms = original(key)
        if transforms is not None:
            found.append((key, transforms))
        return transforms

    conversion_mapping.get_checkpoint_conversion_mapping = look_up
    try:
        mapping = conversion_mapping.get_model_conversion_mapping(model)
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = original
    state = model.state_dict()
    renamings = [item for item in mapping if not hasattr(item, "operations")]
    public = core_model_loading.revert_weight_conversion(model, state)
    model._weight_conversions = mapping
    for saved in (public, core_model_loading.revert_weight_conversion(model, state)):
        for name in sorted(saved, key=core_model_loading.dot_natural_key):
            core_model_loading.rename_source_key(
                name, renamings, converters(mapping), model.base_model_prefix, state
            )
    used: dict[str, set[int]] = {}
    for key, transforms in found:
        matched = {at for at, item in enumerate(transforms) if item.was_used()}
        used.setdefault(key, set()).update(matched)
    return used


def covered() -> dict[str, tuple[list[str], set[int]]]:
    """Map keys to the tests' tiny models that use them, and to the transforms that match."""
    found: dict[str, tuple[list[str], set[int]]] = {}
    with quiet():
        for case in CASES:
            with torch.device("meta"):
                model = case.cls(case.config())
            for key, matched in keys_used(model).items():
                names, all_matched = found.setdefault(key, ([], set()))
                names.append(case.name)
                all_matched |= matched
    return found


# --- converters run on tensors, and traced -------------------------------------------------------


def converters(transforms: list[Any]) -> list[Any]:
    from transformers.core_model_loading import WeightConverter

    return [item for item in transforms if isinstance(item, WeightConverter)]


def chain(converter: Any) -> str:
    return " > ".join(type(operation).__name__ for operation in converter.operations)


class Model:
    """A stand-in for a model, with what converters use: a config, and shapes of parameters."""

    def __init__(self, config: Any, shape: tuple[int, ...]) -> None:
        self.config = config
        self.shape = shape

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shape, device="meta")

    get_parameter_or_buffer = get_parameter


def fabricated(converter: Any) -> tuple[dict[str, list[str]], tuple[int, ...], Model]:
    """Return source names by pattern, the shape of each source, and a model for them."""
    operations = {type(operation).__name__ for operation in converter.operations}
    shape = (2, 24, 12) if operations & {"Interleave", "Transpose"} else (24, 12)
    parts = len(converter.target_patterns)
    wanted = (24 // parts, 12) if "Split" in operations else (shape[0], *shape[:0:-1])
    config = types.SimpleNamespace(num_attention_heads=2, split_ngram_parts=3)
    config.vision_config = types.SimpleNamespace(num_attention_heads=2)
    config.get_text_config = lambda: config
    names = {
        pattern: [f"{at}.{expert}" for expert in range(EXPERTS if "*" in pattern else 1)]
        for at, pattern in enumerate(converter.source_patterns)
    }
    return names, shape, Model(config, wanted)


def run(converter: Any, names: dict[str, list[str]], model: Model, value: Any) -> dict[str, Any]:
    """Run the library's converter on the tensor ``value(name)`` of each name."""
    own = copy.deepcopy(converter)
    layer = "model." + own.target_patterns[0]
    for pattern, items in names.items():
        for name in items:
            own.add_tensor(layer, name, pattern, value(name))
    made = own.convert(layer, model=model, config=model.config)
    return {name: item[0] if isinstance(item, list) else item for name, item in made.items()}


class Holder(torch.nn.Module):
    """A model with the parameters t0, t1 ..."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        for at, value in enumerate(values):
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self.register_parameter(f"t{at}", torch.nn.Parameter(empty, requires_grad=False))


def check_converter(converter: Any, folder: Path) -> int:
    """Run a converter on tensors, and its traced recipes on a file of them.

    Returns:
        The number of compared targets.

    Raises:
        AssertionError: a target differs.
    """
    import loadstone
    from loadstone._execute.plan import Plan
    from loadstone._plan import planning
    from loadstone._plan import recipes as _traced
    from loadstone.tracing import Trace

    names, shape, model = fabricated(converter)
    generator = torch.Generator().manual_seed(0)
    flat = [name for items in names.values() for name in items]
    values = {name: torch.randn(shape, generator=generator) for name in flat}
    expected = run(converter, names, model, values.__getitem__)

    file = folder / "sources.safetensors"
    save_file(values, file)
    catalog = loadstone.inspect(file)
    trace = Trace(catalog)
    made = run(converter, names, model, trace.source)
    assert list(made) == list(expected), (list(made), list(expected))
    for at, value in enumerate(made.values()):
        trace.add(f"t{at}", value)
    holder = Holder(list(expected.values()))
    traced = _traced.LibraryRecipes(recipes=trace.finish())
    Plan(planning.make_plan(holder, catalog, traced)).execute()
    for at, (name, value) in enumerate(expected.items()):
        ours = holder.get_parameter(f"t{at}").detach()
        same = torch.equal(ours.view(torch.uint8), value.contiguous().view(torch.uint8))
        assert same, f"{chain(converter)}: {name} differs"
    return len(expected)


# --- the table -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """A row of the table.

    Attributes:
        key: the key in the registry.
        kind: the operations of its transforms.
        checked: the check that was made.
        refused: the reason if loadstone rejects a converter, or "".
    """

    key: str
    kind: str
    checked: str
    refused: str = ""

    def line(self) -> str:
        return f"| `{self.key}` | {self.kind} | {self.checked} | {self.refused or '-'} |"


def kind_of(transforms: list[Any]) -> str:
    """Describe a key's transforms in a few words."""
    found = converters(transforms)
    counts = collections.Counter(map(chain, found))
    parts = [f"{name}{f' x{count}' if count > 1 else ''}" for name, count in counts.items()]
    others = [item for item in transforms if item not in found]
    if not parts:
        return f"names only ({len(others)})"
    return ", ".join(parts) + (f"; names ({len(others)})" if others else "")


def make_rows(folder: Path) -> list[Row]:
    """Check all keys; a row contains the reason if loadstone rejects one of its converters."""
    from loadstone import Error

    entries, models = registry(), covered()
    rows = []
    for key, transforms in entries.items():
        refused, compared = "", 0
        for converter in converters(transforms):
            try:
                compared += check_converter(converter, folder)
            except Error as reason:
                refused = f"{chain(converter)}: {reason.code}"
        rows.append(Row(key, kind_of(transforms), _checked(key, entries, models), refused))
    return rows


def _checked(
    key: str, entries: dict[str, list[Any]], models: dict[str, tuple[list[str], set[int]]]
) -> str:
    traced = "; converters traced" if converters(entries[key]) else ""
    if key in models:
        names, matched = models[key]
        # Prefer the model whose type is the key, or else the first one.
        best = key if key in names else names[0]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"loaded: {best}{more}, {len(matched)} of {len(entries[key])} match{traced}"
    why = next((f" (its class needs {name})" for name, keys in NO_MODEL.items() if key in keys), "")
    same = _same_as(key, entries, models)
    if same:
        return f"as `{same}`, whose transforms these are{traced}"
    if traced:
        return f"converters traced{why}"
    return f"by the library's own renaming only{why}"


def _same_as(key: str, entries: dict[str, list[Any]], models: dict[str, Any]) -> str:
    """Return a key that has a model and the same transform objects, or ""."""
    own = list(map(id, entries[key]))
    return next((name for name in models if list(map(id, entries[name])) == own), "")


def make_table(rows: list[Row]) -> str:
    """Return the text between the two marks."""
    version = importlib.metadata.version("transformers")
    loaded = sum(row.checked.startswith("loaded") for row in rows)
    with_converters = sum("names only" not in row.kind for row in rows)
    refused = [row for row in rows if row.refused]
    lines = [
        f"transformers {version} registers conversions under {len(rows)} keys, {with_converters} "
        f"of them with converters. {loaded} are used by one of the {len(CASES)} tiny models of "
        f"the tests. {len(refused) or 'None'} {'is' if len(refused) == 1 else 'are'} refused.",
        "",
        "| key | operations | checked | refused |",
        "|---|---|---|---|",
        *[row.line() for row in sorted(rows, key=lambda row: row.key.lower())],
    ]
    return "\n".join(lines)


def table_of_page(page: Path = PAGE) -> str:
    text = page.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(make_rows(Path(folder)))
    if options.check:
        if table_of_page() != table:
            print(f"{os.path.relpath(PAGE)}: the table is not what the registry gives")
            return 1
        return 0
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
