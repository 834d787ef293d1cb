"""Adapters of peft, diffusers and kohya: names, scales and kinds, against peft's own merge.

peft and loadstone sum a product in different orders, so their F32 results differ in the last bits.
Both must be within the error bound of such sums around the exact result (:func:`close`). Sums in a
fixed order are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import (
    HIDDEN,
    INNER,
    added,
    close,
    model,
    modules,
    products,
    randomised,
    same_bits,
    write_peft,
)
from peft_fields import WITHOUT_INFLUENCE
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """One layer of each kind that adapters support."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 24, bias=False)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(24, 5)

    def forward(self, index: torch.Tensor) -> Any:
        return self.head(self.second(self.first(self.embed(index))))


def saved(tmp_path: Path, **config: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save a base and an adapter; return the base's tensors and peft's merge."""
    torch.manual_seed(3)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save_file(before, tmp_path / "base.safetensors")
    wrapped = peft.get_peft_model(net, peft.LoraConfig(**config))
    randomised(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    return before, dict(wrapped.merge_and_unload().state_dict())


def merged(tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = tmp_path / "out.safetensors"
    lora = {tmp_path / "adapter": options.pop("factor", 1.0)}
    loadstone.merge(tmp_path / "base.safetensors", out, lora=lora, **options)
    return load_file(out)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["first", "second"], "r": 8, "lora_alpha": 12},
    "rslora": {"target_modules": ["first"], "r": 5, "lora_alpha": 7, "use_rslora": True},
    "dora": {"target_modules": ["first", "second"], "r": 4, "use_dora": True},
    "patterns": {
        "target_modules": ["first", "second"],
        "r": 4,
        "rank_pattern": {"first": 6},
        "alpha_pattern": {"second": 3},
    },
    "embedding": {"target_modules": ["embed"], "r": 4},
    "convolution": {"target_modules": ["conv"], "r": 2},
    "saved": {"target_modules": ["first"], "modules_to_save": ["head"], "r": 2},
    "bias": {"target_modules": ["first"], "bias": "lora_only", "r": 2},
    "all biases": {"target_modules": ["first"], "bias": "all", "r": 2},
    "parameter": {"target_modules": [], "target_parameters": ["first.weight"], "r": 3},
    "gaussian": {"target_modules": ["first"], "init_lora_weights": "gaussian", "r": 2},
    "orthogonal": {"target_modules": ["first"], "init_lora_weights": "orthogonal", "r": 2},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["second"], "r": 2},
    "anchored": {
        "target_modules": ["first", "second"],
        "r": 4,
        "rank_pattern": {"^first": 6},
        "alpha_pattern": {"^(second|first)": 3},
    },
}

# Fields of peft's LoraConfig that loadstone uses. If the test below fails for a new field, find out
# what the field does.
USED = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out", "init_lora_weights", "target_parameters",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "megatron_config": {"a": 1},
    "corda_config": {"a": 1},
    "lora_ga_config": {"a": 1},
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "kasa_config": {"a": 1},
    "arrow_config": {"a": 1},
    "use_bdlora": {"a": 1},
    "use_qalora": True,
    "alora_invocation_tokens": [1],
    "layer_replication": [[0, 1]],
    "lora_bias": True,
    "trainable_token_indices": [3],
}


class TestPeft:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_merge_and_unload(self, tmp_path: Path, kind: str) -> None:
        before, expected = saved(tmp_path, **CONFIGS[kind])
        found = merged(tmp_path)
        assert sorted(found) == sorted(expected)
        changed = 0
        for name, tensor in expected.items():
            close(found[name], tensor, 200)
            changed += not torch.equal(tensor, before[name])
        assert changed > 0

    @pytest.mark.parametrize("alpha", [0, -3, 5])
    @pytest.mark.parametrize("where", ["alone", "rslora", "pattern", "dora"])
    def test_alphas_of_zero_and_below(self, tmp_path: Path, where: str, alpha: int) -> None:
        """If alpha is 0, peft adds nothing. If alpha is negative, peft subtracts the product."""
        config: dict[str, Any] = {"target_modules": ["first", "second"], "r": 4, "lora_alpha": 2}
        more = {"pattern": {"alpha_pattern": {"first": alpha}}, "alone": {}}
        more |= {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
        if where != "pattern":
            config["lora_alpha"] = alpha
        before, expected = saved(tmp_path, **config | more[where])
        found = merged(tmp_path)
        for name, tensor in expected.items():
            close(found[name], tensor, 200)
        is_changed = not torch.equal(found["first.weight"], before["first.weight"])
        assert is_changed == (alpha != 0 or where == "dora")
        assert not torch.equal(found["second.weight"], before["second.weight"]) or alpha == 0

    def test_a_bound_that_is_too_small_would_be_seen(self, tmp_path: Path) -> None:
        _, expected = saved(tmp_path, **CONFIGS["plain"])
        found = merged(tmp_path, factor=1.0001)
        with pytest.raises(AssertionError):
            close(found["first.weight"], expected["first.weight"], 200)

    def test_transposed_weights(self, tmp_path: Path) -> None:
        base = {"h.0.attn.c_attn.weight": torch.randn(24, 72)}  # shape [in, out], as in GPT-2
        adapter = products(4, 1, {"h.0.attn.c_attn": (72, 24)})
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", adapter, r=4, lora_alpha=4, fan_in_fan_out=True)
        left, right = adapter["h.0.attn.c_attn.lora_B"], adapter["h.0.attn.c_attn.lora_A"]
        weight = base["h.0.attn.c_attn.weight"]
        same_bits(merged(tmp_path), {"h.0.attn.c_attn.weight": added(weight, left.T, right.T, 1)})


class TestDiffusers:
    def test_fuse_lora(self, tmp_path: Path) -> None:
        diffusers = pytest.importorskip("diffusers")
        torch.manual_seed(5)
        net = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        save_file(net.state_dict(), tmp_path / "base.safetensors")
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        names = ["to_q", "to_v", "conv1"]
        net.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=names))
        randomised(net)
        net.save_lora_adapter(tmp_path / "adapter")
        net.fuse_lora(lora_scale=0.8)
        expected = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in net.state_dict().items()
            if "lora_" not in name
        }
        found = merged(tmp_path, factor=0.8)
        assert sorted(found) == sorted(expected)
        for name, tensor in expected.items():
            close(found[name], tensor, 200)
        changed = [name for name in expected if not torch.equal(expected[name], before[name])]
        assert len(changed) > 10


class TestNames:
    """The same product under the names of each library."""

    MODULE = "transformer_blocks.0.attn.to_q"

    def check(self, tmp_path: Path, names: dict[str, str], alpha: float | None = None) -> None:
        shapes = {self.MODULE: (24, 16)}
        base = {f"{self.MODULE}.weight": torch.randn(24, 16)}
        made = products(4, 2, shapes)
        left, right = made[f"{self.MODULE}.lora_B"], made[f"{self.MODULE}.lora_A"]
        tensors = {names["left"]: left, names["right"]: right}
        if alpha is not None:
            tensors[names["alpha"]] = torch.tensor(alpha)
        save_file(base, tmp_path / "base.safetensors")
        (tmp_path / "adapter").mkdir()
        save_file(tensors, tmp_path / "adapter" / "lora.safetensors")
        scale = 1 if alpha is None else alpha / 4
        weight = base[f"{self.MODULE}.weight"]
        same_bits(merged(tmp_path), {f"{self.MODULE}.weight": added(weight, right, left, scale)})

    @pytest.mark.parametrize("prefix", ["", "transformer.", "unet.", "diffusion_model."])
    @pytest.mark.parametrize(
        ("right", "left"),
        [("lora_A", "lora_B"), ("lora.down", "lora.up"), ("lora_down", "lora_up")],
    )
    def test_dots(self, tmp_path: Path, prefix: str, right: str, left: str) -> None:
        stem = prefix + self.MODULE
        self.check(tmp_path, {"left": f"{stem}.{left}.weight", "right": f"{stem}.{right}.weight"})

    def test_the_scale_that_diffusers_writes_into_the_file(self, tmp_path: Path) -> None:
        base = {f"{self.MODULE}.weight": torch.randn(24, 16)}
        made = products(4, 2, {self.MODULE: (24, 16)})
        left, right = made[f"{self.MODULE}.lora_B"], made[f"{self.MODULE}.lora_A"]
        stem = f"transformer.{self.MODULE}"
        config = {"transformer.r": 4, "transformer.lora_alpha": 10, "text_encoder.r": 8}
        save_file(base, tmp_path / "base.safetensors")
        (tmp_path / "adapter").mkdir()
        save_file(
            {f"{stem}.lora_A.weight": right, f"{stem}.lora_B.weight": left},
            tmp_path / "adapter" / "x.safetensors",
            metadata={"lora_adapter_metadata": json.dumps(config)},
        )
        weight = base[f"{self.MODULE}.weight"]
        same_bits(merged(tmp_path), {f"{self.MODULE}.weight": added(weight, right, left, 2.5)})

    def test_kohya(self, tmp_path: Path) -> None:
        stem = "lora_unet_transformer_blocks_0_attn_to_q"
        names = {"left": f"{stem}.lora_up.weight", "right": f"{stem}.lora_down.weight"}
        self.check(tmp_path, {**names, "alpha": f"{stem}.alpha"}, alpha=2.0)

    def test_kohya_that_may_mean_two(self, tmp_path: Path) -> None:
        save_file(
            {"a.b_c.weight": torch.ones(4, 4), "a_b.c.weight": torch.ones(4, 4)},
            tmp_path / "base.safetensors",
        )
        (tmp_path / "adapter").mkdir()
        stem = "lora_unet_a_b_c"
        save_file(
            {
                f"{stem}.lora_up.weight": torch.ones(4, 1),
                f"{stem}.lora_down.weight": torch.ones(1, 4),
            },
            tmp_path / "adapter" / "x.safetensors",
        )
        with pytest.raises(loadstone.PlanError, match=r"a\.b_c\.weight.*a_b\.c\.weight"):
            merged(tmp_path)


class TestParts:
    """The product of a module that is one part of a fused tensor."""

    def test_queries_and_values_of_a_fused_tensor(self, tmp_path: Path) -> None:
        base = {"l.qkv_proj.weight": torch.randn(24 + 8 + 8, 16)}
        shapes = {"l.q_proj": (24, 16), "l.k_proj": (8, 16), "l.v_proj": (8, 16)}
        adapter = products(2, 1, shapes)
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", adapter, r=2, lora_alpha=2)
        expected = base["l.qkv_proj.weight"].clone()
        for name, rows in {"q": slice(0, 24), "k": slice(24, 32), "v": slice(32, 40)}.items():
            right, left = (adapter[f"l.{name}_proj.lora_{x}"] for x in "AB")
            expected[rows] = added(expected[rows], right, left, 1)
        same_bits(merged(tmp_path), {"l.qkv_proj.weight": expected})

    @pytest.mark.parametrize("transposed", [False, True])
    def test_experts_of_a_stack(self, tmp_path: Path, transposed: bool) -> None:
        hidden, inner, experts = 16, 12, 3
        base = {
            "l.mlp.experts.gate_up_proj": torch.randn(experts, 2 * inner, hidden),
            "l.mlp.experts.down_proj": torch.randn(experts, hidden, inner),
        }
        shapes = {
            "l.mlp.experts.1.gate_proj": (inner, hidden),
            "l.mlp.experts.2.up_proj": (inner, hidden),
            "l.mlp.experts.0.down_proj": (hidden, inner),
        }
        adapter = products(2, 1, shapes)
        expected = {name: tensor.clone() for name, tensor in base.items()}
        joined = expected["l.mlp.experts.gate_up_proj"]
        places = [(joined[1], slice(0, inner)), (joined[2], slice(inner, 2 * inner))]
        places.append((expected["l.mlp.experts.down_proj"][0], slice(None)))
        for name, (matrix, rows) in zip(shapes, places, strict=True):
            right, left = adapter[f"{name}.lora_A"], adapter[f"{name}.lora_B"]
            matrix[rows] = added(matrix[rows], right, left, 1)
        if transposed:
            base = {name: tensor.mT.contiguous() for name, tensor in base.items()}
            expected = {name: tensor.mT.contiguous() for name, tensor in expected.items()}
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", adapter, r=2, lora_alpha=2)
        same_bits(merged(tmp_path), expected)

    def test_stacks_are_cut_for_servers(self, tmp_path: Path) -> None:
        base = {
            "model.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 64, 32).bfloat16(),
            "model.layers.0.mlp.experts.down_proj": torch.randn(2, 32, 32).bfloat16(),
        }
        name = "model.layers.0.mlp.experts.1.up_proj"
        save_file(base, tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", products(2, 1, {name: (32, 32)}), r=2, lora_alpha=2)
        found = merged(tmp_path, quantize="nvfp4")
        loadstone.merge(
            tmp_path / "base.safetensors", tmp_path / "two.safetensors", lora=tmp_path / "adapter"
        )
        loadstone.convert(
            tmp_path / "two.safetensors", tmp_path / "cut.safetensors", quantize="nvfp4"
        )
        same_bits(found, load_file(tmp_path / "cut.safetensors"))


class TestRefused:
    """Adapters that loadstone rejects, so that it drops no tensor silently."""

    def refused(self, tmp_path: Path, adapter: dict[str, torch.Tensor], **config: Any) -> Any:
        save_file(model(0), tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", adapter, **{"r": 2, "lora_alpha": 2, **config})
        with pytest.raises(loadstone.Error) as caught:
            merged(tmp_path)
        assert not (tmp_path / "out.safetensors").exists()
        return caught.value

    def test_a_module_that_the_base_lacks(self, tmp_path: Path) -> None:
        made = products(2, 1, {"model.layers.7.mlp.up_proj": (INNER, HIDDEN)})
        error = self.refused(tmp_path, made)
        assert error.code == "merge.unused"
        sources = {name for each in error.findings for name in each.sources}
        assert sources == {
            f"base_model.model.model.layers.7.mlp.up_proj.lora_{x}.weight" for x in "AB"
        }

    def test_what_is_ignored_by_a_pattern(self, tmp_path: Path) -> None:
        made = products(
            2, 1, {"text.up_proj": (4, 4), "model.layers.0.mlp.up_proj": (INNER, HIDDEN)}
        )
        self.refused(tmp_path, made)
        found = merged(tmp_path, lora_ignore=r"\.text\.")
        name = "model.layers.0.mlp.up_proj"
        right, left = made[f"{name}.lora_A"], made[f"{name}.lora_B"]
        expected = model(0)
        weight = expected[f"{name}.weight"]
        expected[f"{name}.weight"] = added(weight, right, left, 1).bfloat16()
        same_bits(found, expected)

    def test_a_tensor_of_another_method(self, tmp_path: Path) -> None:
        error = self.refused(tmp_path, {"model.layers.0.mlp.up_proj.hada_w1_a": torch.ones(2, 2)})
        assert error.code == "merge.unused"

    def test_a_product_that_does_not_fit(self, tmp_path: Path) -> None:
        made = products(2, 1, {"model.layers.0.mlp.up_proj": (INNER, HIDDEN + 1)})
        assert self.refused(tmp_path, made).code == "merge.adapter"

    def test_half_a_product(self, tmp_path: Path) -> None:
        made = products(2, 1, {"model.layers.0.mlp.up_proj": (INNER, HIDDEN)})
        del made["model.layers.0.mlp.up_proj.lora_B"]
        assert self.refused(tmp_path, made).code == "format.adapter"

    def test_another_rank_than_the_configuration(self, tmp_path: Path) -> None:
        made = products(2, 1, modules())
        assert self.refused(tmp_path, made, r=4).code == "format.adapter"

    def test_another_kind_of_adapter(self, tmp_path: Path) -> None:
        save_file(model(0), tmp_path / "base.safetensors")
        write_peft(tmp_path / "adapter", products(2, 1, modules()), peft_type="LOHA")
        with pytest.raises(loadstone.Error) as caught:
            merged(tmp_path)
        assert caught.value.code == "format.adapter"

    def test_a_lost_configuration(self, tmp_path: Path) -> None:
        save_file(model(0), tmp_path / "base.safetensors")
        folder = write_peft(tmp_path / "adapter", products(2, 1, modules()))
        (folder / "adapter_config.json").unlink()
        with pytest.raises(loadstone.FormatError, match=r"adapter_config\.json"):
            merged(tmp_path)

    def test_dora_goes_with_one_factor(self, tmp_path: Path) -> None:
        saved(tmp_path, **CONFIGS["dora"])
        with pytest.raises(loadstone.PlanError, match="DoRA"):
            merged(tmp_path, factor=0.5)

    @pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
    def test_a_method_that_changes_the_base(self, tmp_path: Path, method: str) -> None:
        """peft changes the base when it loads such an adapter, so merging the product is wrong."""
        saved(tmp_path, target_modules=["first"], r=4)
        file = tmp_path / "adapter" / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"init_lora_weights": method}))
        with pytest.raises(loadstone.Error, match=method) as caught:
            merged(tmp_path)
        assert caught.value.code == "format.adapter"
        assert str(file) in str(caught.value)

    def config_error(self, tmp_path: Path, text: str | None = None, **changes: Any) -> Any:
        saved(tmp_path, target_modules=["first"], r=4, lora_alpha=8)
        file = tmp_path / "adapter" / "adapter_config.json"
        file.write_text(text or json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(loadstone.Error) as caught:
            merged(tmp_path)
        assert caught.value.code == "format.adapter"
        assert not (tmp_path / "out.safetensors").exists()
        return caught.value

    def test_every_field_of_peft_is_known(self) -> None:
        fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
        assert fields <= USED | WITHOUT_INFLUENCE | set(REFUSED)

    @pytest.mark.parametrize("field", REFUSED)
    def test_a_field_that_makes_another_kind(self, tmp_path: Path, field: str) -> None:
        assert self.config_error(tmp_path, **{field: REFUSED[field]}).field == field

    @pytest.mark.parametrize("method", ["lora_ga", "of a later peft"])
    def test_a_beginning_that_may_change_the_base(self, tmp_path: Path, method: str) -> None:
        assert self.config_error(tmp_path, init_lora_weights=method).field == "init_lora_weights"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("r", 1e30),
            ("r", 2.5),
            ("r", 0),
            ("r", "4"),
            ("rank_pattern", {"first": 1e30}),
            ("lora_alpha", 1e300),
            ("lora_alpha", -1e300),
        ],
    )
    def test_a_number_that_is_no_rank_or_alpha(
        self, tmp_path: Path, field: str, value: Any
    ) -> None:
        error = self.config_error(tmp_path, **{field: value})
        assert field in str(error) or error.field == field

    def test_numbers_that_are_none(self, tmp_path: Path) -> None:
        """Python's json module writes NaN and infinities, which the JSON standard does not have."""
        assert "NaN or infinite" in str(self.config_error(tmp_path, lora_alpha=float("nan")))

    def test_text_that_is_no_configuration(self, tmp_path: Path) -> None:
        assert "not a JSON object" in str(self.config_error(tmp_path, text="[NaN]x"))

    def test_factors_beyond_f32(self, tmp_path: Path) -> None:
        saved(tmp_path, target_modules=["first"], r=4, lora_alpha=8)
        for factor in (1e39, 3e38):
            with pytest.raises(loadstone.Error, match=r"finite|F32"):
                merged(tmp_path, factor=factor)

    def test_a_field_that_stands_twice(self, tmp_path: Path) -> None:
        saved(tmp_path, target_modules=["first"], r=4, lora_alpha=8)
        file = tmp_path / "adapter" / "adapter_config.json"
        file.write_text('{"lora_alpha": 8, ' + file.read_text().lstrip()[1:])
        with pytest.raises(loadstone.Error, match="lora_alpha"):
            merged(tmp_path)

    def test_one_module_under_two_names(self, tmp_path: Path) -> None:
        saved(tmp_path, target_modules=["first"], r=4)
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        again = {
            name.removeprefix("base_model.model."): each.clone() for name, each in tensors.items()
        }
        save_file(tensors | again, file)
        with pytest.raises(loadstone.Error, match="two products for one weight") as caught:
            merged(tmp_path)
        assert caught.value.code == "format.adapter"

    def test_magnitudes_that_the_configuration_denies(self, tmp_path: Path) -> None:
        saved(tmp_path, target_modules=["first"], r=4, use_dora=True)
        file = tmp_path / "adapter" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": False}))
        with pytest.raises(loadstone.Error, match="use_dora"):
            merged(tmp_path)
