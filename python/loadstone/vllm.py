"""vLLM: ``--load-format loadstone``.

>>> llm = vllm.LLM("folder", load_format="loadstone")

vLLM finds :func:`register` by itself, as the entry point ``loadstone`` of ``vllm.general_plugins``,
in each of its processes. Nothing changes where the format is not asked for. See docs/vllm.md.
"""

from __future__ import annotations

FORMAT = "loadstone"


def register() -> None:
    """Tells vLLM of the load format. Does nothing the second time.

    Raises:
        Error: ``plan.options``: vLLM is another one than those that were tried.
    """
    from vllm.model_executor import model_loader

    from loadstone._sites.vllm import require

    if FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return
    require()
    from loadstone._vllm.loader import LoadstoneLoader

    model_loader.register_model_loader(FORMAT)(LoadstoneLoader)
