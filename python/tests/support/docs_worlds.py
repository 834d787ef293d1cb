"""Writes the files that the pages of docs/ use, as tiny random models under the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from merge_models import write_peft
from safetensors.torch import load_file, save_file
from transformers_models import randomise_all


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Give the model random values, and write a folder for ``from_pretrained``."""
    randomise_all(model, 0).to(dtype).save_pretrained(folder)
    return folder


def llama(folder: Path, **changes: Any) -> Path:
    """Write a Llama with two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        eos_token_id=None, pad_token_id=None,
        **{"num_key_value_heads": 2, "vocab_size": 256} | changes,
    )  # fmt: skip
    return save(LlamaForCausalLM(config), folder)


def qwen_moe(folder: Path, **changes: Any) -> Path:
    """Write a Qwen3-MoE with two layers of four experts each, stored separately."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, head_dim=64, num_experts=4,
        num_experts_per_tok=2, vocab_size=256, eos_token_id=None, pad_token_id=None,
        **{"num_key_value_heads": 2} | changes,
    )  # fmt: skip
    return save(Qwen3MoeForCausalLM(config), folder)


def adapter(folder: Path, seed: int = 1) -> Path:
    """Write peft's LoRA adapter of rank 4 for q_proj and v_proj of :func:`llama`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            module = f"model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (4, 256), "lora_B": (rows, 4)}
            for part, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{module}.{part}"] = values
    return write_peft(folder, tensors, r=4)


def wan(folder: Path) -> Path:
    """Write a tiny Wan in the original names, wan2.2-Q4_K_M.gguf, and its config."""
    from diffusers_gguf import BLOCK_CASES, mixed, packed
    from diffusers_models import write_config

    case = BLOCK_CASES[0]
    model = case.build()
    packed(case.original(model), mixed).write(folder / "wan2.2-Q4_K_M.gguf", "wan")
    save_file(case.original(model, torch.bfloat16), folder / "wan2.2.safetensors")
    write_config(model, folder / "folder" / "transformer")
    return folder


def wan_lora(folder: Path) -> Path:
    """Write diffusers' LoRA adapter of the model of :func:`wan`."""
    from diffusers_gguf import BLOCK_CASES
    from peft import LoraConfig

    model = BLOCK_CASES[0].build()
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
    model.save_lora_adapter(folder)
    return folder


def wan_transformer(folder: Path) -> Path:
    """Write only the config of :func:`wan`."""
    from diffusers_gguf import BLOCK_CASES
    from diffusers_models import write_config

    write_config(BLOCK_CASES[0].build(), folder)
    return folder


def wan_pipeline(folder: Path) -> Path:
    """Write a pipeline with the transformer of :func:`wan`, a T5 encoder and a VAE."""
    import diffusers
    import transformers
    from diffusers_gguf import BLOCK_CASES
    from diffusers_pipelines import tokenizer

    small = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    encoder = transformers.T5EncoderModel(transformers.T5Config(**small, num_heads=4))
    decoder = diffusers.AutoencoderKLWan(base_dim=16, z_dim=16)
    diffusers.WanPipeline(
        tokenizer=tokenizer(folder / "words"),
        text_encoder=randomise_all(encoder.eval(), 1).bfloat16(),
        vae=randomise_all(decoder.eval(), 2).bfloat16(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=BLOCK_CASES[0].build(dtype=torch.bfloat16),
    ).save_pretrained(folder)
    return folder


def stable_diffusion_xl(folder: Path) -> Path:
    """Write the file sdxl.safetensors with all components, and their configs in sdxl."""
    import diffusers_pipelines as tiny

    pipe = tiny.stable_diffusion_xl(folder / "sdxl")
    tiny.write(tiny.stable_diffusion_xl_keys(pipe), folder / "sdxl.safetensors")
    return folder


def of_bitsandbytes(folder: Path) -> Path:
    """Write :func:`llama` in nf4, as transformers saves it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    plain = llama(folder.with_name("plain"))
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    return folder


def wan_files(folder: Path) -> Path:
    """Write a tiny Wan in the original names, as two GGUF files, and its config."""
    from diffusers_gguf import BLOCK_CASES, mixed, packed
    from diffusers_models import write_config

    case = BLOCK_CASES[0]
    model = case.build()
    for name in ("wan-Q4_K_M.gguf", "wan-Q8_0.gguf"):
        packed(case.original(model), mixed).write(folder / name, "wan")
    write_config(model, folder / "folder" / "transformer")
    return folder


def language_model(folder: Path) -> Path:
    """Write a model under llama.cpp's names as safetensors and GGUF, with keys and an imatrix."""
    import imatrix_files
    import llama_quantize

    import loadstone

    source = llama_quantize.write_small(folder / "model.safetensors")
    keys = llama_quantize.write_keys(folder / "model.json", llama_quantize.METADATA)
    for dtype in ("f16", "bf16"):
        loadstone.convert(source, folder / f"{dtype}.gguf", metadata=keys, quantize=dtype)
    entries = imatrix_files.measured(llama_quantize.shapes())
    imatrix_files.WRITERS["gguf"](folder / "imatrix.gguf", entries)
    return folder


def gpt_oss(folder: Path) -> Path:
    """Write the experts of a layer as GPT-OSS does: in MXFP4, with interleaved gate and up."""
    folder.mkdir()
    prefix, experts, rows = "model.layers.0.mlp.experts", 4, 64
    tensors = {}
    for role, groups in (("gate_up_proj", 2), ("down_proj", 1)):
        blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
        scales = torch.randint(110, 135, (experts, rows, groups), dtype=torch.uint8)
        tensors[f"{prefix}.{role}_blocks"], tensors[f"{prefix}.{role}_scales"] = blocks, scales
        tensors[f"{prefix}.{role}_bias"] = torch.randn(experts, rows, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.randn(64, 64).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}', encoding="utf-8")
    return folder


def quantized_models(folder: Path) -> Path:
    """Write mixtures of experts: plain, and as DeepSeek, GPT-OSS and ModelOpt store them."""
    import json

    from codec_scaled import write_fp8_block

    import loadstone

    for name in ("model", "qwen3-moe"):
        qwen_moe(folder / name)
    write_fp8_block(folder / "deepseek")
    gpt_oss(folder / "gpt-oss")
    for name, encoding in (("modelopt", "fp8"), ("mxfp4", "mxfp4")):
        loadstone.convert(folder / "model", folder / name, quantize=encoding)
    rules = [{"op": "rename", "sources": ["(.*)"], "targets": ["net.$1"]}]
    (folder / "rules.json").write_text(json.dumps(rules), encoding="utf-8")
    return folder


def first_last_frame(folder: Path) -> Path:
    """Write a tiny Wan for first and last frames: a GGUF file, and its config."""
    from diffusers_gguf import FIRST_LAST_CASE, mixed, packed
    from diffusers_models import write_config

    model = FIRST_LAST_CASE.build()
    path = folder / "wan2.1-flf2v-Q4_K_M.gguf"
    packed(FIRST_LAST_CASE.original(model), mixed).write(path, "wan")
    write_config(model, folder / "Wan2.1-FLF2V" / "transformer")
    return folder


def wrapped(path: Path, prefix: str = "net.") -> Path:
    """Write a two-layer network with a prefix in its names, as a training script saves it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"encoder.0.weight": (32, 16), "encoder.0.bias": (32,), "encoder.2.weight": (8, 32),
              "encoder.2.bias": (8,)}  # fmt: skip
    save_file(
        {f"{prefix}{n}": torch.randn(s, generator=generator) for n, s in shapes.items()}, path
    )
    return path


def gguf(path: Path) -> Path:
    import gguf as writer_of
    import numpy as np

    writer = writer_of.GGUFWriter(path, "llama")
    for key, add in (("block_count", 1), ("context_length", 64), ("embedding_length", 256),
                     ("feed_forward_length", 256), ("head_count", 4)):  # fmt: skip
        getattr(writer, f"add_{key}")(add)
    random = np.random.default_rng(0)
    for name in ("token_embd", "output", "blk.0.attn_q", "blk.0.attn_v", "blk.0.ffn_down"):
        writer.add_tensor(f"{name}.weight", random.standard_normal((256, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_folder(folder: Path) -> Path:
    """Write a folder with only model.gguf, a Llama with all keys that transformers reads."""
    import gguf_models

    folder.mkdir()
    plain = gguf_models.make("llama", folder.with_name("plain"))
    gguf_models.write("llama", load_file(plain / "model.safetensors"), folder / "model.gguf")
    return folder


def skeleton_file(path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    import loadstone

    config = AutoConfig.from_pretrained(path.parent / "model")
    with loadstone.skeleton():
        model = AutoModelForCausalLM.from_config(config)
    loadstone.save_skeleton(model, path)
    return path


def quantized(folder: Path) -> Path:
    """Write :func:`llama` in ModelOpt's NVFP4."""
    import loadstone

    loadstone.convert(llama(folder.with_name("plain")), folder, quantize="nvfp4")
    return folder


def dcp(folder: Path) -> Path:
    """Write the tensors of :func:`wrapped` as a training state with optimizer; write rules.json."""
    import json

    import torch.distributed.checkpoint as distributed

    state = load_file(wrapped(folder.with_name("state.safetensors"), prefix=""))
    optimizer = {f"{name}.exp_avg": torch.zeros_like(each) for name, each in state.items()}
    distributed.save({"model": state, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    rules = [{"op": "rename", "sources": ["model\\.(.*)"], "targets": ["$1"]}]
    folder.with_name("rules.json").write_text(json.dumps(rules), encoding="utf-8")
    return folder


def kohya(folder: Path) -> Path:
    """Write one layer of a UNet, and a LoRA adapter for it and for a text encoder."""
    folder.mkdir()
    save_file({"mid.to_q.weight": torch.randn(64, 64)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}', encoding="utf-8")
    tensors = {}
    for module in ("lora_unet_mid_to_q", "lora_te_mlp_fc1"):
        tensors[f"{module}.lora_down.weight"] = torch.randn(4, 64)
        tensors[f"{module}.lora_up.weight"] = torch.randn(64, 4)
        tensors[f"{module}.alpha"] = torch.tensor(4.0)
    save_file(tensors, folder.with_name("style.safetensors"))
    return folder


@dataclass(frozen=True)
class World:
    """The files of a page; each function writes into the folder in which the page's code runs.

    Attributes:
        before: Python that must run before the page's code.
    """

    files: tuple[Callable[[Path], Any], ...]
    before: str = ""


def at(make: Callable[..., Any], *names: str, **options: Any) -> Callable[[Path], Any]:
    """Return a function that writes the same files under each of these names."""

    def make_all(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name, **options)

    return make_all


IMPORTS = "import torch, loadstone\nfrom transformers import AutoModelForCausalLM\n"
SKELETON = """
from transformers import AutoConfig
def skeleton_of(folder):
    with loadstone.skeleton():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
"""
ANY_MODULE = """
class MyModel(torch.nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
        )
config = None
"""
BLOCKS = """
class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
        self.out = torch.nn.Linear(256, 64)
from safetensors.torch import save_file
save_file(MyModel().state_dict(), "file.safetensors")
"""
OF_BITSANDBYTES = """
from transformers import AutoModelForCausalLM as Auto
model, another = (Auto.from_pretrained("quantized", device_map={"": "cpu"}) for _ in range(2))
"""
ADAPTERS = (at(adapter, "style"), at(adapter, "speed", seed=2))

# Sets the environment as torchrun does for a program with one rank.
ONE_RANK = """
import os, socket
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
"""
FSDP_ON_CPUS = """
import rank_accelerate
rank_accelerate.take_cpus_for_gpus()
"""

RECURRENT = """
class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(4, 4)
"""


def recurrent(folder: Path) -> None:
    state = {f"layer.{name}": value for name, value in torch.nn.LSTM(4, 4).state_dict().items()}
    save_file(state, folder / "recurrent.safetensors")


WORLDS = {
    "README.md": World(
        (
            at(llama, "folder"),
            at(wrapped, "checkpoint/model.safetensors", prefix=""),
            at(gguf, "model.gguf"),
            at(qwen_moe, "qwen3-moe"),
            at(llama, "base"),
            at(adapter, "style"),
        ),
        "import torch\n" + ANY_MODULE,
    ),
    "docs/adapters.md": World((at(llama, "folder"), wan_files, at(wan_transformer, "wan"))),
    "docs/accelerate.md": World(
        (at(llama, "checkpoint"),),
        IMPORTS
        + "from transformers import AutoConfig\nconfig = AutoConfig.from_pretrained('checkpoint')",
    ),
    "docs/audit.md": World(
        (at(llama, "step-1000", "step-2000", "step-3000"),),
        f"{IMPORTS}\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('step-1000')",
    ),
    "docs/how-to/modelopt.md": World(
        (at(llama, "folder"),), f"{IMPORTS}\nfrom transformers import AutoModelForCausalLM\n"
    ),
    "docs/lossless.md": World((at(gpt_oss, "gpt-oss"),)),
    "docs/check.md": World((at(llama, "out"),)),
    "docs/opens-where.md": World((at(llama, "model"),), IMPORTS),
    "docs/how-to/bitsandbytes.md": World(
        (at(llama, "llama"), at(of_bitsandbytes, "quantized"), at(wan_pipeline, "wan")),
        "import torch" + BLOCKS + OF_BITSANDBYTES,
    ),
    "docs/diffusers.md": World(
        (wan, at(wan_pipeline, "folder"), stable_diffusion_xl, at(wan_lora, "lora"))
    ),
    "docs/convert.md": World((wan_files,)),
    "docs/install.md": World(()),
    "docs/open.md": World((at(llama, "checkpoint"),)),
    "docs/patch.md": World((at(llama, "folder"),), IMPORTS),
    "docs/skeleton.md": World((recurrent,), IMPORTS + RECURRENT),
    "docs/plan-page.md": World((at(llama, "model"), at(skeleton_file, "model.json"))),
    "docs/how-to/before-a-600-gb-job.md": World((at(llama, "model"),)),
    "docs/how-to/convert.md": World((wan_files, language_model, quantized_models)),
    "docs/how-to/gpus.md": World((at(llama, "llama"),)),
    "docs/how-to/is-my-file-sound.md": World((at(llama, "llama", "llama-copy"),)),
    "docs/how-to/names-do-not-match.md": World((at(wrapped, "checkpoint.safetensors"),)),
    "docs/how-to/out-of-memory.md": World((at(llama, "llama"),)),
    "docs/how-to/ranks.md": World((at(qwen_moe, "qwen3-moe"),), ONE_RANK + FSDP_ON_CPUS),
    "docs/receipt.md": World(
        (at(llama, "SOURCE"), at(wrapped, "checkpoint/model.safetensors", prefix="")),
        IMPORTS + ANY_MODULE + "with loadstone.skeleton():\n    model = MyModel()",
    ),
    "docs/formats/dcp.md": World(
        (at(dcp, "checkpoint-1000"),),
        IMPORTS + ANY_MODULE + "with loadstone.skeleton():\n    model = MyModel()",
    ),
    "docs/merge.md": World(
        (at(llama, "base", "a", "b"), at(adapter, "adapter"), *ADAPTERS, at(kohya, "unet")),
        f"{IMPORTS}\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('base')",
    ),
    "docs/tutorials/bitsandbytes.md": World((at(llama, "llama"),)),
    "docs/tutorials/diffusers.md": World((wan,)),
    "docs/tutorials/merge.md": World((at(llama, "llama"), *ADAPTERS)),
    "docs/tutorials/pytorch.md": World(()),
    "docs/tutorials/quantize.md": World((at(qwen_moe, "Qwen3-30B-A3B"),)),
    "docs/tutorials/serving.md": World((at(llama, "llama"), at(gguf, "model.gguf"))),
    "docs/tutorials/transformers-moe.md": World((at(qwen_moe, "Qwen3-30B-A3B"),)),
    "docs/transformers.md": World(
        (at(llama, "folder"), at(quantized, "nvfp4")),
        IMPORTS + SKELETON + "skeleton = skeleton_of('folder')",
    ),
    # Only for the page's Python; `make test-vllm` starts its servers.
    "docs/how-to/vllm.md": World((at(gguf_folder, "folder"),)),
}

# Its scripts fail first, so test_heal_page.py runs them.
HEAL_PAGE = "docs/how-to/heal-a-script.md"
HEAL_WORLD = World((first_last_frame, at(qwen_moe, "Qwen3-30B-A3B")))

# Pages whose code no test runs, and the reasons.
NOT_RUN = {
    "docs/rules.md": "its command takes any model type; test_export_rules.py runs it for 32",
    HEAL_PAGE: "its scripts fail first: test_heal_page.py runs both ways",
    "docs/cli.md": "its lines name the options; python/tests/cli runs each of them",
    "docs/verify.md": "its lines name the options; python/tests/cli runs each of them",
    "docs/remote.md": "its hosts are unreachable; test_remote.py has local ones",
    "docs/how-to/gguf-models.md": "needs a copy of llama.cpp, as test_llama_cpp.py does",
}
