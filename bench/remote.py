"""A checkpoint read over HTTP beside curl with as many ranges at once.

    python -m bench.remote [--gigabytes 1] [--delay 20]

The server is a process of its own on 127.0.0.1 and waits before each answer, as a network does.
"""

from __future__ import annotations

import argparse
import http.server
import json
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = os.environ.get("LOADSTONE_CLI", str(Path(sys.executable).with_name("loadstone")))
RANGES = 16
ROUNDS = 5


def serve(path: str, delay: float, port: multiprocessing.connection.Connection) -> None:
    """Serves ranges of one file by sendfile."""
    size = Path(path).stat().st_size

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin = int(match[1]) if match else 0
            end = min(int(match[2]) + 1, size) if match else size
            time.sleep(delay)
            self.send_response(206 if match else 200)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("ETag", '"1"')
            self.end_headers()
            with open(path, "rb") as file:  # noqa: PTH123
                self.connection.sendfile(file, begin, end - begin)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.send(server.server_address[1])
    server.serve_forever()


def by_curl(url: str, size: int) -> float:
    step = -(-size // RANGES)
    command = ["curl", "-sS", "--noproxy", "*", "-Z", "--parallel-max", str(RANGES)]
    command.append("--parallel-immediate")
    for number, begin in enumerate(range(0, size, step)):
        last = min(begin + step, size) - 1
        command += ["--next"] if number else []
        command += ["-sS", "--noproxy", "*", "-r", f"{begin}-{last}", "-o", "/dev/null", url]
    begun = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - begun


def by_loadstone(url: str) -> tuple[float, dict]:
    begun = time.perf_counter()
    done = subprocess.run([COMMAND, "load", url, "--json"], check=True, capture_output=True)
    return time.perf_counter() - begun, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds a request")
    arguments = parser.parse_args()
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write(path, int(arguments.gigabytes * 1e9))
        parent, child = multiprocessing.Pipe()
        server = multiprocessing.Process(
            target=serve, args=(str(path), arguments.delay / 1000, child), daemon=True
        )
        server.start()
        url = f"http://127.0.0.1:{parent.recv()}/model.safetensors"
        measure(url, path.stat().st_size, Path(folder))
        server.terminate()


def write(path: Path, size: int) -> None:
    """Tensors of 32 MB, as a transformer has."""
    count, each = max(size // 32_000_000, 1), 32_000_000
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [4000, 4000],
            "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(os.urandom(each // 4) * 4)


def processor_seconds() -> float:
    """Of all children that have ended; the server is none of them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(url: str, size: int, folder: Path) -> None:
    ratios, times, processor = [], [], []
    for round_number in range(ROUNDS):
        before = processor_seconds()
        # In turns, as whoever comes second may find the machine in another state.
        if round_number % 2:
            ours, report = by_loadstone(url)
            between = processor_seconds()
            curl = by_curl(url, size)
            used = (processor_seconds() - between, between - before)
        else:
            curl = by_curl(url, size)
            between = processor_seconds()
            ours, report = by_loadstone(url)
            used = (between - before, processor_seconds() - between)
        ratios.append(curl / ours)
        times.append((curl, ours))
        processor.append(used)
        print(
            f"curl, {RANGES} ranges {size / curl / 1e9:.2f} GB/s; loadstone {size / ours / 1e9:.2f}"
            f" GB/s ({report['seconds']:.2f} s of it reading)"
        )
    for number, name in enumerate(("curl", "loadstone")):
        seconds = statistics.median(each[number] for each in times)
        used = statistics.median(each[number] for each in processor)
        print(f"{name}: {size / seconds / 1e9:.2f} GB/s, {used:.2f} s of processor time (medians)")
    print(f"loadstone / curl: {statistics.median(ratios):.2f} (median of {ROUNDS})")
    before = shutil.disk_usage(folder).used
    out = folder / "out"
    subprocess.run([COMMAND, "convert", url, out, "--json"], check=True, capture_output=True)
    used = shutil.disk_usage(folder).used - before
    written = sum(each.stat().st_size for each in out.iterdir())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"convert: disk used {used / 1e6:.0f} MB, output {written / 1e6:.0f} MB")
    print(f"largest resident memory of all children {peak / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
