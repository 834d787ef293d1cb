"""Keys of `rank_pattern` and `alpha_pattern`, against Python's `re` and PEFT's own merge."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output
from safetensors.torch import load_file, save_file

import loadstone
from loadstone import _core

# Pieces of patterns. RE2 or other Python releases read some of them differently, and some are
# invalid everywhere. About one in three combinations is a valid pattern.
PIECES = [
    *"abq_-.120AQ |^$()[]{}*+?#,<=!:/", r"\d", r"\w", r"\s", r"\W", r"\D", r"\S", r"\.", r"\-",
    r"\_", r"\Z", r"\A", r"\b", r"\B", "(?:", "[^", "{,2}", "{1,}", "{2}", "{,}", "{0,1}", "{1,2}",
    "[[:digit:]]", "[a-b]", "[]a]", "[^]a]", r"[\w.]", "[a-]", "[b-a]", "[-a]", r"[\d-a]", "(?i:",
    "(?-i:", "(?s:", "(?m-s:", "(?x:", "(?a:", "(?=", "(?!", "(?<=", "(?P<g>", "(?P=g)", "(?#c)",
    "(?>", "(?i)", "(?:a|b)", r"\x61", r"\u0061", r"\U00000061", r"\n", r"\t", r"\C", r"\pL",
    r"\Q", r"\E", r"\z", r"\1", r"\0", r"\101", r"\N{DOT}", "\u00e9", "\u212a", r"[^\W\d]", "[A-z]",
    "[^a]", "(?i:[^a])", "(?i:[A-Z])", "a{2,1}", "{1001}", "&&", "--", "[a&&b]", "[a--b]", "||",
]  # fmt: skip
MODULES = [
    "a", "b", "q.a", "a.b", "a_b", "q", "1", "12", "a.1.q", "ab", "aab", "abab", "Q.A", "A", "q-a",
    "a b", "", "a.", "x", "aa", "{,2}", "a{,2}", "[:digit:]", "d]", "t]", "q.0.ab", "a-b", " ", "_",
    "..", "a1b2", "\t", "]", "[", "-", "pL", "C", "z", "Z", "a[0]",
]  # fmt: skip
TRANSLATED = re.compile(r"loadstone does not support this pattern: (.+?)(?=, (?:which|whose)|; |$)")


def pattern_key(keys: list[str], module: str) -> int:
    """Return the index of the key that PEFT's ``get_pattern_key`` finds for a module, or -1."""
    for index, key in enumerate(keys):
        if re.match(rf"(.*\.)?({key})$", module):
            return index
    return keys.index(module) if module in keys else -1


def expected(keys: list[str]) -> list[int] | None:
    """Return the matching key of each module, or None if Python rejects a key."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key in keys:
                re.compile(rf"(.*\.)?({key})$")
            return [pattern_key(keys, module) for module in MODULES]
    except re.error:
        return None


def random_key(generator: random.Random) -> str:
    return "".join(generator.choice(PIECES) for _ in range(generator.randrange(1, 7)))


def test_patterns_mean_what_they_mean_to_python() -> None:
    generator = random.Random(1)
    counts: Counter[str] = Counter()
    for _ in range(12_000):
        key = random_key(generator)
        wanted = expected([key])
        try:
            found, _ = _core.module_matches([key], MODULES)
        except loadstone.Error as error:
            assert error.code == "format.adapter"
            if wanted is not None:  # Python accepts the key, so the error must name the reason
                reason = TRANSLATED.search(str(error))
                assert reason is not None, (key, str(error))
                counts[reason[1]] += 1
            else:
                counts["rejected"] += 1
            continue
        assert wanted is not None, f"Python rejects {key!r}"
        assert found == wanted, key
        counts["matches" if max(found) == 0 else "matches nothing"] += 1
    assert counts["matches"] > 1200
    assert counts["matches nothing"] > 1200
    assert counts["rejected"] > 1200
    assert {"look-ahead", "look-behind", "atomic groups", r"\B"} <= counts.keys()


def test_the_comparison_sees_what_re2_reads_in_its_own_way() -> None:
    """Control: the test above would detect that RE2 reads these keys differently."""
    differing = 0
    for key in ["a{,2}", "[[:digit:]]", r"q\x5f", r"\pL", r"\Qa\E", r"\C", r"[\s]a", "(?i)a"]:
        own = [f"(?:.*\\.)?(?:{key})"]
        try:
            by_re2: list[int] | None = _core.first_matches(own, MODULES, "missing")
        except loadstone.Error:
            by_re2 = None
        differing += by_re2 != expected([key])
    assert differing >= 5


def test_the_first_of_several_keys_counts() -> None:
    """Keys are plain names or expressions, and the first key that matches applies."""
    generator = random.Random(2)
    names = [
        "a",
        "b",
        "a.b",
        r"a\.b",
        "q.a",
        "q.0.ab",
        "a_b",
        "a[0]",
        ".",
        "",
        "ab",
        "a.1.q",
        "..b",
    ]
    many = 0
    for _ in range(4000):
        keys = [
            generator.choice(names) if generator.random() < 0.6 else random_key(generator)
            for _ in range(generator.randrange(2, 8))
        ]
        keys = list(dict.fromkeys(keys))
        wanted = expected(keys)
        try:
            found, _ = _core.module_matches(keys, MODULES)
        except loadstone.Error:
            continue
        assert found == wanted, keys
        many += len(set(found)) > 2
    assert many > 300


def test_work_is_bounded() -> None:
    modules = [f"l.{i}.q" for i in range(1000)]
    names = [f"l.{i}.q" for i in range(90_000)]
    found, comparisons = _core.module_matches(names, modules)
    assert found == list(range(1000))
    assert comparisons <= 3 * len(modules)  # comparing all pairs would take 90,000,000
    found, comparisons = _core.module_matches([".*z", ".*q"], modules)
    assert (found, comparisons) == ([1] * 1000, 2000)
    with pytest.raises(loadstone.Error, match="too many patterns are not plain names"):
        _core.module_matches([f".*z{i}" for i in range(10_001)], modules)
    with pytest.raises(
        loadstone.Error,
        match="there are too many patterns for this number of modules",
    ):
        _core.module_matches([f".*z{i}" for i in range(9_999)], [*modules, "l.1000.q"])
    with pytest.raises(loadstone.Error, match="there are too many patterns"):
        _core.module_matches([f"z{i}" for i in range(100_001)], modules)


@pytest.mark.parametrize("module", ["\u00e9", "a\nb", "\u212a"])
def test_a_module_beyond_ascii_is_refused(module: str) -> None:
    assert _core.module_matches([], [module]) == ([-1], 0)
    with pytest.raises(loadstone.Error, match="not ASCII"):
        _core.module_matches(["a"], [module])


peft = pytest.importorskip("peft")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8, bias=False)
        self.k_proj = torch.nn.Linear(8, 8, bias=False)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(2)])

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return index


# The merge rejects the keys in REFUSED; for the others it computes PEFT's own values.
KEYS = [
    r"layers\.\d{,2}\.q_proj", r"layers\.[[:digit:]]\.q_proj", r"q_proj\Z", "q_proj(?=$)",
    r"q_proj\b", "Q_PROJ", "q_pro[j-]", "q_proj$", r"\w+\.q_proj", "layers.{1,3}q_proj",
    r"layers\.1.*", "q_proj|zzz", r"q\x5fproj", "(?:q_proj){1}", r"[\w.]*q_proj", r"q_proj\Z|x",
    "q_proj{1,}", "[]q]_proj", "[[q]_proj", "(?P<a>q)_proj", "(?i:Q)_proj", "(?s:.)*q_proj",
    "q_proj{,1}", r"q_pro[^\W\d]", "layers.0.q_proj", "x)|(.*q_proj", "q_proj)|(x", "^layers.*",
]  # fmt: skip
REFUSED = {"q_proj(?=$)"}


def saved(folder: Path, key: str) -> dict[str, torch.Tensor]:
    """Save a base and an adapter with the key; return PEFT's merge."""
    torch.manual_seed(0)
    net = Net()
    (folder / "base").mkdir()
    save_file(net.state_dict(), folder / "base/model.safetensors")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "k_proj"],
        alpha_pattern={key: 64},
        init_lora_weights=False,
    )
    wrapped = peft.get_peft_model(net, config)
    wrapped.save_pretrained(folder / "adapter")
    return dict(wrapped.merge_and_unload().state_dict())


def by_merge(folder: Path, lora: Path) -> dict[str, torch.Tensor]:
    loadstone.merge(folder / "base", folder / "out.safetensors", lora=lora)
    return load_file(folder / "out.safetensors")


def by_load(folder: Path, lora: Path) -> dict[str, torch.Tensor]:
    with loadstone.skeleton():
        net = Net()
    loadstone.load(net, folder / "base", lora=lora)
    return dict(net.state_dict())


def by_command(folder: Path, lora: Path) -> dict[str, torch.Tensor]:
    output("merge", folder / "base", "--lora", lora, "-o", folder / "cli.safetensors")
    return load_file(folder / "cli.safetensors")


def by_metadata(folder: Path, lora: Path) -> dict[str, torch.Tensor]:
    """Merge an adapter whose metadata contains the config with a prefix, as in diffusers."""
    tensors = {
        f"transformer.{name.removeprefix('base_model.model.')}": tensor
        for name, tensor in load_file(lora / "adapter_model.safetensors").items()
    }
    config = json.loads((lora / "adapter_config.json").read_text())
    kept = ("r", "lora_alpha", "alpha_pattern")
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{k}": config[k] for k in kept})}
    save_file(tensors, folder / "lora.safetensors", metadata=metadata)
    return by_merge(folder, folder / "lora.safetensors")


WAYS = {"merge": by_merge, "load": by_load, "command": by_command, "metadata": by_metadata}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_means_what_it_means_to_peft(tmp_path: Path, key: str) -> None:
    wanted = saved(tmp_path, key)
    if key not in REFUSED:
        assert_close(by_merge(tmp_path, tmp_path / "adapter"), wanted)
        return
    with pytest.raises(loadstone.Error, match="does not support this pattern: look-ahead"):
        by_merge(tmp_path, tmp_path / "adapter")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [r"layers\.[01]\.q_proj{,1}", "q.proj"])
def test_all_ways_read_a_key_alike(tmp_path: Path, way: str, key: str) -> None:
    wanted = saved(tmp_path, key)
    found = WAYS[way](tmp_path, tmp_path / "adapter")
    assert_close(found, wanted)
    name = "layers.0.q_proj.weight"  # control: the value differs without the key's alpha
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            found[name], load_file(tmp_path / "base/model.safetensors")[name], rtol=1e-5, atol=1e-4
        )


def config_error(folder: Path, text: str) -> Any:
    saved(folder, "q_proj")
    file = folder / "adapter/adapter_config.json"
    pattern = r'"alpha_pattern": \{[^}]*\}'
    replacement = f'"alpha_pattern": {text}'
    changed = re.sub(pattern, lambda _: replacement, file.read_text())
    file.write_text(changed)
    with pytest.raises(loadstone.Error) as caught:
        by_merge(folder, folder / "adapter")
    assert caught.value.code == "format.adapter"
    assert str(file) in str(caught.value)
    return caught.value


@pytest.mark.parametrize("key", [r"\C", r"\pL", r"\Qq_proj\E", "(?i)q_proj", "(q_proj", "**"])
def test_a_key_that_python_rejects_is_rejected(tmp_path: Path, key: str) -> None:
    error = config_error(tmp_path, json.dumps({key: 64}))
    assert "not a valid regular expression of Python" in str(error)
    assert error.field == "alpha_pattern"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    assert "twice" in str(config_error(tmp_path, '{"q_proj": 64, "k_proj": 2, "q_proj": 8}'))
