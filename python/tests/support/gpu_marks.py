"""The marks of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None,
        reason="no GPU of NVIDIA's: torch.cuda.is_available() is false",
    ),
]
