#!/usr/bin/env python3
"""Write src/kernels/gguf/grid_data.h: the points of the grids of the IQ formats.

The formats define the points as data, without a rule. gguf-py stores each point as the indices of
its coordinates, packed into bits, and the header has the same packing.

Usage: gguf_grids.py > src/kernels/gguf/grid_data.h        (needs gguf)
"""

from gguf import quants

GRIDS = (
    ("iq2_xxs", quants.IQ2_XXS),
    ("iq2_xs", quants.IQ2_XS),
    ("iq2_s", quants.IQ2_S),
    ("iq3_xxs", quants.IQ3_XXS),
    ("iq3_s", quants.IQ3_S),
    ("iq1", quants.IQ1_S),
)

HEADER = """\
// Written by tools/gguf_grids.py: the points of the grids of the IQ formats.
//
// Each coordinate is an index into the values of its grid: 2 bits if a point has 8 coordinates, 4
// bits if it has 4. So each point takes 16 bits, the first coordinate lowest.
#pragma once

#include <array>
#include <cstdint>

namespace loadstone::simd {

// clang-format off"""

FOOTER = """\
// clang-format on

}  // namespace loadstone::simd"""


def points(quant: type) -> list[int]:
    """Return the points of a grid, 16 bits each."""
    packed = bytes.fromhex(quant.grid_hex.decode())
    count = quant.grid_shape[0]
    assert len(packed) == 2 * count, quant.__name__
    return [packed[2 * i] | packed[2 * i + 1] << 8 for i in range(count)]


def main() -> None:
    print(HEADER)
    for name, quant in GRIDS:
        grid = points(quant)
        values = ", ".join(str(value) for value in quant.grid_map)
        print(f"\n// {values}")
        print(f"inline constexpr std::array<std::uint16_t, {len(grid)}> {name}_points = {{")
        for i in range(0, len(grid), 12):
            print("  " + " ".join(f"0x{point:04x}," for point in grid[i : i + 12]))
        print("};")
    print()
    print(FOOTER)


if __name__ == "__main__":
    main()
