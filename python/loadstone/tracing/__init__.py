"""Make recipes from a library's own conversion code, which runs on tensors without data.

A library's Python code maps checkpoint tensors to model tensors. It runs here unchanged, on
:class:`Symbol` tensors, which have a shape, a dtype and an identity. A trace records the operations
on them as boxes to copy.

>>> trace = Trace(catalog)
>>> gate, up = trace.source("gate.weight"), trace.source("up.weight")
>>> trace.add("gate_up_proj", torch.cat([gate, up]))     # any code that moves elements
>>> recipes = trace.finish()                             # for loadstone.plan

A trace rejects other operations (arithmetic, code that looks at values, writes to a source) with an
error that names the operation, the checkpoint's tensor and the library's function:
:class:`loadstone.PlanError` with the code ``plan.data_dependent`` or ``plan.untraceable``.
"""

from __future__ import annotations

from loadstone.tracing import _operations  # noqa: F401  (gives symbols their operations)
from loadstone.tracing._trace import Symbol, Trace

__all__ = ["Symbol", "Trace"]
