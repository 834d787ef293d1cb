"""Keys that the library's single-file converters leave out, though its own scripts map them.

Each entry is a key that a converter passes on under the file's name, and its target. It has an
effect only if the target would be missing, and is deleted when the library maps the key.
"""

from __future__ import annotations

from typing import Any

# Wan first-last-frame: scripts/convert_wan_to_diffusers.py maps it, the single-file converter not.
_RENAMED = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}


def supplements() -> dict[str, str]:
    """Key of a file, and the target that it is."""
    return dict(_RENAMED)


def supplement(converted: dict[str, Any], targets: Any) -> None:
    """Renames unused keys to the missing targets that they belong to."""
    for key, target in _RENAMED.items():
        if key in converted and key not in targets and target in targets:
            converted.setdefault(target, converted.pop(key))
