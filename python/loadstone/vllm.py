"""vLLM: the load format ``--load-format loadstone``.

>>> llm = vllm.LLM("folder", load_format="loadstone")

vLLM finds :func:`register` in each of its processes, as the entry point ``loadstone`` of
``vllm.general_plugins``. With other load formats, vLLM then rejects layers for codes that only
loadstone makes; nothing else changes. See docs/how-to/vllm.md.
"""

from __future__ import annotations

import logging

from loadstone._adapters.sites.vllm import SITES

__all__ = ["register"]

FORMAT = "loadstone"


def register() -> None:
    """Register the load format with vLLM. A second call does nothing.

    If this release of vLLM is unsupported, log a warning with the missing parts and do not
    register; vLLM then rejects the format if it is requested.
    """
    if SITES.lacking():
        logging.getLogger("vllm.loadstone").warning("%s", SITES.refusal())
        return
    from vllm.model_executor import model_loader

    if FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.transformers_utils.config import register_config_parser

    from loadstone._adapters.serving.vllm.config import (
        LoadstoneConfigParser,
        refusing_other_loaders,
    )
    from loadstone._adapters.serving.vllm.loader import LoadstoneLoader

    model_loader.register_model_loader(FORMAT)(LoadstoneLoader)
    register_config_parser(FORMAT)(LoadstoneConfigParser)
    BaseModelLoader.load_model = refusing_other_loaders(BaseModelLoader.load_model)
