"""Tests that each rule of tools/tidy.py detects a breach, and that the tree has none."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import python_text  # noqa: E402
import tidy  # noqa: E402

LONG_CPP = "int f(int a) {\n" + "  a += 1;\n" * 70 + "  return a;\n}\n"
LONG_PYTHON = "def f(a):\n" + "    a += 1\n" * 71 + "    return a\n"
EIGHT = ", ".join(["A<1,2> a"] * 8)
NINE = f"{EIGHT}, int b"
# Concatenated, so that this file itself breaks none of the rules.
PATH = "/" + "home/someone/model"
LATER = "TO" + "DO"
SHORT_FOR_SOURCE = "s" + "rc"

BREACHES = [
    ("src/base/a.cpp", '#include "plan/rules.h"\n', "base may not include from plan"),
    ("src/base/a.cpp", '#include "loadstone/catalog.h"\n', "base may not include from catalog"),
    ("src/catalog/a.cpp", '#include "loadstone/skeleton.h"\n', "may not include from skeleton"),
    ("src/plan/a.cpp", '#include "engine/run.h"\n', "plan takes its limits from the engine"),
    ("src/plan/a.cpp", '#include "cli/app.h"\n', "plan may not include from cli"),
    ("src/plan/a.cpp", '#include "convert/b/c.h"\n', "plan may not include from convert"),
    ("include/loadstone/shape.h", '#include "loadstone/plan.h"\n', "may not include from plan"),
    ("src/plan/a.cpp", '#include "loadstone/attic.h"\n', "no folder called attic"),
    ("cli/a.cpp", "int a;\n" * 501, "the file has 501 lines"),
    ("tools/a.sh", "#" * 101 + "\n", "the line has 101 columns"),
    ("src/plan/a.cpp", LONG_CPP, "the function has 73 lines"),
    ("src/plan/a.cpp", f"namespace a {{\n{LONG_CPP}}}\n", "the function has 73 lines"),
    ("src/plan/a.h", f"class A {{\n{LONG_CPP}}};\n", "the function has 73 lines"),
    ("src/plan/a.cpp", LONG_CPP.replace("f(int a)", "A::A(int b) : a{b}, c{}"), "73 lines"),
    ("src/plan/a.cpp", LONG_CPP.replace("f(int a)", "A::f() const noexcept"), "73 lines"),
    ("python/loadstone/a.py", LONG_PYTHON, "the function has 73 lines"),
    ("include/loadstone/a.h", f"int f({NINE});\n", "9 parameters, more than 8"),
    ("python/bindings/a.cpp", f"int f({NINE}) {{}}\n", "9 parameters, more than 8"),
    ("python/bindings/a.cpp", f'm.def("f", [](A* self, int x, {NINE}) {{}});\n', "10 parameters"),
    ("src/plan/a.cpp", 'void f() { printf("a"); }\n', "prints"),
    ("src/plan/a.cpp", 'auto a = std::getenv("A");\n', "environment"),
    ("src/plan/a.cpp", "void f() { std::cerr << 1; }\n", "prints"),
    ("src/plan/a.cpp", "void f() { std::abort(); }\n", "aborts"),
    ("src/plan/a.cpp", "int f() { return ::open(a, 0); }\n", "calls the system: ::open("),
    ("src/plan/a.cpp", "auto a = fs::exists(b);\n", "calls the system: fs::exists"),
    ("src/formats/gguf.cpp", "void f(int a) { assert(a > 0); }\n", "throw, where there is assert("),
    ("cli/a.cpp", "// caf\u00e9\n", "not ASCII: \u00e9"),
    ("cli/a.cpp", f"int {SHORT_FOR_SOURCE} = 1;\n", "write source or target"),
    ("python/loadstone/a.py", f"{SHORT_FOR_SOURCE}_shape = 1\n", "write source or target"),
    ("README.md", f"{LATER}: more\n", f"finish it or give the reason: {LATER}"),
    ("src/plan/a.cpp", "int transformers_rules();\n", "the core knows no framework: transformers"),
    (
        "python/loadstone/_plan.py",
        "import diffusers.models\n",
        "only its adapter imports diffusers",
    ),
    ("python/loadstone/_plan.py", "from safetensors import torch\n", "imports safetensors"),
    ("docs/a.md", f"Put it in {PATH}.\n", "a path of one machine"),
]

KEPT = [
    (
        "src/plan/a.cpp",
        '#include "plan/b.h"\n#include "catalog/c.h"\n#include "loadstone/error.h"\n',
    ),
    (
        "cli/a.cpp",
        '#include "cli/app.h"\n#include "loadstone/loadstone.h"\n#include "fmt/core.h"\n',
    ),
    ("include/loadstone/a.h", f"int f({EIGHT});\n"),
    ("python/bindings/a.cpp", f"int f(A* self, {EIGHT}) {{}}\n"),
    ("python/bindings/a.cpp", f"void f() {{\n  m.def({NINE});\n}}\n"),
    ("src/formats/a.cpp", '#include "loadstone/catalog.h"\n'),
    ("src/plan/a.cpp", LONG_CPP.replace("  a += 1;\n", "", 3)),
    ("src/plan/a.cpp", "constexpr int a[] = {\n" + "  1,\n" * 80 + "};\n"),
    ("src/plan/a.h", "struct A {\n" + "  int f(int a) { return a; }\n" * 80 + "};\n"),
    ("src/plan/a.cpp", "namespace a {\n" + "int b(int c);\n" * 80 + "}\n"),
    ("src/plan/a.cpp", 'auto a = "std::abort() { printf(";  // std::cout\n'),
    ("src/plan/a.cpp", "int n = snprintf(a, 2, b); file.exit(); static_assert(true);\n"),
    ("cli/a.cpp", 'std::cout << "printed";\n'),
    ("cli/a.cpp", '#include "a/source.h"\nauto a = "the source, not src/";\n'),
    ("python/loadstone/_plan.py", "import torch\nfrom .transformers import rules\n"),
    ("python/loadstone/transformers.py", "import transformers\n"),
    ("docs/a.md", "See https://example.org/home/page and build/tmp/a.\n"),
]


@pytest.mark.parametrize(("path", "text", "message"), BREACHES)
def test_a_rule_fires(path: str, text: str, message: str) -> None:
    assert any(message in said for _, said in tidy.breaches(path, text))


@pytest.mark.parametrize(("path", "text"), KEPT)
def test_what_keeps_the_rules_is_left_alone(path: str, text: str) -> None:
    assert list(tidy.breaches(path, text)) == []


def test_every_rule_has_a_text_that_makes_it_fire() -> None:
    fired = {
        rule.__name__
        for rule in tidy.RULES
        if any(list(rule(path, text)) for path, text, _ in BREACHES)
    }
    assert fired == {rule.__name__ for rule in tidy.RULES}


def test_the_tree_keeps_the_rules() -> None:
    assert "tools/tidy.py" in tidy.files(ROOT)
    assert tidy.tree_breaches(ROOT) == []


# Texts that each define `same` with internal linkage.
OWN = [
    "namespace {\nint same(int a = {}, int b = 1) noexcept {\n  return a;\n}\n}  // namespace\n",
    "namespace {\ntemplate <typename T, int n>\n[[nodiscard]] T same(const A<T, n>&);\n}\n",
    "static std::vector<std::pair<int, int>> same() { return {}; }\n",
    "namespace {\nconstexpr auto one = int{1} << 20;\nusing same = int;\n}\n",
    "namespace a {\nnamespace {\nstruct B {\n  int b;\n};\nstruct same : B {};\n}\n}\n",
    "namespace a {\nenum class same : int { one };\n}\n",
    "void f(int a = {}) {}\nconstexpr std::array<int, 2> same = {1, 2};\n",
    "#define A {\nconst char* const same[] = {};\n",
]
NOT_OWN = [
    "int same(int a) { return a; }\n",
    "const A& same();\n",
    "namespace {\nint A::same() { return 1; }\n}\n",
    "namespace {\nvoid f() { int same = 1; }\nclass A {\n  static int same();\n};\n}\n",
    "namespace {\nclass same;\nnamespace same = std;\nusing a::same;\n}\n",
    "extern const int same;\n// int same = 1;\n#define same 1\n",
]


@pytest.mark.parametrize("text", OWN)
def test_a_name_that_two_files_of_a_folder_define_is_found(text: str) -> None:
    other = "int a;\nnamespace {\nint same = 1;\n}\n"
    message = "same is in src/plan/a.cpp too: share or rename it"
    texts = {"src/plan/a.cpp": text, "src/plan/b.cpp": other, "src/plan/c/d.cpp": text}
    assert list(tidy.names_defined_twice(texts)) == [f"src/plan/b.cpp:3: {message}"]
    texts = {"src/plan/a.cpp": text, "src/plan/b.h": "int same(int a);\n", "src/plan/c.cpp": ""}
    assert list(tidy.names_defined_twice(texts)) == [f"src/plan/b.h:1: {message}"]


@pytest.mark.parametrize("text", NOT_OWN)
def test_names_that_a_file_does_not_define_for_itself_are_left_alone(text: str) -> None:
    texts = {"src/plan/a.cpp": text, "src/plan/b.cpp": OWN[0]}
    assert list(tidy.names_defined_twice(texts)) == []


ONE_CLASS = "namespace loadstone {\nclass Same;\nstruct LOADSTONE_API Same {\n  int a;\n};\n}\n"


@pytest.mark.parametrize(
    "text",
    [
        "namespace loadstone {\nclass Same final : public A {};\n}\n",
        "namespace loadstone {\ntemplate <A<int> a>\nstruct Same {};\n}\n",
    ],
)
def test_a_class_that_two_files_define_is_found(text: str) -> None:
    texts = {"include/loadstone/a.h": ONE_CLASS, "src/plan/b.h": text}
    said = "src/plan/b.h:2: loadstone::Same is in include/loadstone/a.h:3 too: rename one"
    assert list(tidy.classes_defined_twice(texts)) == [said]


@pytest.mark.parametrize(
    "text",
    [
        "namespace loadstone {\nclass Same;\nstruct A {\n  struct Same {};\n};\n}\n",
        "namespace loadstone {\nnamespace {\nstruct Same {};\n}\n}\n",
        "namespace loadstone::cli {\nstruct Same {};\n}\n",
        "namespace loadstone {\ntemplate <>\nstruct Same<int> {};\nstruct A::Same {};\n}\n",
        "namespace loadstone {\nstruct Same f() { return {}; }\nclass Same b{1};\n}\n",
    ],
)
def test_other_classes_of_that_name_are_left_alone(text: str) -> None:
    texts = {"include/loadstone/a.h": ONE_CLASS, "src/plan/b.cpp": text, "src/plan/c.cpp": text}
    found = list(tidy.classes_defined_twice(texts))
    assert not any("a.h" in line for line in found)


def imported(path: str, text: str) -> list[str]:
    """Return the violations in a package whose only non-empty file has this text."""
    others = ("_base/a", "_model/b", "_model/__init__", "accelerate", "_command/c", "__init__")
    texts = {f"python/loadstone/{each}.py": "" for each in others}
    return list(python_text.package_points_down(texts | {f"python/loadstone/{path}": text}))


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("_base/x.py", "from loadstone._model.b import y\n", "1: loadstone._model.b is above"),
        ("_base/x.py", "from loadstone._model import b\n", "1: loadstone._model.b is above"),
        ("_base/x.py", "import loadstone._model.b\n", "1: loadstone._model.b is above"),
        (
            "_adapters/x.py",
            "from loadstone import accelerate\n",
            "1: loadstone.accelerate is above",
        ),
        (
            "accelerate.py",
            "from loadstone._command.c import y\n",
            "1: loadstone._command.c is above",
        ),
        ("_command/x.py", "import loadstone\n", "1: loadstone is above"),
        ("_command/x.py", "from loadstone import load, _core\n", "1: loadstone is above"),
        (
            "_base/x.py",
            "def f():\n    from loadstone._model.b import y\n",
            "2: loadstone._model.b is above",
        ),
        (
            "_model/x.py",
            "def f():\n    from loadstone._base import a\n",
            "2: import loadstone._base.a at the top of the file",
        ),
        (
            "_model/x.py",
            "if TYPE_CHECKING:\n    from loadstone._base import a\n",
            "1: import at the top: types have a direction too",
        ),
        (
            "_model/x.py",
            "if typing.TYPE_CHECKING:\n    import torch\n",
            "1: import at the top: types have a direction too",
        ),
    ],
)
def test_an_import_upward_or_hidden_is_found(path: str, text: str, said: str) -> None:
    assert imported(path, text) == [f"python/loadstone/{path}:{said}"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("_model/x.py", "from loadstone._base.a import y\nfrom loadstone._model import b\n"),
        ("_command/x.py", "from loadstone import _core, accelerate\n"),
        ("accelerate.py", "from loadstone._model.b import y\n"),
        ("_model/x.py", "def f():\n    import torch\n    from loadstone import _core\n"),
        ("__init__.py", "from loadstone._command.c import y\n"),
        ("__main__.py", "from loadstone._command.c import y\n"),
    ],
)
def test_imports_downward_are_left_alone(path: str, text: str) -> None:
    assert imported(path, text) == []


def test_imports_in_a_circle_are_found() -> None:
    texts = {
        "python/loadstone/_model/a.py": "from loadstone._model.b import c\n",
        "python/loadstone/_model/b/__init__.py": "",
        "python/loadstone/_model/b/c.py": "from loadstone._model import a\n",
        "python/loadstone/_model/d.py": "from loadstone._model import a, e\n",
        "python/loadstone/_model/e.py": "",
    }
    assert list(python_text.package_points_down(texts)) == [
        "python/loadstone/_model/a.py:1: imports in a circle: loadstone._model.b.c",
        "python/loadstone/_model/b/c.py:1: imports in a circle: loadstone._model.a",
    ]
    texts["python/loadstone/_model/b/c.py"] = "def f():\n    from loadstone._model import a\n"
    found = list(python_text.package_points_down(texts))
    assert [line.partition(":")[0] for line in found] == [
        "python/loadstone/_model/b/c.py",
        "python/loadstone/_model/a.py",
        "python/loadstone/_model/b/c.py",
    ]
    texts["python/loadstone/_model/b/c.py"] = ""
    assert list(python_text.package_points_down(texts)) == []


def test_only_what_needs_a_further_library_is_imported_inside_a_function() -> None:
    hidden = "def f():\n    from loadstone._adapters.b import c\n"
    texts = {
        "python/loadstone/_adapters/a.py": hidden,
        "python/loadstone/_adapters/b/__init__.py": "",
        "python/loadstone/_adapters/b/c.py": "from loadstone._adapters import d\n",
        "python/loadstone/_adapters/d.py": "import peft\n",
    }
    said = [
        "python/loadstone/_adapters/a.py:2: import loadstone._adapters.b.c at the top of the file"
    ]
    assert list(python_text.package_points_down(texts)) == []
    for text in ("", "def g():\n    import peft\n"):  # controls
        texts["python/loadstone/_adapters/d.py"] = text
        assert list(python_text.package_points_down(texts)) == said
    texts["python/loadstone/_adapters/b/__init__.py"] = "sites_of('b').require()\n"
    assert list(python_text.package_points_down(texts)) == []
    texts["python/loadstone/_adapters/a.py"] = f"import torch\n{hidden}"
    texts["python/loadstone/_adapters/b/__init__.py"] = ""
    texts["python/loadstone/_adapters/d.py"] = "import torch\n"
    assert len(list(python_text.package_points_down(texts))) == 1
