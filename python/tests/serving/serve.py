"""Serves a folder once, and writes what the model holds and says as JSON: run by the tests."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any


def held(model: Any) -> dict[str, str]:
    """Digests of all parameters and buffers."""
    import torch

    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: hashlib.sha256(
            each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, each in state.items()
        if each.numel()
    }


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import base_loader

    loaded: dict[str, str] = {}
    process = base_loader.process_weights_after_loading

    def noting(model: Any, *args: Any) -> Any:
        loaded.update(held(model))  # what comes next packs weights for this machine's kernels
        return process(model, *args)

    base_loader.process_weights_after_loading = noting
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        **options,
    )
    prompt: Any = {"prompt_token_ids": [1, 5, 9, 33]}
    how = SamplingParams(temperature=0, max_tokens=8, detokenize=False, logprobs=5)
    said = llm.generate([prompt], how)[0].outputs[0]
    logprobs = [
        {str(token): each.logprob for token, each in step.items()} for step in said.logprobs or []
    ]
    print(
        "RESULT",
        json.dumps(
            {
                "tokens": list(said.token_ids),
                "logprobs": logprobs,
                "held": loaded,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
