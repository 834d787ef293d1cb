"""Serves a folder once with vLLM, and prints the model's tensors and output as JSON.

test_serving.py runs this file as a program.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Environment variable with the folder for results. vLLM's workers are separate processes, which
# import this file and read the variable.
NOTES = "LOADSTONE_TEST_NOTES"


def digests(model: Any) -> dict[str, str]:
    import torch

    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: hashlib.sha256(
            each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, each in state.items()
        if each.numel()
    }


def resident(key: str) -> int:
    """Return this process's memory in bytes: current (``VmRSS``) or peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def note(folder: Path) -> None:
    """Patch vLLM so that each loaded model writes its digests and costs to a file in the folder."""
    import torch
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import base_loader, default_loader, get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    taken: dict[str, float] = {}
    models = itertools.count()  # 0 for the target model, 1 for the drafter, which loads later
    process = base_loader.process_weights_after_loading

    def noting(model: Any, *args: Any) -> Any:
        rank = torch.distributed.get_rank()
        held = {} if "VLLM_NO_DIGESTS" in os.environ else digests(model)
        size = sum(each.nbytes for each in model.parameters())
        found = {"held": held, "parameter_bytes": size, **taken}
        (folder / f"{next(models)}-{rank}.json").write_text(json.dumps(found))
        return process(model, *args)  # packs weights for this machine's kernels

    def measured(load: Any) -> Any:
        def measuring(self: Any, model: Any, config: Any) -> None:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
            before, begin = resident("VmRSS"), time.perf_counter()
            load(self, model, config)
            taken.update(seconds=time.perf_counter() - begin, peak_bytes=resident("VmHWM") - before)

        return measuring

    base_loader.process_weights_after_loading = noting
    for kind in (
        default_loader.DefaultModelLoader,
        type(get_model_loader(LoadConfig(load_format="loadstone"))),
    ):
        kind.load_weights = measured(vars(kind)["load_weights"])


def with_image() -> dict[str, Any]:
    """Return a prompt with an image, in the vocabulary of :mod:`image_models`."""
    import image_models
    import numpy as np
    from PIL import Image

    sides = (image_models.IMAGE_SIZE, image_models.IMAGE_SIZE, 3)
    pixels = np.random.default_rng(0).integers(0, 255, sides, dtype=np.uint8)
    image = Image.fromarray(pixels)
    return {"prompt": image_models.PROMPT, "multi_modal_data": {"image": image}}


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    has_image = options.pop("has_image", False)
    reload = options.pop("reload", None)
    from vllm import LLM, SamplingParams

    generated: Any = None
    error = None
    with tempfile.TemporaryDirectory() as notes:
        os.environ[NOTES] = notes
        note(Path(notes))
        try:
            llm = LLM(
                folder,
                skip_tokenizer_init=not has_image,
                enforce_eager=True,
                max_model_len=64,
                dtype="bfloat16",
                **options,
            )
            if reload:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
            prompt = with_image() if has_image else {"prompt_token_ids": [1, 5, 9, 33]}
            how = SamplingParams(temperature=0, max_tokens=8, detokenize=False, logprobs=5)
            generated = llm.generate([prompt], how)[0].outputs[0]
        except Exception as reason:  # steps after loading may need kernels that this machine lacks
            error = reason
        ranks = [json.loads(path.read_text()) for path in sorted(Path(notes).iterdir())]
    result: dict[str, Any] = {"held": [each.pop("held") for each in ranks], "taken": ranks}
    if generated is not None:
        result["tokens"] = list(generated.token_ids)
        result["logprobs"] = [
            {str(token): each.logprob for token, each in step.items()}
            for step in generated.logprobs or []
        ]
    if ranks:
        print("RESULT", json.dumps(result), flush=True)
    if error is not None:
        raise error


if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
elif NOTES in os.environ:
    note(Path(os.environ[NOTES]))
