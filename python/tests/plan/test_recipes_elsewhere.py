"""Tests that loadstone rejects recipes for any checkpoint but the one they were made for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import packed_compressed
import packed_gptq
import pytest
import torch
import transformers
from codec_bnb import add_4bit
from codec_checkpoint import Checkpoint, Tensors, Written
from codec_files import CODECS, Files, each_once, rounded
from codec_models import assert_equal, model_of, tensors_of
from command import run
from safetensors.torch import load_file

import loadstone
from loadstone import _core

LAYER = "model.layers.0.mlp.up_proj"


def recipes_of(file: Written) -> str:
    """Return recipes for all tensors, which decode quantized ones to F32."""
    catalog = loadstone.inspect(file.path)._core
    builder = _core.RecipeBuilder(catalog)
    for name in file.numbers:
        if name in file.quantized:
            builder.add(name, builder.numbers(catalog, name, "F32"))
        else:
            builder.add(name, builder.source(name))
    return builder.finish().to_json(catalog)


# ---- entry points: each executes recipes made for `first` on `file`


def by_convert(first: Written, file: Written, recipes: str, folder: Path) -> Tensors:
    loadstone.convert(file.path, folder / "out.safetensors", rules=recipes)
    return load_file(folder / "out.safetensors")


def by_load(first: Written, file: Written, recipes: str, folder: Path) -> Tensors:
    model = model_of(first.numbers)
    loadstone.load(model, file.path, rules=recipes, unexpected="ignore")
    return tensors_of(model)


def by_command(folder: Path, recipes: str, *words: object) -> None:
    path = folder / "recipes.json"
    path.write_text(recipes)
    done = run(*words, "--rules", path, "--json")
    if done.returncode != 0:
        error = json.loads(done.stdout)["error"]
        place = {key: error[key] for key in ("tensor", "field", "found", "expected")}
        raise loadstone.Error(error["message"], code=error["code"], **place)


def by_convert_command(first: Written, file: Written, recipes: str, folder: Path) -> Tensors:
    target = folder / "out.safetensors"
    by_command(folder, recipes, "convert", file.path, target)
    return load_file(target)


def by_load_command(first: Written, file: Written, recipes: str, folder: Path) -> Tensors:
    """Run the load command, which returns no values, so only its success is checked."""
    loadstone.save_skeleton(model_of(first.numbers), folder / "skeleton.json")
    by_command(folder, recipes, "load", file.path, "--skeleton", folder / "skeleton.json")
    return rounded_as(file, recipes)


DOORS: dict[str, Callable[[Written, Written, str, Path], Tensors]] = {
    "convert": by_convert,
    "load": by_load,
    "convert command": by_convert_command,
    "load command": by_load_command,
}


def rounded_as(file: Written, recipes: str) -> Tensors:
    """Return the expected values, in the dtypes of the recipes."""
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
              "BF16": torch.bfloat16}  # fmt: skip
    targets = {name: dtype for name, _, dtype, _ in json.loads(recipes)["targets"]}
    return {
        name: rounded(tensor, dtypes.get(targets[name], tensor.dtype))
        for name, tensor in file.numbers.items()
        if name in targets
    }


# ---- pairs of checkpoints with the same tensor names


def plain(
    rows: int = 12, columns: int = 8, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        made = Checkpoint(seed)
        made.add_plain("embed.weight", made.normal(rows, columns).to(dtype))
        made.add_plain("norm.weight", made.normal(columns).to(dtype))
        return made.save(folder)

    return write


def bnb(
    encoding: str = "nf4", shape: tuple[int, int] = (64, 128), nested: bool = False, seed: int = 1
) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        made = Checkpoint(seed)
        add_4bit(made, f"{LAYER}.weight", encoding, shape, nested=nested)
        return made.save(folder)

    return write


def fp8(is_scaled: bool) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        made = Checkpoint(1)
        data, scale = made.fp8(16, 32), made.uniform(0.01, 0.3, 16, 1)
        if is_scaled:
            parts = {"data": ("", data), "scale": ("_scale", scale)}
            made.add(f"{LAYER}.weight", "fp8-channel", parts, data.float() * scale)
        else:
            made.add_plain(f"{LAYER}.weight", data)
        return made.save(folder)

    return write


def gptq(**how: object) -> Callable[[Path], Written]:
    return partial(packed_gptq.write_gptq, packed_gptq.Gptq(is_symmetric=False, **how))


def packed(**how: object) -> Callable[[Path], Written]:
    return partial(packed_compressed.write_packed, packed_compressed.Weights(**how))


def bytes_of_int8(**how: object) -> Callable[[Path], Written]:
    weights = packed_compressed.Weights(bits=8, strategy="channel", **how)
    return partial(packed_compressed.write_int8, weights, "int-quantized")


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two checkpoints with the same tensor names, and the field in which they differ."""

    first: Callable[[Path], Written]
    other: Callable[[Path], Written]
    field: str


PAIRS = {
    "hidden size": Pair(plain(), plain(columns=16), "shape"),
    "smaller hidden size": Pair(plain(columns=16), plain(), "shape"),
    "vocabulary": Pair(plain(), plain(rows=13), "shape"),
    "dimensions": Pair(plain(8, 12), plain(12, 8), "shape"),
    "dtype": Pair(plain(), plain(dtype=torch.float16), "encoding"),
    "nf4 and fp4": Pair(bnb(), bnb("fp4"), "codes"),
    "fp4 and nf4": Pair(bnb("fp4"), bnb(), "codes"),
    "codes of a transposed matrix": Pair(bnb(), bnb(shape=(128, 64)), "codes"),
    "offset of nested scales": Pair(bnb(nested=True), bnb(nested=True, seed=2), "codes"),
    "values and codes": Pair(fp8(False), fp8(True), "codes"),
    "zero points less 1": Pair(gptq(), gptq(version=2), "codes"),
    "order of groups": Pair(gptq(), gptq(is_ordered=True), "codes"),
    "symmetric": Pair(packed(group_size=32), packed(group_size=32, is_symmetric=False), "codes"),
    "symmetric int8": Pair(bytes_of_int8(), bytes_of_int8(is_symmetric=False), "codes"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_different_checkpoint_is_refused(name: str, door: str, tmp_path: Path) -> None:
    pair, carry_out = PAIRS[name], DOORS[door]
    first, other = pair.first(tmp_path / "first"), pair.other(tmp_path / "other")
    recipes = recipes_of(first)
    # Controls: each checkpoint works with its own recipes.
    assert_equal(carry_out(first, first, recipes, tmp_path), rounded_as(first, recipes))
    own = recipes_of(other)
    assert_equal(carry_out(other, other, own, tmp_path), rounded_as(other, own))
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    with pytest.raises(loadstone.Error) as refused:
        carry_out(first, other, recipes, tmp_path)
    error = refused.value
    assert (error.code, error.field) == ("plan.recipe", pair.field)
    assert error.tensor in other.stored and error.found and error.expected
    assert error.found != error.expected
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("door", DOORS)
def test_control_other_values_fit(door: str, tmp_path: Path) -> None:
    first, other = plain()(tmp_path / "first"), plain(seed=2)(tmp_path / "other")
    recipes = recipes_of(first)
    assert_equal(DOORS[door](first, other, recipes, tmp_path), rounded_as(other, recipes))


def test_recipes_of_each_codec_on_each_other_are_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    files: Files = each_once(tmp_path_factory.mktemp)
    made = {codec: files(codec) for codec in CODECS if not codec.startswith("mixed-")}
    made = {codec: file for codec, file in made.items() if file.stored and file.quantized}
    counts = {"right": 0, "refused": 0}
    for codec, first in made.items():
        recipes = recipes_of(first)
        sources = {source[0] for source in json.loads(recipes)["sources"]}
        for name, file in made.items():
            if not sources <= file.tensor_names:
                continue
            try:
                found = by_load(first, file, recipes, tmp_path)
            except loadstone.Error as error:
                assert error.code == "plan.recipe" and name != codec, (codec, name, error)
                counts["refused"] += 1
                continue
            expected = rounded_as(file, recipes)
            found = {each: found[each] for each in expected}
            assert_equal(found, expected)
            counts["right"] += 1
    assert counts["right"] >= len(made) and counts["refused"] > 50, counts


# ---- save_recipes, from a library's model


def llama(folder: Path, seed: int = 0, **sizes: int) -> transformers.LlamaConfig:
    torch.manual_seed(seed)
    settings = {"hidden_size": 64, "vocab_size": 160} | sizes
    config = transformers.LlamaConfig(
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, **settings,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return config


@pytest.mark.parametrize("sizes", [{"hidden_size": 128}, {"hidden_size": 32}, {"vocab_size": 168}])
def test_saved_recipes(sizes: dict[str, int], tmp_path: Path) -> None:
    config = llama(tmp_path / "first")
    llama(tmp_path / "other", **sizes)
    llama(tmp_path / "tuned", seed=1)
    recipes = tmp_path / "recipes.json"

    def model() -> torch.nn.Module:
        with loadstone.skeleton():
            return transformers.LlamaForCausalLM._from_config(config)

    loadstone.save_recipes(model(), tmp_path / "first", recipes, rules="transformers")
    for door in ("convert", "load"):

        def carry_out(folder: Path, door: str = door) -> dict[str, torch.Tensor]:
            if door == "convert":
                loadstone.convert(folder, tmp_path / "out", rules=recipes)
                return load_file(tmp_path / "out" / "model.safetensors")
            net = model()
            loadstone.load(net, folder, rules=recipes)
            return tensors_of(net)

        tuned = load_file(tmp_path / "tuned" / "model.safetensors")
        assert_equal(carry_out(tmp_path / "tuned"), tuned)
        with pytest.raises(loadstone.Error) as refused:
            carry_out(tmp_path / "other")
        assert (refused.value.code, refused.value.field) == ("plan.recipe", "shape")


def test_recipes_of_an_older_form_are_refused(tmp_path: Path) -> None:
    file = plain()(tmp_path / "first")
    recipes = json.loads(recipes_of(file))
    old = recipes | {"version": 1, "sources": [name for name, *_ in recipes["sources"]]}
    with pytest.raises(loadstone.Error, match="version") as refused:
        by_load(file, file, json.dumps(old), tmp_path)
    assert refused.value.code == "plan.recipe"
