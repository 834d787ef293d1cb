"""Find the causes of failed loads, which diffusers' own errors do not name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers

from loadstone._adapters.diffusers import local_configs
from loadstone._adapters.diffusers.local_configs import ConfigSources
from loadstone._base.errors import Error, listed, new_error

# Codes of plans for a file of a different model.
_MISMATCHES = ("plan.missing", "plan.shape", "plan.config_mismatch", "plan.untraceable")
# The class of this code is an OSError and a ValueError, as the errors of diffusers are.
_NO_CHECKPOINT = "format.no_checkpoint"
_INDEX, _CONFIG = "model_index.json", "config.json"
# Errors whose causes `explain` finds. diffusers' code fails in any way for a different model.
EXPLAINED = (
    OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError,
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt")


def explain(
    cls: Any, function: str, source: Any, kwargs: Mapping[str, Any], failure: Exception
) -> Error | None:
    """Return an error that names the cause of a failed call; ``None`` if the cause is unknown."""
    subfolder = kwargs.get("subfolder") or ""
    is_folder = function == "from_pretrained"
    config = source if is_folder else kwargs.get("config") or ""
    if isinstance(failure, Error):
        is_wrong = config and failure.code in _MISMATCHES
        return _wrong_class(cls, function, Path(config, subfolder)) if is_wrong else None
    error = _explain_source(cls, function, source, kwargs, failure)
    if error is None and config and not isinstance(failure, OSError):
        error = _wrong_class(cls, function, Path(config, subfolder))
    if error is not None or isinstance(failure, OSError | ValueError):
        return error
    message = (
        f"diffusers failed to load this as {cls.__name__} ({type(failure).__name__}: "
        f"{_reason(failure)}): check that the class, the config and the file belong to the same "
        "model, and the arguments"
    )
    return _error(Path(source), message, "plan.options")


def _explain_source(
    cls: Any, function: str, source: Any, kwargs: Mapping[str, Any], failure: Exception
) -> Error | None:
    subfolder = kwargs.get("subfolder") or ""
    if function == "from_pretrained":
        return _explain_folder(cls, str(source), kwargs, failure) or _explain_weights(
            cls, Path(source, subfolder), kwargs
        )
    path = Path(source)
    if path.is_dir():
        message = "this is a folder: pass one of its files, or call from_pretrained"
        return _error(path, message, found=_files_in(path))
    if str(source).startswith(("http:", "https:")):
        return None
    if not path.is_file():
        return _error(path, "there is no such file", "io.not_found")
    if kwargs.get("config") is None:
        return _explain_guess(cls, path, kwargs, failure) if isinstance(failure, OSError) else None
    return _explain_folder(cls, str(kwargs["config"]), kwargs, failure)


def _explain_guess(
    cls: Any, path: Path, kwargs: Mapping[str, Any], failure: Exception
) -> Error | None:
    """Explain that diffusers cannot open the config that it chooses by the file's tensors."""
    known = local_configs.find(cls, [str(path)], ConfigSources(cache=kwargs.get("cache_dir")))
    message = (
        f"diffusers cannot open the config that it chooses for this file ({_reason(failure)}): "
        f"pass config=, a folder with the model's {cls.config_name}"
        f"{f', or infer_config=True, which tries {known[0]}' if known else ''}"
    )
    return _error(path, message, "io.not_found", field="config")


def _explain_folder(
    cls: Any, name: str, kwargs: Mapping[str, Any], failure: Exception
) -> Error | None:
    root = Path(name)
    if root.is_file():
        is_config = root.suffix == ".json"
        message = "this is a file: call from_single_file, or pass the model's folder"
        return _explain_json(root) if is_config else _error(root, message)
    if not root.is_dir():
        message = f"neither a folder, nor a repository that diffusers can open: {_reason(failure)}"
        return _error(root, message, "io.not_found")
    folder = root / (kwargs.get("subfolder") or "")
    if not folder.is_dir():
        message = f"the folder has no subfolder {kwargs['subfolder']!r}"
        return _error(root, message, "io.not_found", expected=", ".join(_subfolders(root)))
    return _explain_config(cls, folder) or _explain_components(cls, folder, kwargs)


def _explain_config(cls: Any, folder: Path) -> Error | None:
    path = folder / cls.config_name
    if path.is_file():
        return _explain_json(path)
    message = f"the folder has no {cls.config_name}"
    if cls.config_name == _CONFIG and (folder / _INDEX).is_file():
        message = "this is a pipeline's folder: pass the subfolder of the model"
        return _error(folder, message, expected=", ".join(_subfolders(folder)))
    if cls.config_name == _INDEX and (folder / _CONFIG).is_file():
        name = _class_of(folder) or "its class"
        message = f"this is the folder of one model: call from_pretrained of {name}"
        return _error(folder, message, expected=f"a folder with {_INDEX}")
    return _error(folder, message, "io.not_found", found=_files_in(folder))


def _explain_json(path: Path) -> Error | None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        return _error(path, f"the file is not valid JSON: {reason}", "format.config")
    return None


def _explain_components(cls: Any, folder: Path, kwargs: Mapping[str, Any]) -> Error | None:
    """Explain an absent or broken component of a pipeline."""
    if cls.config_name != _INDEX:
        return None
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    for name, entry in index.items():
        if name in kwargs or not isinstance(entry, list) or None in entry:
            continue
        path = folder / name
        if not path.is_dir():
            message = (
                f"{_INDEX} lists the component {name!r} ({entry[-1]}), but the folder has no such "
                f"subfolder: restore it, or pass {name}=None or a model"
            )
            return _error(folder, message, "io.not_found", found=", ".join(_subfolders(folder)))
        for config in sorted(path.glob("*config.json")):
            if (error := _explain_json(config)) is not None:
                return error
    return None


def _explain_weights(cls: Any, folder: Path, kwargs: Mapping[str, Any]) -> Error | None:
    """Explain that a folder has no file of weights, or none of the requested variant."""
    if cls.config_name not in (_CONFIG, _INDEX):
        return None
    suffixes = _WEIGHTS[:1] if kwargs.get("use_safetensors") else _WEIGHTS
    variant = kwargs.get("variant")
    middle = f".{variant}" if variant else ""
    weights = [
        path
        for path in sorted(folder.glob("*/*" if cls.config_name == _INDEX else "*"))
        if path.suffix in _WEIGHTS
    ]
    if any(
        path.suffix in suffixes and (f"{middle}." in path.name or f"{middle}-" in path.name)
        for path in weights
    ):
        return None
    names = [str(path.relative_to(folder)) for path in weights]
    return _error(
        folder,
        f"the folder has no weights{f' of the variant {variant!r}' if variant else ''}",
        found=listed(names) or "none",
        expected=f"diffusion_pytorch_model{middle}.safetensors",
    )


def _wrong_class(cls: Any, function: str, folder: Path) -> Error | None:
    path = folder / cls.config_name
    name = _class_of(folder, cls.config_name)
    kinds = diffusers.ModelMixin, diffusers.DiffusionPipeline
    is_concrete = issubclass(cls, kinds) and cls is not diffusers.DiffusionPipeline
    if not is_concrete or name in ("", cls.__name__):
        return None
    message = f"the config declares a different class: call {function} of {name}"
    return _error(path, message, "plan.options", found=name, expected=cls.__name__)


def _class_of(folder: Path, config_name: str = _CONFIG) -> str:
    try:
        config = json.loads((folder / config_name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("_class_name", "")) if isinstance(config, dict) else ""


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.json"))


def _files_in(folder: Path) -> str:
    return listed(sorted(path.name for path in folder.iterdir())) or "an empty folder"


def _reason(failure: Exception) -> str:
    return str(failure).strip().partition("\n")[0].rstrip(".")


def _error(path: Path, message: str, code: str = _NO_CHECKPOINT, **where: Any) -> Error:
    return new_error(code, message, path=str(path), **where)
