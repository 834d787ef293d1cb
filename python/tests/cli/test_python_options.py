"""Options that only ``python -m loadstone`` has."""

import argparse

import pytest

from loadstone._command import command


def test_the_command_names_the_python_command(run, small, tmp_path):
    for name in ("convert", "verify"):
        for option in (("--converter", "x"), ("--converter=x",), ("--trust-code",)):
            done = run(name, small, tmp_path / "out.gguf", *option, status=2)
            flag = option[0].partition("=")[0]
            message = f"{flag} is an option of the Python command: 'python -m loadstone {name}'"
            assert message in done.stderr
    done = run("merge", small, "-o", tmp_path / "out", "--converter=x", status=2)
    assert "Python command" not in done.stderr


def test_the_command_names_every_option_of_python(run, small, tmp_path, monkeypatch):
    """The options that the package takes for itself, except those that the command has too."""
    found = []
    add = argparse.ArgumentParser.add_argument

    def recorded(self, *names, **options):
        found.extend(names)
        return add(self, *names, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", recorded)
    monkeypatch.setattr(command, "_traced_source", lambda _: "folder")

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.model_folder, "trace", stop)
    with pytest.raises(KeyboardInterrupt):
        command.prepare(["convert", "a", "b.gguf"], tmp_path)
    own = {name for name in found if name not in run("convert", "--help", status=0).stdout.split()}
    assert own == {"--converter", "--trust-code"}
