"""Builds library classes directly and as a skeleton, and prints a JSON line per class.

Run as ``python skeleton_worker.py LIBRARY NAME ...``, with a library of ``BUILDERS``. Each class
runs in a forked child, so that its memory is freed and a crash affects only its own line.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from storages import sharers

from loadstone._model.walk import walk
from loadstone._skeleton.skeleton import recompute, skeleton, skeleton_record

# Size limit of direct constructions with random values. Larger ones skip random initialisers, so
# the kernel does not allocate their parameters, and no buffer depends on the parameters' values.
FILLED_BYTES_MAX = 256 << 20
DIRECT_BYTES_MAX = {
    "diffusers": 40 << 30,
    "diffusers, shallow": 40 << 30,
    "transformers": FILLED_BYTES_MAX,
}
CHILD_BYTES_MAX = 4 << 30
RANDOM_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "orthogonal_",
)  # fmt: skip
SECONDS_MAX = 600
EXCLUDING = ("skeleton.random", "skeleton.uninitialised")


# --- selection and construction of classes --------------------------------------------------------


def diffusers_names() -> list[str]:
    """Return every model class that diffusers exports."""
    import diffusers
    from diffusers import ModelMixin

    found = set()
    for name in dir(diffusers):
        try:
            cls = getattr(diffusers, name)
        except (ImportError, RuntimeError, AttributeError):
            continue
        if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls is not ModelMixin:
            found.add(name)
    return sorted(found)


def diffusers_builders(name: str) -> Iterator[Callable[[], Any]]:
    """Yield functions that build the class: with its defaults, then with fewer layers."""
    import diffusers

    cls = getattr(diffusers, name)
    yield cls
    shallow = {
        key: 2
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if type(parameter.default) is int
        and parameter.default > 2
        and ("layers" in key or "blocks" in key or key == "depth")
        and "per_block" not in key
    }
    yield lambda: cls(**shallow)


def transformers_names() -> list[str]:
    """Return every model type that AutoModel supports."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(name for name in CONFIG_MAPPING_NAMES if name in MODEL_MAPPING_NAMES)


_COUNTS = ("layers", "blocks", "depth", "num_experts", "n_routed_experts", "num_local_experts")
_WIDTHS = (
    "hidden_size", "intermediate_size", "d_model", "ffn_dim", "head_dim", "d_ff", "embed_dim",
    "hidden_dim", "projection_dim", "n_embd", "n_inner", "mlp_dim", "dim", "_rank", "d_kv",
)  # fmt: skip


def _shrunk(value: dict[str, Any], factor: int, fewer: bool) -> dict[str, Any]:
    """Return a smaller configuration: a small vocabulary, two layers, and divided widths."""
    small: dict[str, Any] = {}
    depth = value.get("num_hidden_layers") or value.get("num_layers")
    for key, item in value.items():
        if isinstance(item, dict):
            item = _shrunk(item, factor, fewer)
        elif not isinstance(key, str):
            pass
        elif fewer and isinstance(item, list) and type(depth) is int and len(item) == depth > 2:
            item = item[:2]
        elif isinstance(item, int) and not isinstance(item, bool):
            if key.endswith("vocab_size") and item > 512:
                item = 512
            elif key.endswith("token_id") and item >= 512:
                item = 1
            elif fewer and any(word in key for word in _COUNTS) and item > 2 and "per" not in key:
                item = 2 if "expert" not in key else min(item, 8)
            elif factor > 1 and any(key.endswith(word) for word in _WIDTHS) and item >= 8 * factor:
                item //= factor
        small[key] = item
    return small


def transformers_builders(name: str) -> Iterator[Callable[[], Any]]:
    """Yield functions that build the AutoModel class, for smaller and smaller configurations."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[name]
    plain = config_class().to_dict()
    forms = [(8, True), (4, True), (8, False), (2, True), (1, True), (1, False), (16, True)]
    for factor, fewer in forms:

        def build(factor: int = factor, fewer: bool = fewer) -> Any:
            config = config_class.from_dict(_shrunk(plain, factor, fewer))
            return AutoModel.from_config(config)

        yield build


BUILDERS: dict[str, Callable[[str], Iterable[Callable[[], Any]]]] = {
    "diffusers": diffusers_builders,
    "diffusers, shallow": lambda name: list(diffusers_builders(name))[1:],
    "transformers": transformers_builders,
}

# --- comparison -----------------------------------------------------------------------------------


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    if one.is_floating_point() or one.is_complex():
        return bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    return torch.equal(one, other)


def _identity(model: Any) -> list[tuple[Any, ...]]:
    slots = walk(model)
    shared = sharers(slots)
    return [
        (slot.name, slot.kind, slot.tie_of, shared[slot.name], str(slot.tensor.dtype),
         tuple(slot.tensor.shape), type(slot.tensor).__name__)
        for slot in slots
    ]  # fmt: skip


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Disable random initialisers during a direct construction."""
    before = {name: getattr(torch.nn.init, name) for name in RANDOM_INITIALISERS}
    for name in before:
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.nn.init, name, function)


def build_skeleton(build: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    with skeleton():
        return build()


def compare(build: Callable[[], Any], made: Any) -> dict[str, Any]:
    """Return the differences between a skeleton and a direct construction, and the counts."""
    findings = [
        {"code": finding.code, "target": finding.target}
        for finding in skeleton_record(made).findings
    ]
    torch.manual_seed(2)
    direct = build()
    problems = []
    if _identity(made) != _identity(direct):
        differing = set(_identity(made)) ^ set(_identity(direct))
        problems.append(f"other tensors: {sorted(map(str, differing))[:6]}")
    problems += [
        f"{slot.name} is a parameter in memory"
        for slot in walk(made)
        if slot.kind == "parameter" and not slot.tensor.is_meta
    ]
    truth = {slot.name: slot for slot in walk(direct)}
    for slot in walk(made):
        source = truth.get(slot.name)
        if slot.kind == "parameter" and source is not None:
            if slot.tensor.requires_grad != source.tensor.requires_grad:
                problems.append(f"{slot.name}: requires_grad")
            slot.replace(source.tensor)
    derived = recompute(made)
    excluded = {f["target"] for f in findings if f["code"] in EXCLUDING}
    compared = compared_bytes = 0
    for slot in walk(made):
        source = truth.get(slot.name)
        if source is None or slot.name in excluded:
            continue
        if truth[source.tie_of or slot.name].kind == "parameter":
            continue
        compared += 1
        compared_bytes += source.tensor.nbytes
        if not _equal(slot.tensor, source.tensor):
            problems.append(f"{slot.name} ({slot.kind}) differs")
    del made
    if any(f["code"] == "skeleton.random" for f in findings):
        torch.manual_seed(3)
        again = {slot.name: slot.tensor for slot in walk(build())}
        for f in findings:
            if f["code"] == "skeleton.random" and f["target"]:
                same = _equal(again[f["target"]], truth[f["target"]].tensor)
                if same and again[f["target"]].numel():
                    problems.append(f"{f['target']} is called random and is not")
    return {
        "compared": compared,
        "compared_bytes": compared_bytes,
        "parameters": sum(slot.kind == "parameter" for slot in truth.values()),
        "derived": derived,
        "findings": [f for f in findings if f["code"] != "skeleton.derived"],
        "problems": problems,
    }


def examine(library: str, name: str) -> dict[str, Any]:
    """Compare one class, in the largest form that fits into memory."""
    reason = ""
    try:
        for number, build in enumerate(BUILDERS[library](name)):
            try:
                made = build_skeleton(build)
            except Exception:
                failure = traceback.format_exc()[-900:]
                try:
                    with unfilled():
                        build()
                except Exception as error:  # the configuration itself cannot be constructed
                    reason = f"{type(error).__name__}: {error}"[:200]
                    continue
                return {"problems": [f"only the skeleton fails: {failure}"]}
            size = sum(slot.tensor.nbytes for slot in walk(made) if slot.tie_of is None)
            if size > DIRECT_BYTES_MAX[library]:
                reason = f"{size >> 20} MiB"
                continue
            with contextlib.nullcontext() if size <= FILLED_BYTES_MAX else unfilled():
                return {**compare(build, made), "form": number, "direct_bytes": size}
    except Exception:
        return {"problems": [f"comparison failed: {traceback.format_exc()[-900:]}"]}
    return {"not_built": reason}


def _child(library: str, name: str, sender: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A limit of memory, so that a large configuration cannot exhaust the machine.
    if library == "transformers":
        resource.setrlimit(resource.RLIMIT_DATA, (CHILD_BYTES_MAX, CHILD_BYTES_MAX))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        result = examine(library, name)
    except BaseException as error:
        result = {"problems": [f"{type(error).__name__}: {error}"[:300]]}
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sender.send(result)
    sender.close()


def main(library: str, names: list[str]) -> None:
    """Print one line of JSON for each name."""
    # Import the libraries once for all children.
    if library == "transformers":
        from transformers import AutoModel, PreTrainedModel  # noqa: F401
    next(iter(BUILDERS[library](names[0])))
    context = multiprocessing.get_context("fork")
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(library, name, sender))
        child.start()
        sender.close()
        try:
            result = (
                receiver.recv() if receiver.poll(SECONDS_MAX) else {"problems": ["took too long"]}
            )
        except EOFError:
            result = {"problems": ["the process died"]}
        if child.is_alive():
            child.join(5)
            child.kill()
        child.join()
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
