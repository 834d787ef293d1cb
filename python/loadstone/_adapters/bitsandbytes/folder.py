"""Add to offload folders the components of quantized weights that hooks need.

The core writes packed bytes and scales; this module adds code tables and state blobs, and renames
tensors as bitsandbytes does.
"""

from __future__ import annotations

import torch
from bitsandbytes import functional

from loadstone import _core
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._base.dtypes import dtype_name
from loadstone._base.names import join_name, parent_name
from loadstone._execute.offload import add_tensor


def complete_on_disk(weight: QuantizedWeight, name: str, folder: _core.OffloadFolder) -> None:
    """Add the components that the core does not write, before the folder is committed."""
    path = parent_name(name)
    if weight.quant_type == "int8":
        folder.rename(f"{name}.absmax", join_name(path, "SCB"))
    else:
        weight.code = functional.get_4bit_type(weight.quant_type, device="cpu")
        folder.retype(name, dtype_name(weight.data.dtype), list(weight.data.shape))
    if weight.nested:
        offset = f"{name}.nested_offset"
        weight.offset = torch.frombuffer(bytearray(folder.value(offset)), dtype=torch.float32)[0]
        weight.nested_code = functional.create_dynamic_map()
        folder.remove(offset)
    for component, tensor in weight.state_dict(path).items():
        if not tensor.is_meta:
            add_tensor(folder, component, tensor)
