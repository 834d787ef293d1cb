"""Compare reading a checkpoint over HTTP with curl, with equal numbers of ranges.

    python -m bench.remote [--gigabytes 1] [--delay 20]

The server is a separate process on 127.0.0.1 that waits before each answer, like a network. curl
runs in two ways: as one process (`-Z`) with one thread for all ranges, and as one process per
range, which gives as many threads as loadstone has.
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
ROUNDS = 7


def serve(path: str, delay: float, port: multiprocessing.connection.Connection) -> None:
    """Serve ranges of one file with sendfile."""
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
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.send(server.server_address[1])
    server.serve_forever()


def curl_ranges(url: str, size: int) -> list[list[str]]:
    """Return curl's arguments for each range."""
    step = -(-size // RANGES)
    common = ["-sS", "--noproxy", "*", "-o", "/dev/null", "-r"]
    begins = range(0, size, step)
    return [[*common, f"{begin}-{min(begin + step, size) - 1}", url] for begin in begins]


def by_curl(url: str, size: int) -> float:
    command = ["curl", "-sS", "-Z", "--parallel-immediate", "--parallel-max", str(RANGES)]
    for number, arguments in enumerate(curl_ranges(url, size)):
        command += (["--next"] if number else []) + arguments
    begun = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def by_curls(url: str, size: int) -> float:
    begun = time.perf_counter()
    processes = [subprocess.Popen(["curl", *arguments]) for arguments in curl_ranges(url, size)]
    if any(process.wait() for process in processes):
        raise SystemExit("curl failed")
    return time.perf_counter() - begun


def by_loadstone(url: str, _: int) -> float:
    begun = time.perf_counter()
    subprocess.run([COMMAND, "load", url, "--json"], check=True, capture_output=True)
    return time.perf_counter() - begun


WAYS = {"curl -Z": by_curl, f"{RANGES} of curl": by_curls, "loadstone": by_loadstone}


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
    """Write a file with tensors of 32 MB, like those of a transformer."""
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
    """Return the processor seconds of all finished children, which excludes the server."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(url: str, size: int, folder: Path) -> None:
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    processor: dict[str, list[float]] = {name: [] for name in WAYS}
    names = list(WAYS)
    for round_number in range(ROUNDS):
        # Rotate the order, because each run may change the machine's state for the next one.
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            before = processor_seconds()
            times[name].append(WAYS[name](url, size))
            processor[name].append(processor_seconds() - before)
        rates = (f"{name} {size / times[name][-1] / 1e9:.2f}" for name in names)
        print(f"round {round_number + 1}: {', '.join(rates)} GB/s")
    for name in names:
        rate = size / statistics.median(times[name]) / 1e9
        used = statistics.median(processor[name])
        print(f"{name}: {rate:.2f} GB/s, {used:.2f} s of processor time (medians of {ROUNDS})")
    for name in names[:-1]:
        ratios = [a / b for a, b in zip(times[name], times["loadstone"], strict=True)]
        print(f"loadstone / {name}: {statistics.median(ratios):.2f} (median of {ROUNDS})")
    convert(url, folder)


def convert(url: str, folder: Path) -> None:
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
