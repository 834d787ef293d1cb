"""bitsandbytes modules whose weight keeps its scales when moved or offloaded.

Only the classes of a module and its weight change. Each new class derives from the old one and has
the same name, so ``isinstance`` works as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module

from loadstone._adapters.bitsandbytes import layout
from loadstone._adapters.bitsandbytes.offloaded import adopt_hook, weights_map_of
from loadstone._adapters.bitsandbytes.parameters import (
    adopt,
    components_of,
    is_incomplete,
    is_packed,
    lost_scales,
    mapped,
)
from loadstone._base.errors import counted, new_error
from loadstone._base.names import join_name
from loadstone._model.modules import named_modules

_logger = logging.getLogger("loadstone.bitsandbytes")


class SelfContainedModule(torch.nn.Module):
    """Base of modules that move, save and fetch their weight with all its components."""

    weight: Any

    def __setattr__(self, name: str, value: Any) -> None:
        """Make accelerate's hook fetch weights with their scales as soon as it is assigned."""
        if name == "_hf_hook":
            adopt_hook(value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Move the weight with its scales; called by ``to``, ``cpu``, ``half`` and the like."""
        weight = self._parameters["weight"]
        if not is_packed(weight):
            result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # may quantize
            adopt(self._parameters["weight"])
            return result
        with torch.no_grad():
            moved = _moved(weight, fn)
        self._parameters["weight"] = None
        try:
            result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except BaseException:
            self._parameters["weight"] = weight
            raise
        self._parameters["weight"] = _moved_in_place(weight, moved)
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._present():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if not keep_vars and is_packed(self.weight):  # only the bytes, as in bitsandbytes
                destination[f"{prefix}weight"] = self.weight.data

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        """Bring offloaded parameters into the module during a ``with`` block."""
        weights_map = weights_map_of(self.__dict__.get("_hf_hook"))
        before = dict(self._parameters)
        try:
            for name, parameter in before.items():
                if weights_map is not None and parameter is not None and parameter.is_meta:
                    value = weights_map[name]
                    if not isinstance(value, torch.nn.Parameter):
                        value = torch.nn.Parameter(value, requires_grad=False)
                    self._parameters[name] = value
            yield
        finally:
            self._parameters.update(before)

    def _require_scales(self) -> None:
        if torch.compiler.is_compiling():
            return
        weight = self.weight
        if is_packed(weight) and (is_incomplete(weight) or not components_of(weight)):
            raise lost_scales(self.weight.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        return (rebuild_module, (type(self).__bases__[1],), *reduced[2:])


def _moved(weight: Any, fn: Callable[[Any], Any]) -> Any:
    """Return the result of a tensor function on a weight: moved with its scales, never cast."""
    moved = fn(weight)
    if is_packed(moved):
        return moved
    if moved.dtype != weight.dtype:
        return weight  # ignore `half()` and the like, because the floats are codes
    empty = functools.partial(torch.empty_like, device=moved.device)  # `to_empty`
    return weight._rebuild(moved, mapped(weight._scales, empty))


def _moved_in_place(weight: Any, moved: Any) -> Any:
    """Move the weight in place if torch allows it, because others may reference the object."""
    if moved is weight or not torch._has_compatible_shallow_copy_type(weight, moved):
        return moved
    weight.data = moved.data
    if isinstance(weight, bnb.nn.Params4bit):
        weight.quant_state = moved.quant_state
    else:
        weight.CB, weight.SCB = weight.data, moved.SCB
    return weight


class SelfContained4bit(SelfContainedModule):
    """A module with a ``Params4bit``, whose quantization state it shares."""

    dtype: Any
    bias: Any
    out_features: int
    compute_dtype: Any
    compute_type_is_set: bool
    set_compute_type: Callable[[Any], None]
    support_avx512bf16_for_cpu: Any

    @property
    def quant_state(self) -> Any:
        """Return the weight's state, or while it has none, the state that was assigned."""
        state = getattr(self._parameters.get("weight"), "quant_state", None)
        return state if state is not None else self.__dict__.get("quant_state")

    @quant_state.setter
    def quant_state(self, state: Any) -> None:
        if getattr(self._parameters.get("weight"), "quant_state", None) is None:
            self.__dict__["quant_state"] = state
        else:
            self.__dict__.pop("quant_state", None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _restore_rowwise(self.weight)
        super()._save_to_state_dict(destination, prefix, keep_vars)


class SelfContainedLinear4bit(SelfContained4bit):
    """A ``Linear4bit`` that leaves its weight unchanged in forward passes and decodes it correctly.

    If ``is_recorded`` is set, a graph may share the weight's memory, so the codes must not be
    rearranged.
    """

    is_recorded = False

    def forward(self, x: torch.Tensor) -> Any:
        """Run bitsandbytes' forward pass, except for rows that it would decode wrongly."""
        fix_4bit_weight_quant_state_from_module(self)
        self._require_scales()
        weight: Any = adopt(self.weight)
        if x.device.type == "cpu" and x.numel() == 0:  # bitsandbytes' kernel would divide by zero
            return x.new_empty((*x.shape[:-1], self.out_features))
        if _is_recording():
            _keep_rowwise(self)
        if self._rearranges(x):
            if not layout.is_rearranged(weight.quant_state):
                weight.data, weight.quant_state = layout.rearranged(weight.data, weight.quant_state)
            return super().forward(x)
        _restore_rowwise(weight)
        if x.device.type != "cpu":
            return super().forward(x)
        if layout.is_misread(weight.quant_state):
            return self._forward_decoded(x)
        return self._forward_plain(x)

    def _rearranges(self, x: torch.Tensor) -> bool:
        """Return whether bitsandbytes is going to rearrange the weight for this input."""
        return (
            x.device.type == "cpu"
            and bool(self.support_avx512bf16_for_cpu)
            and not (self.is_recorded or _is_recording())
            and not self.training
            and not x.requires_grad
            and layout.can_rearrange(self.weight.quant_state)
        )

    def _forward_plain(self, x: torch.Tensor) -> Any:
        """Run bitsandbytes' forward pass without the rearrangement, which would fail."""
        supports = self.support_avx512bf16_for_cpu
        self.support_avx512bf16_for_cpu = False
        try:
            return super().forward(x)
        finally:
            self.support_avx512bf16_for_cpu = supports

    def _forward_decoded(self, x: torch.Tensor) -> Any:
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        _cast_bias(self.bias, x.dtype)
        return layout.linear(x, self.weight, self.weight.quant_state, self.bias).to(dtype)


def _cast_bias(bias: Any, dtype: torch.dtype) -> None:
    if bias is not None and bias.dtype != dtype:
        bias.data = bias.data.to(dtype)  # permanently, as in bitsandbytes


def _is_recording() -> bool:
    """Return whether torch records a graph that outlives the guards of this forward pass."""
    return torch.compiler.is_exporting() or layout.is_tracing()


# The decorator makes dynamo execute the function while it traces.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keep_rowwise(module: Any) -> None:
    """Mark a module as recorded; its weight must have the checkpoint layout."""
    if layout.is_rearranged(module.weight.quant_state):
        raise new_error(
            "plan.options",
            "a forward pass has rearranged this weight for the CPU, and a graph recorded "
            "now would later read wrong codes; call the model's state_dict() first, which restores "
            "the order by rows",
            field="weight",
            found=str(list(module.weight.quant_state.shape)),
        )
    module.is_recorded = True


class SelfContainedEmbedding4bit(SelfContained4bit):
    def forward(self, input: torch.Tensor) -> Any:
        """Run bitsandbytes' forward pass, except for rows that it would decode wrongly."""
        fix_4bit_weight_quant_state_from_module(self)
        self._require_scales()
        state = self.weight.quant_state
        if self.weight.device.type != "cpu" or not layout.is_misread(state):
            return super().forward(input)
        table = layout.decode(self.weight, state)
        return torch.nn.functional.embedding(input, table).to(self.dtype)


class SelfContainedLinear8bitLt(SelfContainedModule):
    """A ``Linear8bitLt`` whose weight keeps the scales; its state borrows them."""

    state: Any
    bias: Any

    def init_8bit_state(self) -> None:
        """Share the weight's codes and scales with the state, instead of moving them there."""
        self.state.CB = self.weight.CB if _is_recording() else self.weight.data
        self.state.SCB = self.weight.SCB

    def forward(self, x: torch.Tensor) -> Any:
        """Run bitsandbytes' forward pass, but assign no codes: graphs cannot record that."""
        self._require_scales()
        if self.state.has_fp16_weights or not is_packed(self.weight):
            return super().forward(x)
        self.state.is_training = self.training
        self.init_8bit_state()
        _cast_bias(self.bias, x.dtype)
        # A traced graph keeps its state object, and needs the codes later.
        state = copy.copy(self.state) if layout.is_tracing() else self.state
        result = bnb.matmul(x, self.weight, bias=self.bias, state=state)
        if not result.requires_grad:
            self.state.reset_grads()  # else the codes of an offloaded weight would stay in memory
        return result

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        if not self.state.has_fp16_weights:
            self.state.reset_grads()
        return result


_MIXINS: dict[type, type] = {
    bnb.nn.Linear4bit: SelfContainedLinear4bit,
    bnb.nn.Linear8bitLt: SelfContainedLinear8bitLt,
    bnb.nn.Embedding4bit: SelfContainedEmbedding4bit,
    bnb.nn.Embedding8bit: SelfContainedModule,
}
MODULES = tuple(_MIXINS)


def _restore_rowwise(weight: Any) -> None:
    if is_packed(weight) and layout.is_rearranged(weight.quant_state):
        weight.data, weight.quant_state = layout.rowwise(weight.data, weight.quant_state)


@functools.cache
def _self_contained_class(base: type) -> type:
    mixin = next(mixin for library, mixin in _MIXINS.items() if issubclass(base, library))
    body = {"__doc__": base.__doc__, "__module__": "loadstone.bitsandbytes"}
    return type(base.__name__, (mixin, base), body)


def rebuild_module(base: type) -> Any:
    """Return an empty self-contained module; pickles refer to this function by name."""
    cls = _self_contained_class(base)
    return cls.__new__(cls)  # type: ignore[call-overload]


rebuild_module.__module__ = "loadstone.bitsandbytes"
_rebuilt = rebuild_module  # the name in pickles of earlier releases


def is_quantized(module: Any) -> bool:
    return isinstance(module, MODULES)


def is_self_contained(module: Any) -> bool:
    return isinstance(module, SelfContainedModule)


def has_lost_scales(module: Any) -> bool:
    """Return whether a module's weight has lost components that no hook can restore."""
    weight = module._parameters.get("weight")
    if not is_packed(weight):
        return False
    if isinstance(weight, bnb.nn.Int8Params):
        state = getattr(module, "state", None)
        if weight.SCB is None and state is not None and state.SCB is not None:
            return bool(state.SCB.device != weight.device)
    hook = module.__dict__.get("_hf_hook") if weight.is_meta else None
    return is_incomplete(weight) and weights_map_of(hook) is None


def make_self_contained(module: Any) -> None:
    """Make one bitsandbytes module self-contained; no-op if it already is."""
    if is_self_contained(module) or not is_quantized(module):
        return
    weight = adopt(module._parameters["weight"])
    hook = module.__dict__.pop("_hf_hook", None)
    library: Any = type(module)
    module.__class__ = _self_contained_class(library)
    if hook is not None:
        module._hf_hook = hook
        before = module.__dict__.get("_old_forward")
        if getattr(before, "__func__", None) is library.forward:
            module._old_forward = types.MethodType(type(module).forward, module)
    if isinstance(module, bnb.nn.Linear8bitLt):
        _collect_int8(module)
    elif isinstance(weight, bnb.nn.Params4bit) and weight.quant_state is not None:
        module.__dict__.pop("quant_state", None)
        if layout.is_rounded(weight.quant_state):
            _logger.warning(
                "a forward pass of bitsandbytes has rounded the scales of a %s of shape %s; call "
                "loadstone.bitsandbytes.heal(model) before the model runs",
                type(module).__name__,
                list(weight.quant_state.shape),
            )
            weight.data, weight.quant_state = layout.rowwise(weight.data, weight.quant_state)
            weight.compress_statistics = False


def heal_all(models: Mapping[str, torch.nn.Module]) -> None:
    """Make all bitsandbytes modules of some models self-contained.

    The keys of ``models`` are prefixes for paths in errors. If scales are already lost, this raises
    ``q.scale_missing`` and changes nothing.
    """
    modules = {
        join_name(name, path) if path else name: module
        for name, model in models.items()
        for path, module in named_modules(model)
        if is_quantized(module) and not is_self_contained(module)
    }
    broken = [path for path, module in modules.items() if has_lost_scales(module)]
    if broken:
        raise new_error(
            "q.scale_missing",
            f"the scales of {counted(len(broken), 'quantized weight', 'quantized weights')} are "
            "lost: they were moved to meta without a copy; load the model again, and call heal() "
            "before it is moved",
            tensor=join_name(broken[0], "weight"),
        )
    for module in modules.values():
        make_self_contained(module)


def _collect_int8(module: Any) -> None:
    """Move scales back to the weight, from which the first forward pass moved them to the state."""
    weight, state = module.weight, module.state
    if is_packed(weight):
        weight.SCB = state.SCB if weight.SCB is None else weight.SCB
        weight.CB = weight.data
        state.reset_grads()
