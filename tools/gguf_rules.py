"""Trace the rules in `python/loadstone/_adapters/llama_cpp/rules.json` from llama.cpp's converter.

    python tools/gguf_rules.py FOLDER [NAME...]

FOLDER has llama.cpp's converter: a checkout, or the source package of llama-cpp-python. NAME is a
network of `python/tests/support/llama_cpp_networks.py`. Without names, the tool traces all of
ARCHITECTURES and writes the file.

Each architecture is traced with models of several sizes, which have no weights. Every size, and
every number that the converter reads from the config, differs between the models. An expression of
the rules is one that fits all models. At the end, the rules must reproduce each trace, also those
of the models in CHECKS, which were not used to find the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import core_model_loading

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "python" / "tests" / "support")]

import llama_cpp_networks as networks  # noqa: E402
from gguf_fit import Sample, UnexplainedError, architecture_rules, require_same  # noqa: E402
from gguf_recorder import Config, Record, Text  # noqa: E402

from loadstone._adapters.llama_cpp import rules, tracing  # noqa: E402
from loadstone._adapters.llama_cpp.arrays import constant, symbol_in  # noqa: E402
from loadstone._adapters.llama_cpp.converter import Converter, converter_at  # noqa: E402
from loadstone._adapters.llama_cpp.weights import ConverterSymbol  # noqa: E402
from loadstone._adapters.transformers.rule_export import write_header  # noqa: E402
from loadstone._base.errors import Error  # noqa: E402
from loadstone._files.catalog import open_catalog  # noqa: E402
from loadstone._skeleton.skeleton import skeleton  # noqa: E402

RELEASE = "0.3.36"
ARCHITECTURES = (
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "phi",
    "phi3", "stablelm", "olmo", "olmo2", "olmoe", "granite", "granite-moe", "cohere", "starcoder",
    "starcoder2", "gpt-oss", "deepseek2", "deepseek3", "smollm3", "falcon", "gpt2", "ernie",
    "ernie-moe", "arcee", "seed-oss", "hunyuan", "dots1", "minimax", "bloom", "afmoe", "bert",
)  # fmt: skip

# Fields of published models that differ from transformers' defaults in what the converter does.
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.75, "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096,
}  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "phi3": [{"sliding_window": 2047}],
    "deepseek2": [
        {"rope_parameters": _YARN, "scoring_func": "softmax"},
        {"rope_parameters": _YARN, "scoring_func": "softmax", "q_lora_rank": None},
    ],
    "deepseek3": [{"rope_parameters": _YARN, "scoring_func": "sigmoid"}],
    "cohere": [{"model_max_length": 1000}],
    "minimax": [{"scoring_func": "sigmoid"}],
}
# Fields from which the converter computes tensors, so that rules hold only for these values.
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FIXED: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"head_dim": head_dim, "rope_parameters": _LLAMA3 | {"factor": factor}}
        for head_dim, factor in ((128, 8.0), (128, 32.0), (64, 32.0))  # Llama 3.1 and 3.3, 3.2
    ],
}

# Sizes of the models from which the rules are found, and of those that only check them.
FITTED = (
    {"vocab_size": 352, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
     "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 640},
    {"vocab_size": 416, "hidden_size": 128, "intermediate_size": 224, "num_hidden_layers": 3,
     "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 896},
    {"vocab_size": 480, "hidden_size": 240, "intermediate_size": 288, "num_hidden_layers": 5,
     "num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 1152,
     "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
)  # fmt: skip
CHECKS = (
    {"vocab_size": 544, "hidden_size": 168, "intermediate_size": 264, "num_hidden_layers": 12,
     "num_attention_heads": 14, "num_key_value_heads": 7, "max_position_embeddings": 1408},
)  # fmt: skip
DTYPES = ("BF16", "F16", "BF16", "F32")


class _Run(tracing._Run):
    """A trace that also records the operations of each target, and what the converter reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.record = Record()
        self.constants: list[tuple[str, str, torch.Tensor]] = []
        self.targets: list[tuple[str, str, Any]] = []
        self.vocabulary: list[str] = []

    def _places(self) -> Any:
        base, record, calls = self.base, self.record, self.vocabulary
        own_hparams = base.ModelBase.load_hparams

        def vocabulary(name: str, error: type[Exception] | None) -> Any:
            def called(*_: Any, **__: Any) -> None:
                calls.append(name)
                if error is not None:
                    raise error(name)

            return called

        own_open = Path.open

        @contextlib.contextmanager
        def model_card(path: Path) -> Iterator[Any]:
            record.read.add(rules.README)
            with own_open(path, encoding="utf-8") as file:
                text = Text.of(file.read(), rules.README, record)
            yield SimpleNamespace(read=lambda: text)

        def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path == self.folder / rules.README:
                return model_card(path)
            return own_open(path, *args, **kwargs)

        places = [
            (Path, "open", opened),
            (base.ModelBase, "load_hparams", lambda *a, **k: Config(own_hparams(*a, **k), record)),
            (self.gguf.Metadata, "set_gguf_meta_model", lambda *_: None),
        ]
        for name in [name for name in vars(base.TextModel) if name.startswith("_set_vocab_")]:
            is_file = name in ("_set_vocab_sentencepiece", "_set_vocab_llama_hf")
            error = FileNotFoundError if is_file else None
            places.append(
                (base.TextModel, name, vocabulary(name.removeprefix("_set_vocab_"), error))
            )
        return [*super()._places(), *places]

    def _write(self, file_type: str) -> None:
        hparams = self.base.ModelBase.load_hparams(self.folder, False)
        text = self.conversion.ModelType.TEXT
        model = self.conversion.get_model_class(
            self.conversion.get_model_architecture(hparams, text)
        )
        own = model.set_vocab

        def set_vocab(entered: Any) -> None:
            try:
                own(entered)
            except Exception:  # the folder lacks a tokenizer
                if self.vocabulary[-1:] != ["sentencepiece"]:
                    self.vocabulary.append("own")

        model.set_vocab = set_vocab
        super()._write(file_type)

    def _add_tensors(self, writer: Any) -> dict[str, str]:
        for name, info in writer.tensors[0].items():
            if symbol_in(info.tensor, self.array) is None:
                value = constant(name, info.tensor, info.dtype.name, self.numpy)
                self.constants.append((name, info.dtype.name, value))
        return super()._add_tensors(writer)

    def _typed(self, name: str, symbol: ConverterSymbol, info: Any) -> torch.Tensor:
        self.targets.append((name, info.dtype.name, tree(symbol)))
        return super()._typed(name, symbol, info)


def tree(value: Any) -> Any:
    """Return the operations of a symbol as plain data, without casts and copies."""
    if isinstance(value, ConverterSymbol):
        if value.call is None:
            return {"name": value.source}
        func, args, kwargs = value.call
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "clone"):
            return tree(args[0])
        if kwargs:
            raise UnexplainedError(f"{name} with {sorted(kwargs)}")
        name = "reshape" if name in ("view", "_unsafe_view") else name
        call = {"call": name, "arguments": [tree(each) for each in args]}
        return call if value.place is None else call | {"place": value.place}
    if isinstance(value, torch.Tensor):
        return {"indices": value.tolist()}
    if isinstance(value, list | tuple):
        return {"list": [tree(each) for each in value]}
    return value


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the networks, with options, and with fields that are the same for all models."""

    network: str
    options: dict[str, Any]
    fixed: dict[str, Any]


# --- models ---------------------------------------------------------------------------------------


def resized(value: Any, variant: int) -> Any:
    """Return a size for one of the models; small numbers are the same for all."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 4
    return value // 2 * (2 + variant) if is_size else value


def make(case: Case, variant: int, folder: Path) -> None:
    """Write a model without weights: its config and the header of its checkpoint."""
    network = networks.NETWORKS[case.network]
    kind = getattr(transformers, network.config)
    default = kind()
    sizes = {
        kind.attribute_map.get(key, key): value
        for key, value in (*FITTED, *CHECKS)[variant].items()
        if hasattr(default, key)
    }
    own = {key: resized(value, variant) for key, value in network.options.items()}
    if network.options.get("num_key_value_heads") == networks.COMMON["num_attention_heads"]:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    options = own | sizes | case.fixed
    options.pop("layer_types", None)
    kept = (set(options) | SHAPES) - COUNTS
    options |= case.options
    config = kind(**options)
    with skeleton():
        model = getattr(transformers, network.model).from_config(config)
    saved = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {key: value for key, value in model.state_dict().items() if key in saved}
    state = core_model_loading.revert_weight_conversion(model, state)
    head = model.state_dict().get("lm_head.weight")
    if variant == len(FITTED) - 1 and head is not None and case.network != "cohere":
        state["lm_head.weight"] = head  # although it is tied; Cohere's class rejects it
    with torch.device("meta"):  # older checkpoints have these tensors, which the converter drops
        for key in [key for key in state if key.endswith(".self_attn.q_proj.weight")]:
            prefix = key.removesuffix("q_proj.weight")
            state[f"{prefix}rotary_emb.inv_freq"] = torch.empty(8)
    folder.mkdir()
    (folder / rules.README).write_text(f"model {variant}")
    (folder / "tokenizer.json").write_text("{}")  # which published models have
    write_header(state, folder / "model.safetensors")
    fields = config.to_dict() | {"architectures": [type(model).__name__]} | network.saved
    fields = perturbed(fields, kept, variant) | case.fixed
    (folder / "config.json").write_text(json.dumps(fields))
    if variant:
        text = json.dumps({"add_prefix_space": variant == 1})
        (folder / "tokenizer_config.json").write_text(text)


def perturbed(fields: dict[str, Any], kept: set[str], variant: int) -> dict[str, Any]:
    """Change all numbers that do not decide shapes, so that each model has different ones."""
    result: dict[str, Any] = {}
    for index, (key, value) in enumerate(sorted(fields.items())):
        if isinstance(value, dict):
            value = perturbed(value, kept, variant)
        elif key not in kept and type(value) is float:
            value = value * (1 + (0.125 + index / 1024) * variant)
        elif key in COUNTS and type(value) is int:
            value = value + variant
        elif key not in kept and type(value) is int:
            value = value + variant * (3 + index)
        result[key] = value
    return result


# Numbers that decide the shapes or the number of tensors.
SHAPES = {
    "num_local_experts", "num_experts", "n_routed_experts", "num_nextn_predict_layers", "n_layer",
    "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "num_hidden_layers",
    "n_head", "head_dim", "chunk_size_feed_forward", "type_vocab_size",
}  # fmt: skip
# Numbers that the networks set, but that decide no shape.
COUNTS = {
    "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
    "moe_k", "moe_num_shared_experts",
}  # fmt: skip


def sample(case: Case, variant: int, folder: Path, converter: Converter) -> Sample:
    make(case, variant, folder)
    dtype = DTYPES[variant]
    traced, run = run_converter(folder, dtype, converter)
    return Sample(
        dtype,
        rules.config_fields(folder),
        traced,
        run.record,
        run.targets,
        run.constants,
        run.vocabulary,
    )


def run_converter(
    folder: Path, dtype: str, converter: Converter
) -> tuple[tracing.GgufTraced, _Run]:
    catalog = open_catalog(folder, allow_links=False)
    with converter.entered(), torch.no_grad():
        run = _Run(folder, catalog, converter, 0)
        try:
            return run.done(dtype), run
        finally:
            run.weights.close()


def trace(case: Case, converter: Converter) -> tuple[str, dict[str, Any]]:
    """Return an architecture and its rules."""
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        samples = [
            sample(case, variant, Path(folder, str(variant)), converter)
            for variant in range(len(FITTED) + len(CHECKS))
        ]
        found = architecture_rules(samples[: len(FITTED)])
        found["drops_layers"] = drops_layers(Path(folder, "0"), samples[0], converter)
        found["file_types"] = {
            each.dtype: entry.value
            for each in samples
            for entry in each.traced.metadata
            if entry.key == "general.file_type"
        }
        for each in samples:
            require_same(found, each)
    return samples[0].traced.architecture, found


def drops_layers(folder: Path, each: Sample, converter: Converter) -> bool:
    """Return whether the converter drops layers beyond the config's number, or else rejects them.

    Published checkpoints may have such layers, for the prediction of several tokens.
    """
    shapes = {name: tensor.shape for name, tensor in each.traced.catalog.tensors.items()}
    last = FITTED[0]["num_hidden_layers"] - 1
    for name in list(shapes):
        numbers = rules.form_of(name)[1]
        if numbers[:1] == (str(last),):
            shapes[name.replace(f".{last}.", f".{last + 1}.", 1)] = shapes[name]
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
    write_header(state, folder / "model.safetensors")
    try:
        traced = run_converter(folder, "F32", converter)[0]
    except Error:
        return False
    if traced.recipes.targets() != [
        (name, shape, "F32") for name, shape, _ in each.traced.recipes.targets()
    ]:
        raise UnexplainedError("the converter writes layers beyond the config's number")
    return True


def trace_all(folder: str, names: Sequence[str] = ARCHITECTURES) -> dict[str, Any]:
    """Return the contents of ``rules.json``."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)  # of the converter
    converter = converter_at(folder)
    architectures: dict[str, list[Any]] = {}
    for name in names:
        for case in cases(name):
            try:
                architecture, found = trace(case, converter)
            except (Error, UnexplainedError) as reason:
                print(f"{case}: left out: {reason}", file=sys.stderr)
            else:
                architectures.setdefault(architecture, []).append(found)
    return {
        "llama.cpp": f"llama-cpp-python {RELEASE}, {converter.version()}",
        "transformers": transformers.__version__,
        "pre": pre_tokenizers(converter),
        "architectures": architectures,
    }


def cases(name: str) -> list[Case]:
    options = [Case(name, each, {}) for each in ({}, *OPTIONS.get(name, ()))]
    return options + [Case(name, {}, each) for each in FIXED.get(name, ())]


def pre_tokenizers(converter: Converter) -> dict[str, Any]:
    """Return the text that the converter encodes, and its names by the digest of the tokens."""
    record, text = Record(), []
    with converter.entered():
        base = converter.module("conversion.base")

        def name_of(digest: str) -> Any:
            hashed = SimpleNamespace(hexdigest=lambda: Text.of(digest, "digest", record))
            places = [(base, "sha256", lambda _: hashed)]
            tokenizer = SimpleNamespace(encode=lambda given: text.append(given) or [])
            with tracing._replaced(places), contextlib.suppress(NotImplementedError):
                return base.TextModel.get_vocab_base_pre(None, tokenizer)

        name_of("")
        digests = sorted(row[2] for row in record.comparisons)
        names = {digest: name_of(digest) for digest in digests}
    return {"text": text[0], "names": names}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def text_of(traced: dict[str, Any]) -> str:
    """Return the text of ``rules.json``, with a line for each list of rules."""
    rows = (
        f"{json.dumps(name)}: [\n" + ",\n".join(compact(each) for each in found) + "\n]"
        for name, found in traced["architectures"].items()
    )
    head = json.dumps({key: value for key, value in traced.items() if key != "architectures"})
    return head[:-1] + ', "architectures": {\n' + ",\n".join(rows) + "\n}}\n"


if __name__ == "__main__":
    traced = trace_all(sys.argv[1], sys.argv[2:] or ARCHITECTURES)
    if len(sys.argv) == 2:
        rules.FILE.write_text(text_of(traced))
    for name, found in traced["architectures"].items():
        print(name, [len(each["tensors"]) for each in found])
