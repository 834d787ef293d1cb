"""Tests that a URL given as a local path is rejected, and that errors omit the URL's query.

Nothing is written. The tests cover every command option and every function that takes a path.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import no_environment
from remote_server import Answer, Seen, Server

import loadstone
import loadstone.torch

__all__ = ["no_environment"]

SECRET = "S3CR3T"
# A URL without a server.
URL = f"https://127.0.0.1:1/dir/x.json?X-Amz-Signature={SECRET}"
COMMANDS = ("inspect", "plan", "load", "convert", "merge", "verify", "bench")
PATHS = re.compile(r"^ +(?:-\w,)?(--[\w-]+) (?:FILE|DIR|FOLDER|PATH|ADAPTER|URL)\b", re.MULTILINE)
# Options that require a second option.
NEEDED: dict[str, list[str]] = {
    "--rules": ["--skeleton", "skeleton.json"],
    "--receipt-file": ["--receipt", "xxh3-128"],
    "--offload-folder": ["--device-map", "disk"],
}
# Options without a path whose values the command prints.
OTHER_VALUES = ("--dtype", "--shard-size", "--style", "--missing", "--device-map", "--staging")
# --ca-file is read only when a host is contacted, and --proxy takes a URL.
OTHERS = {"--ca-file", "--proxy"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, "m.safetensors")
    loadstone.save_skeleton(torch.nn.Linear(2, 2, bias=False), "skeleton.json")
    loadstone.plan(torch.nn.Linear(2, 2, bias=False), "m.safetensors").save("plan.json")
    return tmp_path


def options_of(command: str) -> list[str]:
    return [each for each in PATHS.findall(run(command, "--help").stdout) if each not in OTHERS]


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_or_makes_what_a_url_holds(work: Path, command: str) -> None:
    source, target = ["m.safetensors"], []
    if command == "convert":
        target = ["out.safetensors"]
    if command == "merge":
        source, target = ["m.safetensors:0.5", "m.safetensors:0.5"], ["-o", "out.safetensors"]
    calls: list[list[str]] = [[URL, *source[1:], *target]]
    for option in options_of(command):
        needed = [] if command == "convert" else NEEDED.get(option, [])
        rest = [] if option == "--output" else target
        calls.append([*source, *rest, *needed, option, URL])
    if command == "convert":
        calls.append([*source, URL])
    words = run(command, "--help").stdout.split()
    calls += [[*source, *target, each, URL] for each in OTHER_VALUES if each in words]
    before = names_in(work)
    named = 0
    for arguments in calls:
        for more in ([], ["--json"], ["-v"]):
            done = run(command, *arguments, *more)
            said = done.stdout + done.stderr
            assert SECRET not in said, arguments
            assert done.returncode != 0, arguments
            named += "127.0.0.1" in said or "x.json" in said
        assert names_in(work) <= before | {"out.safetensors"}, arguments
        Path("out.safetensors").unlink(missing_ok=True)
    assert named >= len(calls)  # control: the outputs name the URL


def test_the_options_are_found() -> None:
    """Control: the test above finds the options that take a path."""
    found = {option for command in COMMANDS for option in options_of(command)}
    expected = {"--skeleton", "--rules", "--html", "--output", "--receipt-file", "--offload-folder"}
    assert expected | {"--plan", "--metadata", "--lora"} <= found, found


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2, bias=False)


def plan() -> loadstone.Plan:
    return loadstone.plan(model(), "m.safetensors")


def receipt() -> loadstone.Receipt:
    report = loadstone.load(model(), "m.safetensors", receipt="xxh3-128")
    assert report.receipt is not None
    return report.receipt


FUNCTIONS: dict[str, Callable[[], object]] = {
    "inspect": lambda: loadstone.inspect(URL),
    "open": lambda: loadstone.open(URL),
    "load_file": lambda: loadstone.load_file(URL),
    "safe_open": lambda: loadstone.safe_open(URL).keys(),
    "load": lambda: loadstone.load(model(), URL),
    "lora": lambda: loadstone.load(model(), "m.safetensors", lora=URL),
    "rules": lambda: loadstone.plan(model(), "m.safetensors", rules=URL),
    "offload_folder": lambda: loadstone.plan(
        model(), "m.safetensors", device_map="disk", offload_folder=URL
    ),
    "dtype": lambda: loadstone.plan(model(), "m.safetensors", dtype=URL),
    "skeleton": lambda: loadstone.plan(URL, "m.safetensors"),  # type: ignore[arg-type]
    "Plan.load": lambda: loadstone.Plan.load(URL),
    "Plan.load root": lambda: loadstone.Plan.load("plan.json", root=URL),
    "Plan.load offload_folder": lambda: loadstone.Plan.load("plan.json", offload_folder=URL),
    "Plan.save": lambda: plan().save(URL),
    "Plan.to_html": lambda: plan().to_html(URL),
    "Receipt.load": lambda: loadstone.Receipt.load(URL),
    "Receipt.save": lambda: receipt().save(URL),
    "save_skeleton": lambda: loadstone.save_skeleton(model(), URL),
    "save_file": lambda: loadstone.torch.save_file({"a": torch.ones(1)}, URL),
    "convert from": lambda: loadstone.convert(URL, "out.safetensors"),
    "convert to": lambda: loadstone.convert("m.safetensors", URL),
    "convert to a folder": lambda: loadstone.convert("m.safetensors", URL.replace("x.json", "x")),
    "convert rules": lambda: loadstone.convert("m.safetensors", "o.safetensors", rules=URL),
    "convert metadata": lambda: loadstone.convert("m.safetensors", "o.gguf", metadata=URL),
    "convert imatrix": lambda: loadstone.convert(
        "m.safetensors", "o.gguf", quantize="q4_0", imatrix=URL
    ),
    "convert quantize": lambda: loadstone.convert("m.safetensors", "o", quantize=URL),
    "merge": lambda: loadstone.merge(URL, "o.safetensors"),
    "merge adapter": lambda: loadstone.merge("m.safetensors", "o.safetensors", lora=URL),
    "merge to": lambda: loadstone.merge("m.safetensors", URL),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_shows_or_makes_what_a_url_holds(work: Path, name: str) -> None:
    before = names_in(work)
    with pytest.raises(Exception) as raised:
        FUNCTIONS[name]()
    error = raised.value
    assert not isinstance(error, TypeError), error
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again, error.__cause__, error.__context__):
        assert SECRET not in str(each) + repr(each) + str(getattr(each, "__dict__", "")), each
    assert any(part in str(error) for part in ("127.0.0.1", "x.json", "'https'")), error  # control
    assert names_in(work) == before


def test_errors_made_in_python_hide_what_they_are_given() -> None:
    from loadstone._base.errors import new_error

    error = new_error(
        "plan.options", f"'{URL}' is not one", path=URL, tensor=URL, found=URL, expected=[URL]
    )
    text = str(error) + repr(error) + str({**vars(error), "expected": ""})
    assert SECRET not in text
    assert error.path == "https://127.0.0.1:1/dir/x.json"  # control


ECHOES: dict[str, Callable[[int], tuple[int, dict[str, str]]]] = {
    "no URL": lambda _: (302, {"Location": f"http://[{SECRET}"}),
    "no host": lambda _: (302, {"Location": f"http://?sig={SECRET}"}),
    "another scheme": lambda _: (302, {"Location": f"ftp://u:{SECRET}@h/x?sig={SECRET}#{SECRET}"}),
    "round": lambda n: (302, {"Location": f"/m.safetensors?sig={SECRET}{n}"}),
    "range": lambda _: (206, {"Content-Range": f"bytes {SECRET}"}),
    "encoding": lambda _: (200, {"Content-Encoding": SECRET}),
    "error code": lambda _: (403, {"X-Error-Code": SECRET, "WWW-Authenticate": SECRET}),
    "etag": lambda n: (206, {"ETag": f'"{n}{SECRET}"'}),
    "linked etag": lambda n: (206, {"X-Linked-ETag": f'"{n}{SECRET}"'}),
    "date": lambda n: (206, {"ETag": "", "Last-Modified": f"{n} {SECRET}"}),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_what_a_host_echoes(work: Path, echo: str) -> None:
    """A host that receives the signature may repeat it anywhere in its responses."""
    server = Server()
    # The file needs a second request, in which loadstone detects the change.
    safetensors.torch.save_file({"weight": torch.ones(2048, 2048)}, "large.safetensors")
    server.files["/m.safetensors"] = Path("large.safetensors").read_bytes()

    def route(seen: Seen) -> Answer:
        whole = server.ranged(seen, "/m.safetensors")
        status, headers = ECHOES[echo](len(server.seen))
        return Answer(status, {**whole.headers, **headers}, whole.body)

    server.route = route
    try:
        url = server.url(f"/m.safetensors?sig={SECRET}")
        for more in ([], ["--json"]):
            done = run("load", url, *more)
            assert done.returncode not in (0, 2)
            assert "m.safetensors" in done.stdout + done.stderr
            assert SECRET not in done.stdout + done.stderr
        with pytest.raises(loadstone.Error) as caught:
            loadstone.load_file(url)
        assert SECRET not in str(caught.value) + repr(vars(caught.value))
        server.route = lambda _: None  # control
        assert run("load", url).returncode == 0
    finally:
        server.close()
