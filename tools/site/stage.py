"""Build the documentation site from the pages of docs/ and from the sources.

    python tools/site/stage.py build/docs

Warnings of Sphinx are errors, including broken links between pages.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import loadstone
from loadstone._base.adapters import ADAPTERS

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent
COMMAND = Path(sys.executable).with_name("loadstone")
CPP_SECTIONS = "*description inner* define enum func typedef var public-*"
# Pages of the repository's root, by their names on the site.
ROOT_PAGES = {
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "HACKING.md": "hacking",
    "SECURITY.md": "security",
}


def link(target: str, page: Path) -> str | None:
    """Return a link of ``page`` as it is on the site; None if the site lacks the linked file."""
    if "://" in target or target.startswith("#"):
        return target
    path, _, part = target.partition("#")
    full = (page.parent / path).resolve()
    part = f"#{part}" if part else ""
    if full.parent == REPOSITORY and full.name in ROOT_PAGES:
        return "/" + ROOT_PAGES[full.name] + ".md" + part
    docs = REPOSITORY / "docs"
    if full == docs / "README.md" or full == docs:
        return "/index.md"
    if full.is_relative_to(docs) and full.is_file():
        return "/" + str(full.relative_to(docs)) + part
    return None


def staged(page: Path) -> str:
    """Return the text of a page with links to the site's pages."""

    def replace(match: re.Match[str]) -> str:
        target = link(match[3], page)
        return f"{match[1]}[{match[2]}]({target})" if target else match[2]

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, page.read_text(encoding="utf-8"))


def toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
    )


def index() -> str:
    """Return docs/README.md, whose sections become the navigation of the site."""
    text = staged(REPOSITORY / "docs" / "README.md")
    trees = [toctree("Start", list(ROOT_PAGES.values())[:1])]
    seen: set[str] = set()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption = section.partition("\n")[0]
        pages = [page for page in re.findall(r"\]\(/([^)#]+)\.md", section) if page not in seen]
        seen.update(pages)
        trees.append(toctree(caption, pages))
    reference = ["reference/python", "reference/cpp", "reference/command", "reference/codes"]
    trees += [toctree("API", reference), toctree("Project", list(ROOT_PAGES.values())[1:])]
    return text + "".join(trees)


def documented(module: ModuleType, seen: set[object]) -> list[str]:
    """Return directives for the module's public names that no other section lists."""
    lines = []
    for name in getattr(module, "__all__", dir(module)):
        value = getattr(module, name)
        is_own = getattr(value, "__module__", "").split(".")[0] == "loadstone"
        if name.startswith("_") or not is_own or value in seen:
            continue
        seen.add(value)
        kind = "function"
        if isinstance(value, type):
            kind = "exception" if issubclass(value, Exception) else "class"
        lines += [f".. auto{kind}:: {module.__name__}.{name}", ""]
    return lines


def python_page() -> str:
    """Return a page of all public Python names, with their docstrings."""
    seen: set[object] = set()
    lines = ["# Python", "", "```{eval-rst}", *documented(loadstone, seen), "```", ""]
    for name in ADAPTERS:
        module = importlib.import_module(f"loadstone.{name}")
        lines += [
            f"## loadstone.{name}",
            "",
            "```{eval-rst}",
            f".. automodule:: loadstone.{name}",
            "   :no-members:",
            "",
            *documented(module, seen),
            "```",
            "",
        ]
    return "\n".join(lines)


def cpp_page() -> str:
    """Return a page of all public headers, in the order of loadstone.h."""
    names = re.findall(
        r'#include "loadstone/([^"]+)"',
        (REPOSITORY / "include/loadstone/loadstone.h").read_text(encoding="utf-8"),
    )
    lines = [
        "# C++",
        "",
        "The public headers in reading order. loadstone.h has the rules for all "
        "of them: errors, threads, ownership, units.",
        "",
    ]
    for name in names:
        lines += [
            f"## {name}",
            "",
            "```{eval-rst}",
            f".. doxygenfile:: {name}",
            f"   :sections: {CPP_SECTIONS}",
            "```",
            "",
        ]
    return "\n".join(lines)


def command_page() -> str:
    """Return a page with the help of each subcommand."""

    def help_of(*command: str) -> str:
        run = subprocess.run(
            [COMMAND, *command, "--help"], capture_output=True, text=True, check=True
        )
        return run.stdout

    overview = help_of()
    commands = re.findall(r"^  (\w+)  ", overview.split("Subcommands:")[1], flags=re.MULTILINE)
    lines = ["# The command's help", "", "```text", overview, "```", ""]
    for command in commands:
        lines += [f"## loadstone {command}", "", "```text", help_of(command), "```", ""]
    return "\n".join(lines)


def codes_page() -> str:
    """Return a page of the codes of errors and findings, from ``loadstone explain``."""
    run = subprocess.run([COMMAND, "explain", "--json"], capture_output=True, text=True, check=True)
    lines = [
        "# Codes of errors and findings",
        "",
        "`loadstone explain CODE` prints the same. The status is the command's exit status.",
        "",
    ]
    group = ""
    for code in json.loads(run.stdout):
        if code["code"].partition(".")[0] != group:
            group = code["code"].partition(".")[0]
            lines += [f"## {group}", ""]
        meaning, cure = (code[key].replace("<", "\\<") for key in ("meaning", "advice"))
        lines += [
            f"### {code['code']}",
            "",
            meaning,
            "",
            f"**Cure:** {cure} (exit status {code['exit_status']})",
            "",
        ]
    return "\n".join(lines)


def stage(source: Path) -> None:
    shutil.rmtree(source, ignore_errors=True)
    docs = REPOSITORY / "docs"
    for page in docs.glob("**/*.md"):
        target = source / page.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        if page != docs / "README.md":
            target.write_text(staged(page), encoding="utf-8")
    shutil.copytree(docs / "images", source / "images")
    own = source.parent / "images"  # pictures that `make docs` has drawn before
    if own.is_dir():
        shutil.copytree(own, source / "images", dirs_exist_ok=True)
    for name, page in ROOT_PAGES.items():
        (source / f"{page}.md").write_text(staged(REPOSITORY / name), encoding="utf-8")
    (source / "index.md").write_text(index(), encoding="utf-8")
    (source / "reference").mkdir()
    for name, make in {
        "python": python_page,
        "cpp": cpp_page,
        "command": command_page,
        "codes": codes_page,
    }.items():
        (source / "reference" / f"{name}.md").write_text(make(), encoding="utf-8")
    shutil.copy(SITE / "conf.py", source)
    doxyfile = (SITE / "Doxyfile").read_text(encoding="utf-8") + f"OUTPUT_DIRECTORY = {source}\n"
    subprocess.run(["doxygen", "-"], input=doxyfile, text=True, cwd=REPOSITORY, check=True)


def main(folder: Path) -> int:
    stage(folder / "source")
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        folder / "doctrees",
        folder / "source",
        folder / "html",
    ]
    status = subprocess.run(sphinx, check=False).returncode
    if status == 0:
        print(f"{folder / 'html' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
