"""Runs scripts in separate processes that do not import libraries again.

A server imports the libraries and forks for each script; the script itself imports loadstone.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server; it ends with this process, because that closes the server's stdin."""
    binaries = Path(os.environ.get("LOADSTONE_CLI", Path(sys.executable))).parent
    paths = [str(HERE.parent), str(HERE.parents[3]), os.environ.get("PYTHONPATH", "")]
    changed = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [sys.executable, HERE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | changed,
        text=True,
    )


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, like ``python FILE`` with this repository on the path."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        script, out, err = (Path(place, name) for name in ("script.py", "out", "err"))
        script.write_text(text, encoding="utf-8")
        print(json.dumps([str(each) for each in (folder, script, out, err)]), file=server.stdin)
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(script, status, out.read_text(), err.read_text())


def _serve() -> None:
    """Run scripts until the input ends.

    The server forks for each script, and only the child leaves the loop to run it.
    """
    for line in sys.stdin:
        folder, script, out, err = json.loads(line)
        child = os.fork()
        if child == 0:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        return
    os.chdir(folder)
    for number, name, mode in ((0, os.devnull, "rb"), (1, out, "wb"), (2, err, "wb")):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), number)
    sys.argv = [script]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips two seconds of library teardown


if __name__ == "__main__":
    from diffusers import WanPipeline
    from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

    del WanPipeline, LlamaForCausalLM, Qwen3MoeForCausalLM
    gc.freeze()
    _serve()
