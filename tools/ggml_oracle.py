#!/usr/bin/env python3
"""Build ggml's reference encoders of GGUF blocks as a shared library, and call them.

Tests compare loadstone's encoders with them. The library is ``ggml-quants.c`` from the source
package of llama-cpp-python, compiled with ``-O2 -ffp-contract=off``, so that no multiply-add is
fused. This repository contains no part of ggml.

Usage: ggml_oracle.py FOLDER [--source UNPACKED | --download]

FOLDER receives the library, ``libggml-oracle.so``. ``--source`` is the unpacked package;
``--download`` fetches it (``pip download --no-deps --no-binary :all: llama-cpp-python``). Tests
build the library if the environment names the unpacked package, ``LOADSTONE_LLAMA_CPP=FOLDER``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

LIBRARY = "libggml-oracle.so"
EXACT_FLAGS = ("-O2", "-ffp-contract=off")

# Values and bytes per block of each format, by the name of its function.
FORMATS = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_K": (256, 84),
    "q3_K": (256, 110),
    "q4_K": (256, 144),
    "q5_K": (256, 176),
    "q6_K": (256, 210),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
}
# Formats that search grid points, and formats that need an importance.
GRIDS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")
NEED_IMPORTANCE = ("iq2_xxs", "iq2_xs", "iq1_s")
# Larger values overflow IQ1's sums, after which ggml reads out of bounds.
_IQ1_LARGEST = 1e9

# Includes ggml's encoders without their messages about values that they do not encode.
_ENCODERS = """
#include <stdio.h>
#define printf(...) ((void) 0)
#include "ggml-quants.c"
"""

# C code of other functions of ggml that ggml-quants.c calls.
_SHIM = """
#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void iq2xs_init_impl(enum ggml_type type);
void iq3xs_init_impl(int grid_size);

static jmp_buf refused;
static int is_guarded = 0;

void ggml_abort(const char * file, int line, const char * fmt, ...) {
    if (is_guarded) longjmp(refused, 1);
    fprintf(stderr, "%s:%d: %s\\n", file, line, fmt);
    abort();
}

typedef size_t (*quantize)(const float *, void *, int64_t, int64_t, const float *);

// One block after the other, for formats that ask for nothing beyond it. `good` is true for each
// block that ggml encoded; others are zeros.
void oracle_encode_blocks(quantize function, const float * numbers, char * blocks, int64_t rows,
                          int64_t columns, int64_t elements, int64_t bytes,
                          const float * importance, char * good) {
    const int64_t in_row = columns / elements;
    for (volatile int64_t i = 0; i < rows * in_row; ++i) {
        const float * const weights =
            importance != NULL ? importance + i % in_row * elements : NULL;
        is_guarded = 1;
        good[i] = setjmp(refused) == 0;
        if (good[i]) {
            function(numbers + i * elements, blocks + i * bytes, 1, elements, weights);
        } else {
            memset(blocks + i * bytes, 0, (size_t) bytes);
        }
        is_guarded = 0;
    }
}

const char * ggml_type_name(enum ggml_type type) { (void) type; return "a type"; }

static size_t elements_of(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q8_0: case GGML_TYPE_IQ4_NL: case GGML_TYPE_MXFP4: return 32;
        default: return 256;
    }
}

size_t ggml_type_size(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return sizeof(block_q4_0);
        case GGML_TYPE_Q4_1: return sizeof(block_q4_1);
        case GGML_TYPE_Q5_0: return sizeof(block_q5_0);
        case GGML_TYPE_Q5_1: return sizeof(block_q5_1);
        case GGML_TYPE_Q8_0: return sizeof(block_q8_0);
        case GGML_TYPE_MXFP4: return sizeof(block_mxfp4);
        case GGML_TYPE_Q2_K: return sizeof(block_q2_K);
        case GGML_TYPE_Q3_K: return sizeof(block_q3_K);
        case GGML_TYPE_Q4_K: return sizeof(block_q4_K);
        case GGML_TYPE_Q5_K: return sizeof(block_q5_K);
        case GGML_TYPE_Q6_K: return sizeof(block_q6_K);
        case GGML_TYPE_IQ2_XXS: return sizeof(block_iq2_xxs);
        case GGML_TYPE_IQ2_XS: return sizeof(block_iq2_xs);
        case GGML_TYPE_IQ2_S: return sizeof(block_iq2_s);
        case GGML_TYPE_IQ3_XXS: return sizeof(block_iq3_xxs);
        case GGML_TYPE_IQ3_S: return sizeof(block_iq3_s);
        case GGML_TYPE_IQ1_S: return sizeof(block_iq1_s);
        case GGML_TYPE_IQ1_M: return sizeof(block_iq1_m);
        case GGML_TYPE_IQ4_NL: return sizeof(block_iq4_nl);
        case GGML_TYPE_IQ4_XS: return sizeof(block_iq4_xs);
        case GGML_TYPE_TQ1_0: return sizeof(block_tq1_0);
        case GGML_TYPE_TQ2_0: return sizeof(block_tq2_0);
        default: abort();
    }
}

size_t ggml_row_size(enum ggml_type type, int64_t numbers) {
    return ggml_type_size(type) * (size_t) numbers / elements_of(type);
}

void oracle_prepare(const char * name) {
    if (strcmp(name, "iq2_xxs") == 0) iq2xs_init_impl(GGML_TYPE_IQ2_XXS);
    if (strcmp(name, "iq2_xs") == 0) iq2xs_init_impl(GGML_TYPE_IQ2_XS);
    if (strcmp(name, "iq2_s") == 0) iq2xs_init_impl(GGML_TYPE_IQ2_S);
    if (strncmp(name, "iq1", 3) == 0) iq2xs_init_impl(GGML_TYPE_IQ1_S);
    if (strcmp(name, "iq3_xxs") == 0) iq3xs_init_impl(256);
    if (strcmp(name, "iq3_s") == 0) iq3xs_init_impl(512);
}
"""


def build(source: Path, folder: Path, flags: tuple[str, ...] = EXACT_FLAGS) -> Path:
    """Compile the library from an unpacked package.

    Args:
        source: folder of the package, or its ``vendor/llama.cpp``.
        folder: folder for the library.
        flags: compiler flags for optimization and arithmetic.
    """
    found = sorted(source.glob("**/ggml-quants.c"))
    if not found:
        raise FileNotFoundError(f"no ggml-quants.c under {source}")
    sources = found[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    with tempfile.TemporaryDirectory() as work:
        parts = {"encoders.c": _ENCODERS, "shim.c": _SHIM}
        for name, text in parts.items():
            (Path(work) / name).write_text(text)
        files = [Path(work) / name for name in parts]
        includes = [f"-I{sources}", f"-I{sources.parent / 'include'}"]
        command = [os.environ.get("CC", "cc"), *flags, "-DNDEBUG", "-fPIC", "-shared", *includes]
        subprocess.run([*command, *files, "-o", library, "-lm"], check=True)
    return library


def download(folder: Path) -> Path:
    """Fetch and unpack the source package."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", folder, "llama-cpp-python"], check=True)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as package:
        package.extractall(folder, filter="data")
    return folder


class Oracle:
    """The library's functions on numpy arrays."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def encode(
        self, name: str, numbers: np.ndarray, importance: np.ndarray | None = None
    ) -> np.ndarray:
        """Encode F32 values ``[rows, columns]`` as bytes ``[rows, bytes of a row]``."""
        rows, columns = numbers.shape
        elements, size = FORMATS[name]
        blocks = np.zeros((rows, columns // elements * size), np.uint8)
        self._library.oracle_prepare(name.encode())  # only the first call takes time, up to seconds
        function = getattr(self._library, f"quantize_{name}")
        function.restype = ctypes.c_size_t
        weights = None
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
            weights = ctypes.c_void_p(importance.ctypes.data)
        numbers = np.ascontiguousarray(numbers, np.float32)
        written = function(
            ctypes.c_void_p(numbers.ctypes.data),
            ctypes.c_void_p(blocks.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            weights,
        )
        assert written == blocks.size
        return blocks

    def encode_grid(
        self, name: str, numbers: np.ndarray, importance: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode to a format of `GRIDS`.

        Returns bytes ``[blocks, bytes of a block]``, and a mask of the blocks that ggml encoded.
        The others are left out, because ggml aborts if squares overflow.
        """
        rows, columns = numbers.shape
        elements, size = FORMATS[name]
        blocks = np.zeros((rows * columns // elements, size), np.uint8)
        good = np.zeros(len(blocks), np.uint8)
        in_blocks = np.ascontiguousarray(numbers, np.float32).reshape(-1, elements)
        is_small = np.ones(len(blocks), bool)
        if name.startswith("iq1"):
            is_small = np.abs(in_blocks).max(axis=1) < _IQ1_LARGEST
            in_blocks = np.where(is_small[:, None], in_blocks, np.float32(0))
        weights = None
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
            weights = ctypes.c_void_p(importance.ctypes.data)
        self._library.oracle_prepare(name.encode())
        self._library.oracle_encode_blocks(
            ctypes.cast(getattr(self._library, f"quantize_{name}"), ctypes.c_void_p),
            ctypes.c_void_p(in_blocks.ctypes.data),
            ctypes.c_void_p(blocks.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            ctypes.c_int64(elements),
            ctypes.c_int64(size),
            weights,
            ctypes.c_void_p(good.ctypes.data),
        )
        if name == "iq3_s":
            _place_runs(in_blocks, blocks)
        return blocks, good.astype(bool) & is_small


def _place_runs(numbers: np.ndarray, blocks: np.ndarray) -> None:
    """Move codes and signs of IQ3_S to the offsets that decoders use.

    ggml advances by a run only if the run has a non-zero value, so runs after a run of zeros
    overwrite the codes of earlier ones. The top bits of codes and the scales are correct.
    """
    has_numbers = (numbers.reshape(-1, 8, 32) != 0).any(axis=2)
    for block, runs in zip(blocks, has_numbers, strict=True):
        if runs.all():
            continue
        for begin, size in ((2, 8), (74, 4)):
            fields = block[begin : begin + 8 * size].reshape(8, size)
            moved = np.zeros_like(fields)
            moved[runs] = fields[: runs.sum()]
            fields[:] = moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--source", type=Path)
    where.add_argument("--download", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source = args.source if args.source else download(Path(work))
        print(build(source, args.folder))


if __name__ == "__main__":
    main()
