"""The vocabulary and the model card of a GGUF file, for conversions by rules.

The pip package ``gguf``, a part of llama.cpp, reads special tokens, merges and the model card;
transformers reads the tokenizer. The functions below do the same as those of the converter's
``TextModel`` with these names, which the rules of an architecture list in ``vocabulary``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadstone._adapters.llama_cpp.metadata import MetadataEntry, entries_of

# A token's text, score and type.
Token = tuple[str | bytes, float, int]


class MissingVocabulary(Exception):  # noqa: N818  (a reason, which a finding reports)
    """The keys of the vocabulary cannot be made; the text is the reason."""


def model_card(
    folder: Path, tensors: Sequence[tuple[str, Sequence[int], str]]
) -> tuple[MetadataEntry, ...]:
    """Return the keys that describe the model: its name, size, license ...

    Raises:
        MissingVocabulary: the package ``gguf`` is not installed.
    """
    gguf = _package("gguf")
    writer = _writer(gguf)
    for name, shape, _ in tensors:
        writer.add_tensor_info(name, shape, importlib.import_module("numpy").dtype("float32"), 0)
    total, shared, expert, count = writer.get_total_parameter_count()
    card = gguf.Metadata.load(None, folder, None, total)
    card.name = folder.name if card.name is None else card.name
    if card.size_label is None and total > 0:
        card.size_label = gguf.size_label(total, shared, expert, count)
    card.set_gguf_meta_model(writer)
    return _entries(gguf, writer)


def vocabulary(
    functions: Sequence[str], folder: Path, fields: dict[str, Any], pre: dict[str, Any]
) -> tuple[MetadataEntry, ...]:
    """Return the keys of the vocabulary from the first function that finds its files.

    Args:
        functions: names of the converter's functions, in its order.
        pre: a text, and the names of pre-tokenizers by the digest of the text's tokens.

    Raises:
        MissingVocabulary: a package is not installed, or the tokenizer is not supported.
    """
    gguf = _package("gguf")
    for name in functions:
        if name not in _FUNCTIONS:
            raise MissingVocabulary("the architecture has its own kind of tokenizer")
        writer = _writer(gguf)
        if _FUNCTIONS[name](gguf, writer, folder, fields, pre):
            return _entries(gguf, writer)
    raise MissingVocabulary("the folder has no tokenizer that these rules support")


def _gpt2(gguf: Any, writer: Any, folder: Path, fields: Any, pre: dict[str, Any]) -> bool:
    transformers = _package("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as reason:  # a tokenizer may raise anything
        raise MissingVocabulary(f"transformers cannot read it: {reason}"[:200]) from None
    tokens, types = zip(*_byte_level_tokens(gguf, tokenizer, fields["vocab_size"]), strict=True)
    digest = hashlib.sha256(str(tokenizer.encode(pre["text"])).encode()).hexdigest()
    name = pre["names"].get(digest)
    if name is None:
        raise MissingVocabulary("this release of llama.cpp does not know the pre-tokenizer")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    _add_special(writer, folder, gguf.SpecialVocab(folder, load_merges=True))
    return True


def _byte_level_tokens(gguf: Any, tokenizer: Any, size: int) -> list[tuple[str, int]]:
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(names) >= size:
        raise MissingVocabulary("the tokenizer has more tokens than vocab_size in config.json")
    added = tokenizer.get_added_vocab()
    rows = []
    for number in range(size):
        token, kind = names.get(number), gguf.TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{number}]", gguf.TokenType.UNUSED
        elif token in added:
            facts = tokenizer.added_tokens_decoder[number]
            if not facts.normalized:
                token = tokenizer.decode(tokenizer.encode(token, add_special_tokens=False))
            token, kind = _added_token(gguf, token, facts.special)
        rows.append((token, kind))
    return rows


def _added_token(gguf: Any, token: str, is_special: bool) -> tuple[str, int]:
    if is_special or _looks_special(token):
        return token, gguf.TokenType.CONTROL
    return token.replace("\u2581", " "), gguf.TokenType.USER_DEFINED


def _looks_special(token: str) -> bool:
    """Return whether an added token is a control token, although its flags differ."""
    pairs = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(begin) and token.endswith(end) for begin, end in pairs
    )


def _llama_hf(gguf: Any, writer: Any, folder: Path, fields: Any, pre: Any) -> bool:
    _package("transformers")
    try:
        tokens = list(gguf.LlamaHfVocab(folder).all_tokens())
    except (FileNotFoundError, TypeError):
        return False
    _add_scored(gguf, writer, folder, tokens)
    return True


def _sentencepiece(gguf: Any, writer: Any, folder: Path, fields: Any, pre: Any) -> bool:
    file = folder / "tokenizer.model"
    if not file.is_file():
        return False
    model = _package("sentencepiece").SentencePieceProcessor()
    model.LoadFromFile(str(file))
    size = fields.get("vocab_size") or model.vocab_size()
    kinds, unused = gguf.TokenType, gguf.TokenType.UNUSED
    tokens: list[Token] = [(f"[PAD{number}]", -10000.0, unused) for number in range(size)]
    for number in range(min(size, model.vocab_size())):
        tests: dict[Any, Callable[[int], bool]] = {
            kinds.UNKNOWN: model.IsUnknown, kinds.CONTROL: model.IsControl,
            kinds.UNUSED: model.IsUnused, kinds.BYTE: model.IsByte,
        }  # fmt: skip
        kind = next((kind for kind, test in tests.items() if test(number)), kinds.NORMAL)
        tokens[number] = (model.IdToPiece(number), model.GetScore(number), kind)
    for token, number in _json(folder / "added_tokens.json").items():
        if number < size:
            tokens[number] = (token, -1000.0, kinds.USER_DEFINED)
    config = _json(folder / "tokenizer_config.json")
    for key, facts in config.get("added_tokens_decoder", {}).items():
        if int(key) < size:
            token, kind = _added_token(gguf, facts["content"], facts.get("special", False))
            tokens[int(key)] = (token, -1000.0, kind)
    _add_scored(gguf, writer, folder, tokens)
    return True


def _add_scored(gguf: Any, writer: Any, folder: Path, tokens: list[Token]) -> None:
    texts, scores, types = zip(*tokens, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(texts))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    _add_special(writer, folder, gguf.SpecialVocab(folder, n_vocab=len(tokens)))


def _add_special(writer: Any, folder: Path, special: Any) -> None:
    """Add special tokens; gguf 0.19.0 does not read post-processors of the type ByteLevel."""
    last = _json(folder / "tokenizer.json").get("post_processor") or {}
    kinds = [each.get("type") for each in last.get("processors", [last])]
    if "ByteLevel" in kinds:
        none, known = {"bos": False, "eos": False}, special.add_special_token
        special.add_special_token = known | none if len(kinds) == 1 else none | known
    special.add_to_gguf(writer, quiet=True)


_FUNCTIONS: dict[str, Callable[[Any, Any, Path, Any, Any], bool]] = {
    "sentencepiece": _sentencepiece,
    "llama_hf": _llama_hf,
    "gpt2": _gpt2,
}


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes()) if file.is_file() else {}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingVocabulary(f"the package '{name}' is not installed") from None


def _writer(gguf: Any) -> Any:
    writer = gguf.GGUFWriter(path=None, arch="")
    writer.kv_data[0].clear()
    return writer


def _entries(gguf: Any, writer: Any) -> tuple[MetadataEntry, ...]:
    return entries_of(writer.kv_data[0].items(), gguf.GGUFValueType.get_type)
