"""Find configs for a file: local ones, and repositories that diffusers knows by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A cache may contain hundreds of models.
FILES_MAX = 2_000

# The folder of a file may contain unrelated files.
BESIDE_MAX = 200


@dataclass(frozen=True)
class LocalConfig:
    """A local config, and the ``config`` and ``subfolder`` arguments that select it."""

    name: str
    subfolder: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        rest = f", subfolder={self.subfolder!r}" if self.subfolder else ""
        return f"config={self.name!r}{rest}"


def find(cls: Any, files: list[str], given: str | None, cache: str | None) -> list[LocalConfig]:
    """Return a class's configs from the given folder, the files' folder and the Hugging Face cache.

    Args:
        given: the caller's ``config``, if it is a folder.
        cache: the Hugging Face cache folder, unless it is the default one.
    """
    found: dict[str, LocalConfig] = {}
    for known in (*_near(given, files), *_cached(cache)):
        made_by = str(known.config.get("_class_name", ""))
        text = json.dumps(known.config, sort_keys=True, default=str)
        if made_by == cls.__name__ and text not in found:
            found[text] = known
    return list(found.values())


def uncached(checkpoint: Any, cache: str | None) -> list[str]:
    """Return uncached repositories of the file's family: the name up to the first dash."""
    from diffusers.loaders import single_file_utils

    library: Any = single_file_utils
    table: Mapping[str, Any] = library.DIFFUSERS_DEFAULT_PIPELINE_PATHS
    try:
        guess = library.infer_diffusers_model_type(checkpoint)
    except Exception:  # diffusers looks up tensors that this file lacks
        return []
    family = guess.partition("-")[0]
    names = [
        str(row["pretrained_model_name_or_path"])
        for kind, row in table.items()
        if kind.partition("-")[0] == family
    ]
    cached = {known.name for known in _cached(cache)}
    return [name for name in dict.fromkeys(names) if name not in cached]


def _near(given: str | None, files: list[str]) -> Iterator[LocalConfig]:
    roots = [Path(given)] if given is not None and Path(given).is_dir() else []
    roots += [Path(file).absolute().parent for file in files]
    for root in dict.fromkeys(roots):
        for parts, config in _configs(root, ("", "*/", "*/*/"), BESIDE_MAX):
            yield LocalConfig(str(root.joinpath(*parts[:1])), "/".join(parts[1:]), config)


def _cached(cache: str | None) -> Iterator[LocalConfig]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = ("models--*/snapshots/*/", "models--*/snapshots/*/*/")
    for (repository, _, _, *parts), config in _configs(
        Path(cache or HF_HUB_CACHE), folders, FILES_MAX
    ):
        name = repository.removeprefix("models--").replace("--", "/")
        yield LocalConfig(name, "/".join(parts), config)


def _configs(
    root: Path, folders: Iterable[str], most: int
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    paths = [path for folder in folders for path in root.glob(f"{folder}config.json")]
    for path in sorted(paths)[:most]:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            yield path.parent.relative_to(root).parts, config
