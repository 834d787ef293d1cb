"""Find configs for a file: local ones, and repositories that diffusers knows by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Limit on the configs to read from a cache, which may contain hundreds of models.
CACHED_MAX = 2_000

# Limit on the configs to read near a file, whose folder may contain unrelated files.
NEARBY_MAX = 200


_logger = logging.getLogger("loadstone.diffusers")


@dataclass(frozen=True)
class ConfigSources:
    """Sources of alternative configs.

    Attributes:
        argument: the caller's ``config``, which may be a folder.
        cache: the Hugging Face cache folder, unless it is the default one.
        is_option: the function takes a ``config``.
    """

    argument: str | None = None
    cache: str | None = None
    is_option: bool = False


@dataclass(frozen=True)
class LocalConfig:
    """A local config, and the ``config`` and ``subfolder`` arguments that select it."""

    name: str
    subfolder: str
    config: dict[str, Any]

    def __str__(self) -> str:
        subfolder = f", subfolder={self.subfolder!r}" if self.subfolder else ""
        return f"config={self.name!r}{subfolder}"


def find(cls: Any, files: list[str], sources: ConfigSources) -> list[LocalConfig]:
    """Return a class's configs from the caller's folder, the files' folders and the cache.

    A quantized folder's config comes without its ``quantization_config``, after the others.
    """
    plain: dict[str, LocalConfig] = {}
    quantized: dict[str, LocalConfig] = {}
    for local in (*_nearby(sources.argument, files), *_cached(sources.cache)):
        if local.config.get("_class_name") == cls.__name__:
            configs = plain if local.config.pop("quantization_config", None) is None else quantized
            text = json.dumps(local.config, sort_keys=True, default=str)
            configs.setdefault(text, local)
    return [*plain.values(), *(quantized[text] for text in quantized.keys() - plain.keys())]


def beside(cls: Any, file: str) -> LocalConfig | None:
    """Return the config in a file's own folder, if it is of this class."""
    folder = Path(file).absolute().parent
    for _, config in _configs(folder, ("",), 1):
        if config.get("_class_name") == cls.__name__:
            return LocalConfig(str(folder), "", config)
    return None


def uncached(checkpoint: Any, cache: str | None) -> list[str]:
    """Return uncached repositories of the file's model family, the name up to the first dash."""
    from diffusers.loaders import single_file_utils

    library: Any = single_file_utils
    try:
        family = library.infer_diffusers_model_type(checkpoint).partition("-")[0]
    except Exception:  # diffusers looks up tensors that this file lacks
        return []
    names = [
        str(row["pretrained_model_name_or_path"])
        for model_type, row in library.DIFFUSERS_DEFAULT_PIPELINE_PATHS.items()
        if model_type.partition("-")[0] == family
    ]
    cached = {local.name for local in _cached(cache)}
    return [name for name in dict.fromkeys(names) if name not in cached]


def warn_of_request(name: str) -> None:
    """Name what diffusers requests from the hub: without a connection it retries for 20 s."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not HF_HUB_OFFLINE:
        _logger.warning(
            "diffusers requests the config of %r from the Hugging Face Hub, because it is not in "
            "the cache; pass config=, a local folder, to load without the hub",
            name,
        )


def _nearby(folder: str | None, files: list[str]) -> Iterator[LocalConfig]:
    roots = [Path(folder)] if folder is not None and Path(folder).is_dir() else []
    roots += [Path(file).absolute().parent for file in files]
    for root in dict.fromkeys(roots):
        for parts, config in _configs(root, ("", "*/", "*/*/"), NEARBY_MAX):
            yield LocalConfig(str(root.joinpath(*parts[:1])), "/".join(parts[1:]), config)


def _cached(cache: str | None) -> Iterator[LocalConfig]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = ("models--*/snapshots/*/", "models--*/snapshots/*/*/")
    for (repository, _, _, *parts), config in _configs(
        Path(cache or HF_HUB_CACHE), folders, CACHED_MAX
    ):
        name = repository.removeprefix("models--").replace("--", "/")
        yield LocalConfig(name, "/".join(parts), config)


def _configs(
    root: Path, folders: Iterable[str], count_max: int
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    paths = [path for folder in folders for path in root.glob(f"{folder}config.json")]
    for path in sorted(paths)[:count_max]:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            yield path.parent.relative_to(root).parts, config
