"""Builds small models from shapes, files and registered conversions, and compares loads of them.

transformers and loadstone must load each of ``CASES`` to the same model, or both must reject it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from compare import Loaded, differences, filled_memory, library_load, uninitialised_names
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers import core_model_loading as library
from transformers import initialization as init
from transformers_models import write_state

import loadstone

Converter, Rename = library.WeightConverter, library.WeightRenaming
State = dict[str, torch.Tensor]


class NetConfig(PreTrainedConfig):
    """A configuration with ``shapes`` by dotted name; names of buffers end in ``#``."""

    model_type = "rules_net"
    shapes: dict[str, list[int]] | None = None
    num_attention_heads: int = 2
    tie_word_embeddings: bool = False


def fill(root: torch.nn.Module, shapes: dict[str, list[int]], dtypes: dict[str, Any]) -> None:
    """Create modules, parameters and buffers for dotted names."""
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        value = torch.full(shape, 2, dtype=dtypes.get(name, torch.get_default_dtype()))
        if last.endswith("#"):
            at.register_buffer(last[:-1], value)
        else:
            floating = value.is_floating_point() or value.is_complex()
            setattr(at, last, torch.nn.Parameter(value, requires_grad=floating))


class Net(PreTrainedModel):
    """A model with only the parameters and buffers of ``shapes``."""

    config_class = NetConfig
    dtypes: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        fill(self, config.shapes or {}, self.dtypes)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        for tensor in module.parameters(recurse=False):
            if tensor.is_floating_point():
                init.normal_(tensor)


class Inner(Net):
    """The base model inside of ``Outer``."""

    base_model_prefix = "model"


class Outer(PreTrainedModel):
    """A model with a head around its base model."""

    config_class = NetConfig
    base_model_prefix = "model"

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        self.model = Inner(config)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.post_init()

    _init_weights = Net._init_weights


class Twins(PreTrainedModel):
    """A model with two sub-models of one class, each with its own conversions."""

    config_class = NetConfig

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        self.left = Inner(config)
        self.right = Inner(config)
        self.old = torch.nn.Linear(4, 4, bias=False)
        self.post_init()

    _init_weights = Net._init_weights


class Tied(PreTrainedModel):
    """A model with an embedding, a head tied to it, and a layer between them."""

    config_class = NetConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "head.weight": "embed.weight",
        "last.weight": "embed.weight",
    }

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(6, 4)
        self.between = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.last = torch.nn.Linear(4, 6, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def _init_weights(self, module: torch.nn.Module) -> None:
        for tensor in module.parameters(recurse=False):
            init.normal_(tensor)


# --- verdicts -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A model, a file and the options of a load.

    Attributes:
        conversions: returns the conversions to register for ``owner``; None registers nothing.
        silent: missing names that transformers does not report; their values are not compared.
    """

    shapes: dict[str, list[int]]
    state: State
    conversions: Callable[[], list[Any]] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cls: Any = Net
    owner: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    fails: bool = False
    max_shard_size: int | None = None
    silent: frozenset[str] = frozenset()


@dataclasses.dataclass
class Outcome:
    """A model with its loading information, or an error."""

    loaded: Loaded | None = None
    error: Exception | None = None


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=generator)
    return (values * 50).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def write(case: Case, folder: Path) -> None:
    config = NetConfig(shapes=case.shapes, **case.config)
    config.save_pretrained(folder)
    state = {name: value.clone() for name, value in case.state.items()}
    write_state(state, folder, case.max_shard_size)


def attempt(load: Callable[[], Loaded]) -> Outcome:
    try:
        return Outcome(loaded=load())
    except Exception as error:
        return Outcome(error=error)


def ours_load(cls: Any, folder: Path, **options: Any) -> Loaded:
    with filled_memory():
        model, info = loadstone.transformers.from_pretrained(
            cls, folder, output_loading_info=True, **options
        )
    return Loaded(model, info, uninitialised_names(model))


def both(case: Case, folder: Path) -> tuple[Outcome, Outcome]:
    write(case, folder)
    if case.conversions is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(
            case.owner or case.cls.__name__, case.conversions(), overwrite=True
        )
    theirs = attempt(lambda: library_load(case.cls, folder, **case.options))
    ours = attempt(lambda: ours_load(case.cls, folder, **case.options))
    return ours, theirs


def judge(case: Case, folder: Path) -> Outcome:
    """Fail unless loadstone and transformers have the same outcome; return loadstone's."""
    ours, theirs = both(case, folder)
    if case.fails:
        assert theirs.error is not None, "the library loads this"
        assert ours.error is not None, f"ours loads what the library refuses: {theirs.error}"
        assert isinstance(ours.error, loadstone.Error), ours.error
        return ours
    if theirs.error is not None:
        raise theirs.error
    if ours.error is not None:
        raise ours.error
    assert ours.loaded is not None and theirs.loaded is not None
    mine, library_ = ours.loaded, theirs.loaded
    assert mine.uninitialised == set()
    found = differences(
        mine.model, library_.model, mine.info, library_.info,
        library_.random | case.silent, library_.uninitialised,
    )  # fmt: skip
    assert not found, "\n".join(found)
    assert loadstone.audit(mine.model).ok
    return ours


# --- the cases -----------------------------------------------------------------------------------


def experts(count: int = 12, rows: int = 3) -> State:
    """Return the tensors of twelve experts, whose numeric order is not alphabetical."""
    return {
        f"layers.0.experts.{expert}.{name}.weight": rand(rows, 4, seed=100 * at + expert)
        for expert in range(count)
        for at, name in enumerate(("w1", "w2", "w3"))
    }


def fuse() -> list[Any]:
    return [
        Converter(
            ["experts.*.w1.weight", "experts.*.w3.weight"],
            "experts.gate_up",
            [library.MergeModulelist(dim=0), library.Concatenate(dim=1)],
        ),
        Converter("experts.*.w2.weight", "experts.down", [library.MergeModulelist(dim=0)]),
    ]


FUSED = {"layers.0.experts.gate_up": [12, 6, 4], "layers.0.experts.down": [12, 3, 4]}


class Broken(library.ConversionOps):
    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken on purpose")

    @property
    def reverse_op(self) -> Any:
        return Broken()


def tied(**state: torch.Tensor) -> State:
    return {"between.weight": rand(4, 4), "between.bias": rand(4)} | {
        f"{name}.weight": value for name, value in state.items()
    }


A, B = rand(4, 4, seed=1), rand(4, 4, seed=2)

CASES: dict[str, Case] = {
    "as it is": Case({"a.w": [4, 4], "a.b": [4]}, {"a.w": A, "a.b": rand(4)}),
    "renamed": Case({"new.w": [4, 4]}, {"old.w": A}, lambda: [Rename("old", "new")]),
    "renamed by anchors and groups": Case(
        {"blocks.0.w": [4, 4], "blocks.1.w": [4, 4]},
        {"h.0.w": A, "h.1.w": B},
        lambda: [Rename(r"^h\.(\d+)", r"blocks.\1")],
    ),
    "renamed by a star": Case(
        {"deep.0.x.w": [4, 4], "deep.12.x.w": [4, 4]},
        {"deep.0.y.w": A, "deep.12.y.w": B},
        lambda: [Rename("deep.*.y", "deep.*.x")],
    ),
    "renamed twice, in order": Case(
        {"c.w": [4, 4]}, {"a.w": A}, lambda: [Rename(r"^a\.", "b."), Rename(r"^b\.", "c.")]
    ),
    "renamed in the order that does not chain": Case(
        {"b.w": [4, 4]}, {"a.w": A}, lambda: [Rename(r"^b\.", "c."), Rename(r"^a\.", "b.")]
    ),
    "renamed, then converted": Case(
        {"new.q": [2, 4], "new.k": [2, 4]},
        {"old.qk": A},
        lambda: [
            Rename("old", "new"),
            Converter("qk", ["q", "k"], [library.Chunk(dim=0)]),
        ],
    ),
    "the model's own name wins where a renaming leads nowhere": Case(
        {"old.w": [4, 4]}, {"old.w": A}, lambda: [Rename("old", "new")]
    ),
    "two sources of one name": Case(
        {"x.w": [4, 4]}, {"a.w": A, "b.w": B}, lambda: [Rename(r"^(a|b)\.", "x.")]
    ),
    "the old names of a norm": Case(
        {"norm.LayerNorm.weight": [4], "norm.LayerNorm.bias": [4]},
        {"norm.LayerNorm.gamma": rand(4), "norm.LayerNorm.beta": rand(4, seed=3)},
    ),
    "key_mapping": Case(
        {"new.w": [4, 4]}, {"old.w": A}, options={"key_mapping": {"^old": "new"}}
    ),
    "key_mapping before the registry": Case(
        {"c.w": [4, 4]}, {"a.w": A}, lambda: [Rename(r"^b\.", "c.")],
        {"key_mapping": {r"^a\.": "b."}},
    ),
    "many to one": Case(
        {"qkv.w": [8, 4]},
        {"q.w": A, "k.w": rand(2, 4), "v.w": rand(2, 4, seed=5)},
        lambda: [Converter(["q.w", "k.w", "v.w"], "qkv.w", [library.Concatenate(dim=0)])],
    ),
    "one to many": Case(
        {"q.w": [2, 4], "k.w": [2, 4], "v.w": [2, 4]},
        {"qkv.w": rand(6, 4)},
        lambda: [Converter("qkv.w", ["q.w", "k.w", "v.w"], [library.Chunk(dim=0)])],
    ),
    "one to many, of which the first is not in the model": Case(
        {"k.w": [2, 4], "v.w": [2, 4]},
        {"qkv.w": rand(6, 4)},
        lambda: [Converter("qkv.w", ["q.w", "k.w", "v.w"], [library.Chunk(dim=0)])],
    ),
    "transposed": Case(
        {"a.w": [4, 6]}, {"a.v": rand(6, 4)},
        lambda: [Converter("a.v", "a.w", [library.Transpose(0, 1)])],
    ),
    "permuted for rotation": Case(
        {"q.w": [8, 4]}, {"q.v": rand(8, 4)},
        lambda: [Converter("q.v", "q.w", [library.PermuteForRope()])],
    ),
    "experts": Case(FUSED, experts(), fuse),
    "experts in shards": Case(FUSED, experts(), fuse, max_shard_size=200),
    "experts in another dtype": Case(FUSED, experts(), fuse, {"dtype": torch.bfloat16}),
    "experts, fused in the file already": Case(
        FUSED,
        {"layers.0.experts.gate_up": rand(12, 6, 4), "layers.0.experts.down": rand(12, 3, 4)},
        fuse,
    ),
    "experts of another shape": Case(FUSED, experts(rows=5), fuse, fails=True),
    "experts of another shape, ignored": Case(
        FUSED, experts(rows=5), fuse, {"ignore_mismatched_sizes": True}
    ),
    "an expert too many": Case(FUSED, experts(13), fuse, fails=True),
    "an expert too many, ignored": Case(
        FUSED, experts(13), fuse, {"ignore_mismatched_sizes": True}
    ),
    "experts on a device": Case(FUSED, experts(), fuse, {"device_map": "cpu"}),
    "experts, placed automatically": Case(FUSED, experts(), fuse, {"device_map": "auto"}),
    "no experts at all": Case({**FUSED, "a": [4, 4]}, {"a": A}, fuse),
    "an operation that fails": Case(
        {"a.w": [4, 4], "b": [4, 4]},
        {"a.v": A, "b": B},
        lambda: [Converter("a.v", "a.w", [Broken()])],
        fails=True,
    ),
    "below each sub-model only": Case(
        {"q.w": [2, 4], "k.w": [2, 4]},
        {"left.qk.w": A, "right.qk.w": B, "old.weight": rand(4, 4, seed=9)},
        lambda: [Converter("qk.w", ["q.w", "k.w"], [library.Chunk(dim=0)])],
        cls=Twins,
        owner="Inner",
    ),
    "below each sub-model only, renamed": Case(
        {"new.weight": [4, 4]},
        {"left.old.weight": A, "right.old.weight": B, "old.weight": rand(4, 4, seed=9)},
        lambda: [Rename("old", "new")],
        cls=Twins,
        owner="Inner",
    ),
    "by the model type": Case(
        {"new.w": [4, 4]}, {"old.w": A}, lambda: [Rename("old", "new")], owner="rules_net"
    ),
    "the head's prefix is added": Case(
        {"a.w": [4, 4]}, {"a.w": A, "head.weight": rand(6, 4)}, cls=Outer
    ),
    "the head is missing": Case({"a.w": [4, 4]}, {"a.w": A}, cls=Outer),
    "the head's prefix is stripped": Case(
        {"a.w": [4, 4]}, {"model.a.w": A, "head.weight": rand(6, 4)}, cls=Inner
    ),
    "the prefix is stripped after a conversion": Case(
        {"q.w": [2, 4], "k.w": [2, 4]},
        {"model.qk.w": A},
        lambda: [Converter("qk.w", ["q.w", "k.w"], [library.Chunk(dim=0)])],
        cls=Inner,
    ),
    "a shape that does not fit": Case(
        {"a.w": [4, 4], "b": [4, 4]}, {"a.w": rand(4, 5), "b": B}, fails=True
    ),
    "a shape that does not fit, ignored": Case(
        {"a.w": [4, 4], "b": [4, 4]}, {"a.w": rand(4, 5), "b": B},
        options={"ignore_mismatched_sizes": True},
    ),
    "as many numbers in another shape": Case(
        {"a.w": [4, 4], "b": [4, 4]}, {"a.w": rand(2, 8), "b": B}, fails=True
    ),
    "one number, and none": Case(
        {"a": [], "b": [0, 4], "c": [1]}, {"a": rand(), "b": rand(0, 4), "c": rand(1)}
    ),
    "a number for a list of one": Case(
        {"c": [1], "d": [4]}, {"c": rand(), "d": rand(4)}, fails=True
    ),
    "unexpected": Case({"a.w": [4, 4]}, {"a.w": A, "z.w": B, "y.1.w": B}),
    "unexpected, as a converter names them": Case(
        {"a.w": [4, 4]},
        {"a.w": A, "z.qk": B},
        lambda: [Converter("qk", ["q", "k"], [library.Chunk(dim=0)])],
    ),
    "missing": Case({"a.w": [4, 4], "b.w": [4, 4]}, {"a.w": A}),
    "missing buffers": Case({"a.w": [4, 4], "b.n#": [3]}, {"a.w": A}),
    "buffers": Case({"a.w": [4, 4], "b.n#": [3]}, {"a.w": A, "b.n": rand(3)}),
    "an empty file": Case({"a.w": [4, 4], "b.n#": [3]}, {"z": A}),
    "from half to full": Case(
        {"a.w": [4, 4]}, {"a.w": A.half()}, options={"dtype": torch.float32}
    ),
    "to double": Case({"a.w": [4, 4]}, {"a.w": A}, options={"dtype": torch.float64}),
    "a dtype by its name": Case({"a.w": [4, 4]}, {"a.w": A}, options={"dtype": "bfloat16"}),
    "a dtype by its old argument": Case(
        {"a.w": [4, 4]}, {"a.w": A}, options={"torch_dtype": torch.bfloat16}
    ),
    "an argument of the configuration": Case(
        {"a.w": [4, 4]}, {"a.w": A}, options={"num_attention_heads": 7}
    ),
    "from double": Case({"a.w": [4, 4]}, {"a.w": A.double()}),
    "auto with dtypes mixed": Case(
        {"a": [4, 4], "b": [4, 4], "c": [4, 4]},
        {"a": A.half(), "b": B.bfloat16(), "c": A},
        options={"dtype": "auto"},
    ),
    "auto, counted by the file's order": Case(
        {"b": [4, 4], "a": [4, 4]},
        {"b": B.bfloat16(), "a": A},
        options={"dtype": "auto"},
        max_shard_size=40,
    ),
    "from eight bits": Case(
        {"a.w": [4, 4]}, {"a.w": A.to(torch.float8_e4m3fn)}, options={"dtype": torch.bfloat16}
    ),
    "tied: all there and equal": Case(
        {}, tied(embed=rand(6, 4), head=rand(6, 4), last=rand(6, 4)), cls=Tied,
        config={"tie_word_embeddings": True},
    ),
    "tied: all there and different": Case(
        {}, tied(embed=rand(6, 4), head=rand(6, 4, seed=1), last=rand(6, 4, seed=2)), cls=Tied,
        config={"tie_word_embeddings": True},
    ),
    "tied: one differs": Case(
        {}, tied(embed=rand(6, 4), head=rand(6, 4), last=rand(6, 4, seed=2)), cls=Tied,
        config={"tie_word_embeddings": True},
    ),
    "tied: the first is there": Case(
        {}, tied(embed=rand(6, 4)), cls=Tied, config={"tie_word_embeddings": True}
    ),
    "tied: the second is there": Case(
        {}, tied(head=rand(6, 4)), cls=Tied, config={"tie_word_embeddings": True}
    ),
    "tied: the third is there": Case(
        {}, tied(last=rand(6, 4)), cls=Tied, config={"tie_word_embeddings": True}
    ),
    "tied: two are there and differ": Case(
        {}, tied(head=rand(6, 4), last=rand(6, 4, seed=1)), cls=Tied,
        config={"tie_word_embeddings": True},
    ),
    "tied: none is there": Case({}, tied(), cls=Tied, config={"tie_word_embeddings": True}),
    "tied: not by this configuration": Case({}, tied(embed=rand(6, 4)), cls=Tied),
    "tied: the shape does not fit": Case(
        {}, tied(embed=rand(7, 4)), cls=Tied, config={"tie_word_embeddings": True},
        options={"ignore_mismatched_sizes": True},
    ),
}  # fmt: skip
