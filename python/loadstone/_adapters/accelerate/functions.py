"""Find the modules that imported a function of accelerate."""

from __future__ import annotations

import sys
from types import ModuleType

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils
import accelerate.utils.modeling

_USERS = ("diffusers", "transformers")


def places(name: str) -> list[ModuleType]:
    """Return the imported modules that contain this function of accelerate."""
    owners: list[ModuleType] = [
        accelerate.hooks,
        accelerate.utils.modeling,
        accelerate.utils,
        accelerate.big_modeling,
        accelerate,
    ]
    function = vars(accelerate.hooks)[name]
    users = [
        module
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] in _USERS and isinstance(module, ModuleType)
    ]
    return [module for module in owners + users if vars(module).get(name) is function]
