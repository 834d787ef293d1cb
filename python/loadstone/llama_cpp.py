"""llama.cpp: the tensors, keys and tokenizer of a GGUF file, from llama.cpp's own converter.

>>> traced = loadstone.llama_cpp.trace("model/", converter="llama.cpp/")
>>> loadstone.convert(traced.catalog, "model.safetensors", rules=traced)

The Python code of ``convert_hf_to_gguf.py`` runs on tensors without data. loadstone records their
names, permutations, stacking and types, and every key that the script writes, including the
vocabulary. Without a converter, ``trace`` uses rules that were traced for many architectures. See
``docs/how-to/gguf-models.md``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from loadstone._adapters.llama_cpp.converter import converter_at, installed_converter
from loadstone._adapters.llama_cpp.metadata import MetadataEntry as MetadataEntry
from loadstone._adapters.llama_cpp.model_folder import is_model_folder
from loadstone._adapters.llama_cpp.rules import apply_rules
from loadstone._adapters.llama_cpp.tracing import GgufTraced as GgufTraced
from loadstone._adapters.llama_cpp.tracing import require_no_code, trace_model
from loadstone._base.errors import new_error
from loadstone._files.catalog import open_catalog

__all__ = ["GgufTraced", "MetadataEntry", "save_recipes", "trace"]


def trace(
    model_folder: str | os.PathLike[str],
    *,
    converter: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    computed_bytes_max: int = 0,
    trust_code: bool = False,
    allow_links: bool = False,
) -> GgufTraced:
    """Return recipes and metadata of the GGUF file that llama.cpp's converter would write.

    Reads headers, configs and tokenizer files, and only as many weights as ``computed_bytes_max``
    allows.

    Args:
        model_folder: a model in Hugging Face's layout: ``config.json``, safetensors, tokenizer.
        converter: a checkout of llama.cpp, or the unpacked source package of llama-cpp-python.
            ``None``: the folder of ``sys.path`` that has ``conversion/base.py``, or else the rules
            that loadstone has for the architecture.
        dtype: dtype of the matrices, like the script's ``--outtype``: float32, float16 or bfloat16.
            ``None``: the first 16-bit dtype that the checkpoint has, else float16.
        computed_bytes_max: total bytes of tensors that may be read. The converter computes with
            some small tensors (it adds 1 to Gemma's norms). The results become constants, so the
            recipes then fit only this checkpoint. 0: reject such a model.
        trust_code: let the converter run Python code that the folder's configs name.
        allow_links: see :func:`loadstone.inspect`.

    Returns:
        Recipes for :func:`loadstone.convert`, in the order of the file, with ``architecture``,
        ``metadata`` and ``catalog``.

    Raises:
        OptionError: ``plan.options``: the converter or a package that it needs is missing or
            unsupported, and loadstone has no rules for the model; the folder's tokenizer is code.
        PlanError: the converter does not know the model (``plan.conversion``), or uses an operation
            that no recipe can express (``plan.untraceable``, ``plan.data_dependent``,
            ``plan.encoding``).

    Thread safety: any thread may call this; one trace runs at a time.
    """
    folder = Path(os.fsdecode(model_folder)).absolute()
    if not is_model_folder(folder):
        message = "llama.cpp's converter requires a folder with a language model's config.json"
        raise new_error("plan.options", message, path=str(folder), field="model_folder")
    entered = installed_converter() if converter is None else converter_at(converter)
    if not trust_code:
        require_no_code(folder)
    catalog = open_catalog(folder, allow_links=allow_links)
    if entered is None:
        return apply_rules(folder, catalog, dtype)
    return trace_model(folder, catalog, entered, dtype, computed_bytes_max)


def save_recipes(
    model_folder: str | os.PathLike[str],
    name: str | os.PathLike[str],
    *,
    converter: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    computed_bytes_max: int = 0,
    trust_code: bool = False,
    allow_links: bool = False,
) -> tuple[Path, Path]:
    """Save the two files with which ``loadstone convert`` writes the GGUF file without Python.

    >>> loadstone.llama_cpp.save_recipes("model/", "model", converter="llama.cpp/")

    Args:
        name: the path without suffixes: ``NAME.recipes.json`` has names of tensors, and no values
            except small constants; ``NAME.metadata.json`` has keys, values and the vocabulary.
        model_folder, converter, dtype, computed_bytes_max, trust_code, allow_links: see
            :func:`trace`.

    Returns:
        The paths of both files.

    Raises:
        OptionError, PlanError: see :func:`trace`.
    """
    traced = trace(
        model_folder,
        converter=converter,
        dtype=dtype,
        computed_bytes_max=computed_bytes_max,
        trust_code=trust_code,
        allow_links=allow_links,
    )
    return traced.save(name)
