"""``python -m loadstone export-rules``: write the conversions of a model type as rules."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

from loadstone._base.adapters import adapters_with, resolve
from loadstone._base.errors import new_error
from loadstone._base.text import write_text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadstone export-rules",
        allow_abbrev=False,
        description="Write the conversions of a model type as rules, for checkpoints of any depth "
        "and number of experts. The rules are first checked with models of two sizes.",
    )
    parser.add_argument("--library", required=True, choices=list(adapters_with("rules")))
    parser.add_argument(
        "--model-type", required=True, help="as in config.json, for example mixtral"
    )
    parser.add_argument(
        "--config",
        metavar="FOLDER",
        help="a folder with config.json, if the class or the sizes are not the defaults",
    )
    parser.add_argument("-o", dest="output", metavar="FILE", help="default: standard output")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        raise new_error("plan.options", "transformers is not installed", field="library")
    export = resolve(adapters_with("rules")[options.library].rules)
    text = json.dumps(export(options.model_type, options.config), indent=1) + "\n"
    if options.output is None:
        sys.stdout.write(text)
        return 0
    write_text(options.output, text)
    return 0
