"""Recipes from a library's own conversion code, run on tensors that have no data.

Which tensors of a checkpoint become which tensors of a model is knowledge that libraries keep, as
Python code that works on tensors. That code runs here unchanged, on :class:`Symbol` tensors: these
have a shape, a dtype and an identity, and what is done to them is written down as boxes to copy.

>>> trace = Trace(catalog)
>>> gate, up = trace.source("gate.weight"), trace.source("up.weight")
>>> trace.add("gate_up_proj", torch.cat([gate, up]))     # any code that moves elements about
>>> recipes = trace.finish()                             # for loadstone.plan

What cannot be written down so (arithmetic, code that looks at values, writes into a source) is
refused with an error that names the operation, the tensor of the checkpoint and the function of the
library: :class:`loadstone.PlanError` with the code ``plan.data_dependent`` or ``plan.untraceable``.
"""

from __future__ import annotations

from loadstone.tracing import _operations  # noqa: F401  (gives symbols their operations)
from loadstone.tracing._trace import Symbol, Trace

__all__ = ["Symbol", "Trace"]
