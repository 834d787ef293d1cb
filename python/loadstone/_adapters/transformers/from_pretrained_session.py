"""One call of ``from_pretrained``: its hooks, and the code that all releases share."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.patch import Hook, within, wrap_if_active
from loadstone._adapters.transformers.stripped_config import StrippedQuantizationConfig
from loadstone._base.errors import new_error
from loadstone._execute import ties
from loadstone._execute.execute import FilledValues
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._files.catalog import Catalog, try_inspect
from loadstone._model.holders import MetaParameters
from loadstone._model.model_lock import slots_of
from loadstone._model.ranks import shard_of
from loadstone._plan.options import LoadOptions
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.provenance import OFFLOADED
from loadstone._plan.recipes import LibraryRecipes, shape_mismatch
from loadstone._skeleton.constructor import find_builder, parameter_values
from loadstone._skeleton.unwritten import fill_value, is_unwritten

DEFAULTS = LoadOptions(missing="initialise")


class FromPretrainedSession(LoadSession):
    """One call of ``from_pretrained``, without the reading of weights. Single-threaded.

    Attributes:
        stripped_config: the config's quantization, if no quantizer handles it.
        initialises_missing: loadstone initialises missing tensors, even if the library reads the
            checkpoint.
        offloaded: tied tensors that hooks load from the offload folder.
    """

    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options)
        self.is_constructing = False
        self.initialises_missing = False
        self.stripped_config = StrippedQuantizationConfig()
        self.offloaded: set[str] = set()
        self._before: MetaParameters | None = None
        self._ties: dict[str, str] = {}
        self._fresh: set[str] = set()  # parameters without a value, to be initialised
        self._constructed: set[str] = set()  # parameters in _fresh that no initialiser wrote to
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers, before initialisation
        self._rewritten: set[str] = set()  # buffers that an initialiser wrote to

    def make_plan(
        self, model: Any, catalog: Catalog, recipes: LibraryRecipes | None, **arguments: Any
    ) -> PlannedLoad:
        self._before = MetaParameters(model)
        self._ties = recipes.ties if recipes is not None else {}
        chosen = {"initialises": True, "allows_unknown_modules": True}
        plan = super().make_plan(model, catalog, recipes, **chosen | arguments)
        plan.library_initialises = True
        return plan

    def install(self, filled: FilledValues) -> None:
        if self.options.loras is not None and self.plan is not None:
            ties.follow_plan(self.model, self.plan, self._ties)
        super().install(filled)

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Keep torch's random state: the library's construction on meta must not draw from it."""
        self.is_constructing = True
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            self.is_constructing = False

    def unwritten(self, name: str, tensor: torch.Tensor, **form: Any) -> torch.Tensor:
        """Return memory with a fill value, to detect whether an initialiser writes to it."""
        self._fresh.add(name)
        return torch.full_like(tensor, fill_value(form.get("dtype") or tensor.dtype), **form)

    def note_buffers(self, model: Any) -> None:
        self._versions = {
            name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()
        }

    def construct_unwritten(self, model: Any) -> None:
        """Fill parameters that no initialiser wrote to from a second construction."""
        for name, buffer in model.named_buffers():
            if self._versions.get(name) != (id(buffer), buffer._version):
                self._rewritten.add(name)
        fresh = {name: model.get_parameter_or_buffer(name) for name in sorted(self._fresh)}
        unwritten = [  # for bool, which has no distinct fill value, use the constructor's value
            name
            for name, tensor in fresh.items()
            if tensor.dtype == torch.bool or is_unwritten(tensor)
        ]
        if not unwritten:
            return
        build = find_builder(model)
        values = parameter_values(build, unwritten) if build is not None else {}
        for name in unwritten:
            tensor, value = fresh[name], values.get(name)
            if value is None or value.shape != tensor.shape:
                raise new_error(
                    "plan.no_initialiser",
                    "it is missing, the model's initialiser does not write to it, and a second "
                    "construction gives no value for it",
                    tensor=name,
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._constructed.add(name)

    def amend_report(self, model: Any, report: Report) -> None:
        if self._before is not None:
            self._before.note_replaced(model)
        provenance = report.provenance
        for slot in slots_of(model):
            item = provenance.get(slot.name)
            if item is None:
                continue
            if slot.tie_of is not None:
                provenance[slot.name] = dataclasses.replace(
                    item, origin="tie", tie_of=slot.tie_of, sources=(), reason=""
                )
            elif slot.name in self._constructed:
                reason = (
                    "it is missing, and the model's initialiser does not change the constructor's "
                    "value"
                )
                provenance[slot.name] = dataclasses.replace(
                    item, origin="constructor", reason=reason
                )
            elif slot.name in self._rewritten and item.origin == "constructor":
                provenance[slot.name] = dataclasses.replace(item, origin="initialiser")
            elif item.origin == "tie":  # the checkpoint has different values for both names
                provenance[slot.name] = dataclasses.replace(item, origin="checkpoint", tie_of="")
        for name in self.offloaded & provenance.keys():
            provenance[name] = dataclasses.replace(provenance[name], reason=OFFLOADED)


CURRENT_SESSION: ContextVar[FromPretrainedSession | None] = ContextVar(
    "loadstone_transformers_load", default=None
)

# Owner, name and replacement, which takes the call, the library's function and its arguments.
HookedFunction = tuple[Any, str, Callable[..., Any]]


def hooks_in_calls(functions: Iterable[HookedFunction]) -> list[Hook]:
    """Return hooks that run inside a call; outside, the library's own functions run."""
    return [
        Hook(owner, name, wrap_if_active("transformers", within(CURRENT_SESSION, replacement)))
        for owner, name, replacement in functions
    ]


def reason_against(
    model: Any, state_dict: Any, files: list[str] | None, device_mesh: Any
) -> str | None:
    """Return why loadstone does not load this checkpoint; ``None`` if it does."""
    if state_dict is not None:
        return "state_dict"
    if not files:
        return "no checkpoint files"
    if not all(str(file).endswith(".safetensors") for file in files):
        reason = try_inspect(files)[1]
        if reason:
            return f"a file that loadstone does not read ({reason})"
    if getattr(model, "_pp_stage", None) is not None:
        return "distributed_config"
    if device_mesh is not None and not _has_readable_shards(model):
        return "distributed_config"
    if any(name.endswith("_extra_state") for name in model.state_dict()):
        return "extra state of modules"
    return None


def _has_readable_shards(model: Any) -> bool:
    """Return whether the model is sharded over ranks, and loadstone can read every shard."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    shards = [shard for shard in map(shard_of, tensors) if shard is not None]
    return bool(shards) and not any(shard.obstacle for shard in shards)


def unsupported(argument: str) -> Exception:
    return new_error(
        "plan.options",
        "this load is not supported: call the model class's own from_pretrained",
        field=argument,
    )


def mismatch(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], is_ignored: bool
) -> _core.Finding:
    """Return the finding of a shape mismatch: a warning if the caller ignores it, else an error."""
    if is_ignored:
        return shape_mismatch(name, found, expected, severity="warning")
    hint = "ignore_mismatched_sizes=True initialises it instead"
    return shape_mismatch(name, found, expected, suggestion=hint)
