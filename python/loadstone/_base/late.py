"""torch for modules that also work without it: imported when it is first used."""

from typing import Any


class _Late:
    def __getattr__(self, attribute: str) -> Any:
        import torch

        self.__dict__ = torch.__dict__  # look-ups from now on are those of the module
        return getattr(torch, attribute)


torch = _Late()
