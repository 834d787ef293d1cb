"""Keys that diffusers' single-file converters ignore, although its scripts map them.

An entry has an effect only if its target would be missing. Delete it when diffusers maps the key.
"""

from __future__ import annotations

from typing import Any

# Wan first-last-frame: mapped by scripts/convert_wan_to_diffusers.py.
_RENAMED = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}


def supplements() -> dict[str, str]:
    return dict(_RENAMED)


def supplement(converted: dict[str, Any], targets: Any) -> None:
    for key, target in _RENAMED.items():
        if key in converted and key not in targets and target in targets:
            converted.setdefault(target, converted.pop(key))
