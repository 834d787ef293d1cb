"""One run of llama.cpp's converter on tensors without data."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loadstone._adapters.llama_cpp.arrays import PLAIN, array_class, constant, symbol_in
from loadstone._adapters.llama_cpp.converter import Converter, needs
from loadstone._adapters.llama_cpp.files import Files
from loadstone._adapters.llama_cpp.metadata import FORMAT, MetadataEntry, entries_of, to_json
from loadstone._adapters.llama_cpp.weights import ConverterSymbol, Quantized, Weights
from loadstone._base.dtypes import dtype_argument, dtype_name
from loadstone._base.errors import Error, new_error
from loadstone._base.text import write_text
from loadstone._files.catalog import Catalog
from loadstone._files.gguf_metadata import Metadata, metadata_text
from loadstone._plan.recipes import LibraryRecipes

# ``gguf`` file types by dtype; GUESSED lets the converter infer the type.
_FILE_TYPES = {"": "GUESSED", "F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}


@dataclass
class GgufTraced(LibraryRecipes):
    """The recipes of a GGUF file's tensors, in file order, and the file's keys and values.

    Attributes:
        catalog: the checkpoint that was traced.
        architecture: the name of the model's class in ``config.json``.
        metadata: keys and values, in file order.
        unused: tensors of the checkpoint that no output uses.
        decodes: whether the caller chose a dtype and the checkpoint is quantized, so that no codes
            stay in the file.
    """

    catalog: Catalog = field(kw_only=True)
    architecture: str = field(kw_only=True)
    metadata: tuple[MetadataEntry, ...] = field(kw_only=True)
    unused: tuple[str, ...] = field(kw_only=True)
    decodes: bool = field(kw_only=True)

    def recipes_json(self) -> str:
        """Return the text of ``NAME.recipes.json``."""
        text: str = self.recipes.to_json(self.catalog._core)
        return text

    def metadata_json(self) -> str:
        """Return the text of ``NAME.metadata.json``."""
        return to_json(self.metadata)

    def save(self, name: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write both files; see :func:`loadstone.llama_cpp.save_recipes`."""
        recipes = Path(f"{os.fsdecode(name)}.recipes.json")
        metadata = Path(f"{os.fsdecode(name)}.metadata.json")
        write_text(recipes, self.recipes_json())
        write_text(metadata, self.metadata_json())
        return recipes, metadata

    def metadata_with(self, additions: Metadata | None) -> dict[str, Any]:
        """Return the keys for :func:`loadstone.convert`; ``additions`` adds or replaces keys."""
        entries = [entry.to_json() for entry in self.metadata]
        plain: dict[str, Any] = {}
        if additions is not None:
            try:
                given = json.loads(metadata_text(additions))
                is_typed = given.get("format") == FORMAT
                entries += given["entries"] if is_typed else []
                plain = {} if is_typed else given
            except (ValueError, TypeError, KeyError, AttributeError):
                message = "the metadata is invalid; docs/formats/gguf.md describes it"
                raise new_error("plan.options", message, field="metadata") from None
        return {entry.pop("key"): entry for entry in entries} | plain


def trace_model(
    folder: Path, catalog: Catalog, converter: Converter, dtype: Any, computed_bytes_max: int
) -> GgufTraced:
    """Run the converter for one model; see :func:`loadstone.llama_cpp.trace`."""
    wanted = file_dtype(dtype)
    with converter.entered(), torch.no_grad():
        run = _Run(folder, catalog, converter, computed_bytes_max)
        try:
            return run.done(wanted)
        finally:
            run.weights.close()


def file_dtype(dtype: Any) -> str:
    """Return the dtype of the matrices; "" for that of the checkpoint."""
    wanted = "" if dtype is None else dtype_argument(dtype)
    if wanted not in _FILE_TYPES:
        expected = "float32, float16, bfloat16, or None for the checkpoint's"
        message = "llama.cpp's converter does not support this dtype"
        raise new_error("plan.dtype", message, field="dtype", found=wanted, expected=expected)
    return wanted


def decodes_codes(quantized: Quantized, dtype: str) -> bool:
    """Return whether the caller's dtype ("" for none) leaves no codes in the file."""
    return bool(dtype and quantized.readable)


class _Run:
    """One trace, while the converter's modules are imported."""

    def __init__(
        self, folder: Path, catalog: Catalog, converter: Converter, computed_bytes_max: int
    ) -> None:
        self.folder = folder
        self.catalog = catalog
        self.converter = converter
        self.conversion = converter.module("conversion")
        self.base = converter.module("conversion.base")
        self.gguf = converter.module("gguf")
        self.numpy: Any = importlib.import_module("numpy")
        self.array = array_class(self.gguf, self.numpy)
        self.weights = Weights(catalog, computed_bytes_max, self.array.of)
        self.files = Files(catalog, self.weights)
        self.architecture = ""
        self.writers: list[Any] = []

    def done(self, dtype: str) -> GgufTraced:
        with self._errors(), _replaced(self._places()):
            self._write(_FILE_TYPES[dtype])
            if self.weights.trace.refused:  # including errors that the converter caught
                raise self.weights.trace.refused[0]
            writer = self._writer()
            dtypes = self._add_tensors(writer)
            constants = self.converter.module("gguf.constants")
            metadata = entries_of(writer.kv_data[0].items(), constants.GGUFValueType.get_type)
        recipes = self.weights.trace.finish()
        recipes.note_values(self.catalog._core, self.weights.computed_from())
        return GgufTraced(
            recipes,
            dtypes,
            catalog=self.catalog,
            architecture=self.architecture,
            metadata=metadata,
            unused=self.weights.unused(),
            decodes=decodes_codes(self.weights.quantized, dtype),
        )

    def _write(self, file_type: str) -> None:
        hparams = self.base.ModelBase.load_hparams(self.folder, False)
        text = self.conversion.ModelType.TEXT
        self.architecture = self.conversion.get_model_architecture(hparams, text)
        model_class = self.conversion.get_model_class(self.architecture)
        options = {}
        if self.weights.quantized.readable:  # the converter sees decoded values instead
            options["hparams"] = {
                key: value for key, value in hparams.items() if key != "quantization_config"
            }
        kind = getattr(self.gguf.LlamaFileType, file_type)
        model_class(self.folder, kind, Path("model.gguf"), **options).write()

    def _places(self) -> list[tuple[Any, str, Any]]:
        """Return replacements for the converter's functions that read or write files."""
        base, writer = self.base, self.gguf.GGUFWriter
        prepare = base.ModelBase.prepare_metadata

        def note(gguf_writer: Any, path: Any = None) -> None:
            self.writers.append(gguf_writer)

        def prepare_plain(model: Any, vocab_only: bool) -> Any:
            if self.weights.quantized.readable:  # the output file is not quantized
                model._is_nvfp4 = model._is_mxfp4 = False
            return prepare(model, vocab_only)

        return [
            (self.converter.module("gguf.utility"), "SafetensorsLocal", self.files.reader()),
            (base.LazyTorchTensor, "from_local_tensor", lambda tensor: tensor.symbol()),
            (base.ModelBase, "prepare_metadata", prepare_plain),
            (writer, "write_header_to_file", note),
            (writer, "write_kv_data_to_file", lambda _: None),
            (writer, "write_tensors_to_file", lambda _, progress=False: None),
        ]

    def _writer(self) -> Any:
        if len(self.writers) == 1 and len(self.writers[0].tensors) == 1:
            return self.writers[0]
        raise new_error(
            "plan.conversion",
            "llama.cpp's converter must write one file",
            found=f"{len(self.writers)} files",
            expected="one file",
        )

    def _add_tensors(self, writer: Any) -> dict[str, str]:
        dtypes: dict[str, str] = {}
        trace = self.weights.trace
        for name, info in writer.tensors[0].items():
            symbol = symbol_in(info.tensor, self.array)
            if symbol is None:
                value = constant(name, info.tensor, info.dtype.name, self.numpy)
            else:
                value = self._typed(name, symbol, info)
                self.weights.use(symbol)
            trace.add(name, value)
            dtypes[name] = dtype_name(value.dtype)
        return dtypes

    def _typed(self, name: str, symbol: ConverterSymbol, info: Any) -> torch.Tensor:
        encoding = info.dtype.name
        if encoding in PLAIN and tuple(info.shape) == tuple(symbol.shape):
            return symbol.to(PLAIN[encoding])
        raise new_error(
            "plan.encoding",
            "llama.cpp's converter needs this tensor in blocks, which no recipe can express",
            tensor=name,
            found=f"{encoding} {list(info.shape)}",
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Error as error:
            if error.code not in ("plan.untraceable", "plan.data_dependent"):
                raise
            message = f"{self.architecture}: {error.message}"
            raise new_error(error.code, message, tensor=error.tensor, found=error.found) from error
        except ImportError as reason:
            raise needs(reason, self.converter.folder) from reason
        except Exception as reason:
            model = self.architecture or self.folder.name
            text = f"{type(reason).__name__}: {reason}".removesuffix(": ")
            message = (
                f"llama.cpp's converter fails for {model}: {text} ({self._locate_error(reason)})"
            )
            raise new_error("plan.conversion", message, path=str(self.folder)) from reason

    def _locate_error(self, reason: Exception) -> str:
        """Return the line of the converter's own code that is innermost in a traceback."""
        folder = self.converter.folder
        for frame in reversed(traceback.extract_tb(reason.__traceback__)):
            if Path(frame.filename).is_relative_to(folder):
                return f"{Path(frame.filename).relative_to(folder)}:{frame.lineno}"
        return "outside its own code"


@contextlib.contextmanager
def _replaced(places: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace attributes of the converter's modules, which no other code uses, during a trace."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
    try:
        for owner, name, replacement in places:
            is_bound = isinstance(vars(owner)[name], classmethod | staticmethod)
            setattr(owner, name, staticmethod(replacement) if is_bound else replacement)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def require_no_code(folder: Path) -> None:
    """Reject (``plan.options``) a tokenizer with Python code, which the converter would execute."""
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_bytes())
        except ValueError:
            continue  # the code that needs the file reports the error
        named = config.get("auto_map") if isinstance(config, dict) else None
        code = named.get("AutoTokenizer") if isinstance(named, dict) else named
        if code:
            raise new_error(
                "plan.options",
                "llama.cpp's converter would run the tokenizer's own Python code, which this file "
                "names; pass trust_code=True if you trust it",
                path=str(path),
                field="trust_code",
                found=json.dumps(code)[:80],
            )
