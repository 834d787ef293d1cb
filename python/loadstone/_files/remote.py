"""Options for remote access, from the caller or from environment variables."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from loadstone import _core
from loadstone._base.keywords import names_keywords

# Prefixes of the environment variables that are passed to the core.
_PREFIXES = ("AWS_", "HF_")
_VARIABLES = {
    *("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"),
    *("SSL_CERT_FILE", "XDG_CACHE_HOME", "HOME"),
}

_lock = threading.Lock()
_options: dict[str, str] = {}
_storages: dict[tuple[tuple[str, str], ...], _core.Storage] = {}


@names_keywords
def configure_remote(
    *,
    token: str | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    proxy: str | None = None,
    endpoint: str | None = None,
    s3_endpoint: str | None = None,
    s3_region: str | None = None,
    s3_access_key: str | None = None,
    s3_secret_key: str | None = None,
    s3_session_token: str | None = None,
) -> None:
    """Configure how this process reads ``https://``, ``hf://`` and ``s3://`` from now on.

    >>> loadstone.configure_remote(ca_file="corporate.pem")

    Each option replaces the environment variables in parentheses; ``None`` uses the variables. A
    call discards the options of earlier calls. loadstone writes no option to plans, messages or
    logs.

    Args:
        token: token of the hub (``HF_TOKEN``, or the file that ``hf auth login`` writes). loadstone
            sends it only to ``endpoint``, never to redirect targets.
        ca_file: PEM file of trusted authorities (``SSL_CERT_FILE``). Default: the system's.
        proxy: URL of a proxy (``HTTPS_PROXY``, ``ALL_PROXY``; ``NO_PROXY`` lists exceptions);
            ``""`` for none.
        endpoint: URL of the hub (``HF_ENDPOINT``). Default: ``https://huggingface.co``.
        s3_endpoint: URL of a store outside AWS (``AWS_ENDPOINT_URL``).
        s3_region, s3_access_key, s3_secret_key, s3_session_token: region and credentials
            (``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
            ``AWS_SESSION_TOKEN``). Without a key loadstone does not sign requests.
    """
    options = {
        "hub_token": token,
        "ca_file": None if ca_file is None else os.fsdecode(ca_file),
        "proxy": proxy,
        "hub_endpoint": endpoint,
        "s3_endpoint": s3_endpoint,
        "s3_region": s3_region,
        "s3_access_key": s3_access_key,
        "s3_secret_key": s3_secret_key,
        "s3_session_token": s3_session_token,
    }
    with _lock:
        _options.clear()
        _options.update({name: value for name, value in options.items() if value is not None})


def storage() -> _core.Storage:
    """Return the storage that opens all checkpoints, even local ones; cached by its options."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    with _lock:
        key = (*sorted(environment.items()), ("", ""), *sorted(_options.items()))
        if key not in _storages:
            _storages[key] = _core.remote_storage(
                environment, _options, threading.main_thread().ident or 0
            )
        return _storages[key]


def absolute(path: str) -> str:
    """Return an absolute path; do not resolve links and patterns.

    Remove the query of a URL, so that a pickle contains no signature.
    """
    if not _core.is_remote(path):
        return str(Path(path).absolute())
    location, mark, rest = path.partition("?")
    # The name of an object in a bucket may contain "?".
    return _core.without_secrets(location) + (mark + rest if path.startswith("s3:") else "")
