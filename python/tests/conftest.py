"""What holds for all tests."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch

# A shell starts its background jobs with SIGINT ignored, and children inherit that; here it must
# arrive, because the tests of interruption send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Recipes that tests make are not for the user's cache folder, nor those in there for tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="loadstone-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def torchs_own_functions() -> Iterator[None]:
    """ModelOpt leaves its own in their place when a forward pass of its experts fails."""
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear
