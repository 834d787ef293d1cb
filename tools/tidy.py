#!/usr/bin/env python3
"""Check the project's rules that no formatter or linter covers; also a test.

Prints `path:line: problem` for each breach; the exit status is 1 if there is one. A rule is a
function of a path and its text that yields (line, message) pairs.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from cpp_text import (
    class_name,
    cpp_code,
    cpp_declarations,
    cpp_functions,
    declared_name,
    parameter_lists,
)
from python_text import libraries_imported, package_points_down, python_functions

Breach = tuple[int, str]
Rule = Callable[[str, str], Iterator[Breach]]

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
PARAMETERS_MAX = 8

# Files that may be longer, each with its reason.
LONG_FILES: dict[str, str] = {}

# A folder of modules may include itself and folders of earlier groups.
FOLDERS = (
    ("base",),
    ("tensor",),
    ("storage", "kernels", "device"),
    ("codec",),
    ("formats",),
    ("catalog", "skeleton"),
    ("boxes",),
    ("engine",),
    ("plan",),
    ("offload", "receipt"),
    ("load",),
    ("convert",),
    ("audit", "page", "verify"),
    ("cli", "bindings"),
)
LEVEL = {folder: level for level, names in enumerate(FOLDERS) for folder in names}

# The folder of a public header, if it is not named after it.
HEADER_FOLDER = {
    "build_info": "base",
    "budget": "base",
    "byte_range": "base",
    "decoding": "codec",
    "defaults": "base",
    "dtype": "tensor",
    "error": "base",
    "export": "base",
    "finding": "base",
    "importance": "formats",
    "loadstone": "audit",
    "machine": "storage",
    "merge": "boxes",
    "merge_options": "plan",
    "name_hash": "base",
    "observer": "base",
    "quantization": "tensor",
    "quantized_tensor": "codec",
    "quantized_tensors": "catalog",
    "recipe": "boxes",
    "recipe_builder": "plan",
    "remote": "storage",
    "save": "formats",
    "shape": "tensor",
    "tensor_info": "tensor",
    "execute": "load",
    "tensor_reader": "load",
    "version": "base",
}

# Permitted includes of later folders, each with its reason.
INCLUDES_UP = {
    ("formats", "loadstone/catalog.h"): "a format fills in what a catalog is made of: TensorInfo",
    ("skeleton", "loadstone/catalog.h"): "a model can be what a checkpoint holds: from_catalog",
    ("skeleton", "loadstone/quantized_tensors.h"): "the same: scales are not of the model",
}

# Files outside of src/storage that call the system for files or memory, each with its reason.
SYSTEM_CALLS = {
    "src/engine/pages.cpp": "memory without a file",
    "src/load/mapped_shard.cpp": "a shard becomes the caller's memory",
    "cli/interrupt.cpp": "a signal handler may call nothing else",
    "cli/log.cpp": "appends, and a signal handler writes to it too",
    "cli/machine_limits.cpp": "measures the machine without the library",
    "cli/options.cpp": "distinguishes a path from a text",
    "cli/verify.cpp": "distinguishes a path from a text",
}

# Libraries that only their adapters may import: each has a public module of the package.
PACKAGE = Path(__file__).parents[1] / "python" / "loadstone"
FRAMEWORKS = {"safetensors", *(path.stem for path in PACKAGE.glob("[!_]*.py"))} - {"torch"}
# Libraries whose adapters also use the libraries below.
STANDS_ON = {"diffusers": {"accelerate"}, "modelopt": {"accelerate", "transformers"}}

CPP = (".h", ".cpp")
PYTHON = (".py", ".pyi")
SOURCES = (*CPP, *PYTHON, ".cmake", ".sh", ".txt", ".toml")


def grep(pattern: str, text: str, message: str) -> Iterator[Breach]:
    """Yield a breach for each line that matches; {} in the message is the match."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in re.finditer(pattern, line):
            yield number, message.format(match[0].strip())


def folder_of(path: str) -> str | None:
    """Return the folder of modules of a repository file, or of an include as written."""
    parts = Path(path).parts
    if parts[:2] == ("include", "loadstone") or (parts[0] == "loadstone" and len(parts) == 2):
        name = Path(path).stem
        return HEADER_FOLDER.get(name, name)
    if parts[0] == "src":
        return parts[1]
    if parts[0] == "cli" or parts[:2] == ("python", "bindings"):
        return parts[-2]
    return parts[0] if len(parts) > 1 and parts[0] in LEVEL else None


def includes_point_down(path: str, text: str) -> Iterator[Breach]:
    folder = folder_of(path)
    if not path.endswith(CPP) or folder not in LEVEL or path == "include/loadstone/loadstone.h":
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        other = folder_of(match[1]) if match else None
        if match is None or other is None or other == folder:
            continue
        if other not in LEVEL:
            yield number, f"no folder called {other}"
        elif (folder, other) == ("plan", "engine") and match[1] != "engine/limits.h":
            yield number, "a plan takes its limits from the engine, and nothing else"
        elif LEVEL[other] >= LEVEL[folder] and (folder, match[1]) not in INCLUDES_UP:
            yield number, f"{folder} may not include from {other}"


def file_length(path: str, text: str) -> Iterator[Breach]:
    lines = text.count("\n")
    if path.endswith(CPP + PYTHON) and lines > FILE_LINES_MAX and path not in LONG_FILES:
        yield lines, f"the file has {lines} lines, more than {FILE_LINES_MAX}"


def line_length(path: str, text: str) -> Iterator[Breach]:
    if path.endswith(SOURCES) or path == "Makefile":
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > LINE_COLUMNS_MAX:
                yield number, f"the line has {len(line)} columns, more than {LINE_COLUMNS_MAX}"


def function_length(path: str, text: str) -> Iterator[Breach]:
    functions = cpp_functions if path.endswith(CPP) else python_functions
    for first, last in functions(text) if path.endswith(CPP + PYTHON) else ():
        if last - first + 1 > FUNCTION_LINES_MAX:
            yield (
                first,
                f"the function has {last - first + 1} lines, more than {FUNCTION_LINES_MAX}",
            )


def few_parameters(path: str, text: str) -> Iterator[Breach]:
    """Check public functions and the bindings; the object of a method does not count."""
    is_public = path.startswith("include/")
    if not is_public and not (path.startswith("python/bindings/") and path.endswith(CPP)):
        return
    declared = r"(const|noexcept|override|->|\{" + (r"|;|=)" if is_public else ")")
    for line, items, after in parameter_lists(text):
        count = len(items) - items[0].strip().endswith(" self")
        if count > PARAMETERS_MAX and re.match(declared, after):
            yield line, f"{count} parameters, more than {PARAMETERS_MAX}: take an options struct"


def core_is_silent(path: str, text: str) -> Iterator[Breach]:
    if path.startswith(("src/", "include/")):
        calls = "v?f?printf|f?puts|perror|abort|_?exit|quick_exit|terminate|(secure_)?getenv|setenv"
        pattern = rf"\bstd::(cout|cerr|clog)\b|\bfmt::print\b|(?<![\w.>])({calls})\s*\("
        message = "the core never prints, aborts or reads the environment: {}"
        yield from grep(pattern, cpp_code(text), message)


def files_through_storage(path: str, text: str) -> Iterator[Breach]:
    if not path.startswith(("src/", "cli/")) or path.startswith("src/storage/"):
        return
    if path not in SYSTEM_CALLS:
        calls = (
            "open|openat|opendir|close|read|write|pread|preadv|pwrite|pwritev|[lf]?stat|statx"
            "|f?statv?fs|access|f?chmod|chown|link|symlink|readlink|realpath|unlink|rename"
            "|renameat2|mkdir|rmdir|f?truncate|f?allocate|posix_f\\w+|fsync|fdatasync|syncfs"
            "|msync|flock|mmap|munmap|madvise"
        )
        disk = (
            "absolute|canonical|weakly_canonical|copy\\w*|create_\\w+|current_path|equivalent"
            "|exists|file_size|is_\\w+|last_write_time|permissions|read_symlink|remove"
            "|remove_all|rename|resize_file|space|status|symlink_status|\\w*directory_iterator"
        )
        pattern = (
            rf"(?<![\w>])::({calls})\(|\b(fs|filesystem)::({disk})\b(?! \w)"
            r"|\bstd::[io]?fstream\b|\bf(re)?open\(|\bstd::(rename|remove)\(|\bparser\.load\("
        )
        yield from grep(pattern, cpp_code(text), "only src/storage calls the system: {}")


def no_assert_on_input(path: str, text: str) -> Iterator[Breach]:
    if path.startswith("src/formats/"):
        message = "a format's rules hold in every build: throw, where there is {}"
        yield from grep(r"\bassert\s*\(", cpp_code(text), message)


def ascii_only(path: str, text: str) -> Iterator[Breach]:
    if path.endswith(SOURCES):
        yield from grep(r"[^\x00-\x7f]+", text, "not ASCII: {}")


def names_in(path: str, text: str) -> str:
    """Return only the identifiers of the text, each on its original line."""
    if path.endswith(CPP):
        return re.sub(r"#\s*include[^\n]*", "", cpp_code(text))
    lines: list[list[str]] = [[] for _ in range(text.count("\n") + 2)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            lines[token.start[0] - 1].append(token.string)
    return "\n".join(" ".join(line) for line in lines)


def banned_words(path: str, text: str) -> Iterator[Breach]:
    if path.endswith(CPP + PYTHON):
        pattern = r"\b(src|dst)(_\w*)?\b|\b\w+_(src|dst)_?\b"
        yield from grep(pattern, names_in(path, text), "write source or target: {}")
    yield from grep(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", text, "finish it or give the reason: {}")


def adapted(path: str) -> set[str]:
    """Return the libraries that a file adapts: from its name, or from its folder."""
    names = {Path(path).stem, Path(path).parent.name.removeprefix("_")}
    for library, others in STANDS_ON.items():
        names |= others if library in names else set()
    return names


def frameworks_stay_in_adapters(path: str, text: str) -> Iterator[Breach]:
    in_core = path.startswith(("src/", "include/")) and path.endswith(CPP)
    if in_core and path != "include/loadstone/torch.h":
        # safetensors, peft and torch also name file formats.
        names = "|".join(sorted(FRAMEWORKS - {"safetensors", "peft"}))
        pattern = rf"\btorch::|\b({names})(?=::|_|\b)"
        yield from grep(pattern, names_in(path, text), "the core knows no framework: {}")
    elif path.startswith("python/loadstone/") and path.endswith(PYTHON):
        for line, name in libraries_imported(text):
            if name in FRAMEWORKS - adapted(path):
                yield line, f"only its adapter imports {name}"


def no_paths_of_one_machine(path: str, text: str) -> Iterator[Breach]:
    yield from grep(
        r"(?<![\w.~$}>-])/(home|work|root|Users)/\w+", text, "a path of one machine: {}"
    )


RULES: tuple[Rule, ...] = (
    includes_point_down,
    file_length,
    line_length,
    function_length,
    few_parameters,
    core_is_silent,
    files_through_storage,
    no_assert_on_input,
    ascii_only,
    banned_words,
    frameworks_stay_in_adapters,
    no_paths_of_one_machine,
)


def breaches(path: str, text: str) -> Iterator[Breach]:
    """Yield all breaches of all rules in one file; the path is relative to the repository."""
    for rule in RULES:
        yield from rule(path, text)


def names_defined_twice(texts: dict[str, str]) -> Iterator[str]:
    """Yield the names that two files of one folder define.

    A unity build compiles such files as one: it fails, or calls the other file's overload.

    Args:
        texts: by path, from the repository's root.
    """
    places: dict[tuple[Path, str], dict[str, int]] = {}
    own: set[tuple[Path, str]] = set()
    for path, text in texts.items():
        for line, namespaces, head in cpp_declarations(text):
            name = declared_name(head)
            if name is None:
                continue
            key = (Path(path).parent, name[0])
            if path.endswith(".cpp") and ("" in namespaces or name[1]):
                own.add(key)
            elif path.endswith(".cpp"):
                continue
            places.setdefault(key, {}).setdefault(path, line)
    for key in own:
        (first, _), *others = sorted(places[key].items())
        for path, line in others:
            yield f"{path}:{line}: {key[1]} is in {first} too: share or rename it"


def classes_defined_twice(texts: dict[str, str]) -> Iterator[str]:
    """Yield classes with one name and two definitions, which the linker treats as one.

    Args:
        texts: by path, from the repository's root.
    """
    places: dict[str, str] = {}
    for path, text in texts.items():
        for line, namespaces, head in cpp_declarations(text):
            name = class_name(head)
            if name is None or "" in namespaces:
                continue
            whole = "::".join([*namespaces, name])
            first = places.setdefault(whole, f"{path}:{line}")
            if first != f"{path}:{line}":
                yield f"{path}:{line}: {whole} is in {first} too: rename one"


def files(root: Path) -> list[str]:
    """Return all files of the repository that people write, including uncommitted ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    data = re.compile(r"(tests/hostile/\w+|tests/golden|fuzz/corpus/\w+|docs/images)/|LICENSE$")
    listed_files = sorted(set(listed.splitlines()))
    return [path for path in listed_files if not data.match(path) and (root / path).is_file()]


def tree_breaches(root: Path) -> list[str]:
    """Return all violations in the repository, one per line."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in files(root)}
    package = {
        path: text
        for path, text in texts.items()
        if path.startswith("python/loadstone/") and path.endswith(".py")
    }
    compiled = {
        path: text
        for path, text in texts.items()
        if path.endswith(CPP) and folder_of(path) in LEVEL
    }
    unity = {path: text for path, text in compiled.items() if "/kernels/" not in path}
    found = [
        f"{path}:{line}: {message}"
        for path, text in texts.items()
        for line, message in sorted(breaches(path, text))
    ]
    twice = sorted([*names_defined_twice(unity), *classes_defined_twice(compiled)])
    return [*found, *package_points_down(package), *twice]


def main() -> int:
    found = tree_breaches(Path(__file__).resolve().parent.parent)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
