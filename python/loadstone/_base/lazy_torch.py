"""Import torch on first use, for modules that also work without it."""

from typing import Any


class _Late:
    def __getattr__(self, attribute: str) -> Any:
        import torch

        self.__dict__ = torch.__dict__  # later look-ups do not call __getattr__
        return getattr(torch, attribute)


torch = _Late()
