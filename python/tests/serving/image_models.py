"""Writes a folder with a small vision-language model, which vLLM serves without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

PROMPT = "<image> t59 t83"
IMAGE_SIZE = 32
VOCABULARY = 250
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_NEEDED = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<fake_token_around_image>",
           "<end_of_utterance>", "<global-img>", *_TILES]  # fmt: skip


def make(folder: Path, sizes: dict[str, Any]) -> Path:
    """Create an Idefics3: an image tower, a connector and a Llama, all with random weights."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "image_size": IMAGE_SIZE, "patch_size": 8}  # fmt: skip
    config = transformers.Idefics3Config(
        vision_config=tower,
        text_config=transformers.LlamaConfig(**sizes | {"vocab_size": VOCABULARY}),
        image_token_id=_NEEDED.index("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size="500KB")
    edge = {"longest_edge": IMAGE_SIZE}
    transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size=edge, max_image_size=edge, do_image_splitting=False
        ),
        tokenizer=_tokenizer(),
        image_seq_len=4,
    ).save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    words = [*_NEEDED, "\n", "\n\n"]
    words += [f"t{number}" for number in range(len(words), VOCABULARY)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    names = {f"{word[1:-1]}_token": word for word in _NEEDED[:4]}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=_NEEDED[4:], **names
    )
