#!/usr/bin/env python3
"""Run safetensors' own Python tests with loadstone's functions in place of safetensors'.

    python tools/safetensors_tests.py FOLDER [options of pytest]

FOLDER is an unpacked source distribution of safetensors (from PyPI), or a checkout of its
repository, of the installed version.

The tests are unchanged. If loadstone has a function of the same name, imports from safetensors and
safetensors.torch get that function; ``loadstone.Error`` counts as ``SafetensorError``. Other names
stay (safetensors.numpy, serialize ...). The exit status is pytest's.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

TESTS = ("test_pt_model.py", "test_simple.py", "test_pt_comparison.py")
FUNCTIONS = ("load", "load_file", "load_model", "save", "save_file", "save_model")


def substitute() -> None:
    """Replace safetensors' functions by loadstone's, for imports from now on."""
    import safetensors
    import safetensors.torch

    import loadstone
    import loadstone.torch

    for name in FUNCTIONS:
        setattr(safetensors.torch, name, getattr(loadstone.torch, name))
    safetensors.safe_open = loadstone.safe_open
    both = (safetensors.SafetensorError, loadstone.Error)

    class Either(type):
        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, both)

    safetensors.SafetensorError = Either("SafetensorError", (Exception,), {})


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__.partition("\n\n")[2], file=sys.stderr)
        return 2
    import pytest

    root = Path(sys.argv[1])
    folder = next((each for each in (root / "bindings/python/tests", root / "tests", root)
                   if (each / TESTS[0]).is_file()), None)  # fmt: skip
    if folder is None:
        print(f"no tests of safetensors in {root}", file=sys.stderr)
        return 2
    substitute()
    with tempfile.TemporaryDirectory() as work:  # the tests write files to the current folder
        shutil.copytree(folder, Path(work, "tests"))
        before = Path.cwd()
        os.chdir(work)
        try:
            options = ["-p", "no:cacheprovider", "-q", "--rootdir", work, "-c", os.devnull]
            tests = [f"tests/{name}" for name in TESTS]
            return int(pytest.main([*options, *tests, *sys.argv[2:]]))
        finally:
            os.chdir(before)


if __name__ == "__main__":
    sys.exit(main())
