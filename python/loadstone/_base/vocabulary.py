"""Types of the arguments that public functions share. The core checks their strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

MissingPolicy = Literal["error", "initialise", "initialize", "zeros", "keep"]
Missing = MissingPolicy | Mapping[str, MissingPolicy]
Unexpected = Literal["warn", "error", "ignore"]
Tie = Literal["split", "keep"]
ReceiptDigest = Literal["xxh3-128", "sha256-tree"]
PageCache = Literal["auto", "keep", "release"]
Experts = Literal["keep", "fused", "separate"]
Mode = Literal["exact", "modelopt-compat"]
ModelOptMode = Literal["exact", "modelopt-compat", "modelopt-export"]
Style = Literal["modelopt", "compressed-tensors"]
MergeMethod = Literal["linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"]

# Bytes, or a size such as "8GiB", per device. A device is a string, an integer or a
# `torch.device`; the key type is Any, because the key of a `Mapping` is invariant, so a union would
# reject a `dict[str, int]`.
MaxMemory = Mapping[Any, int | str]
