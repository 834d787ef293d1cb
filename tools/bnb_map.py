#!/usr/bin/env python3
"""Write src/kernels/bnb/map_data.h: the values of the 256 codes of nested scales.

The values are 0, 1 and, for i = 0 ... 6, the midpoints between neighbours of 2^i + 1 equidistant
points from 0.1 to 1, times 10^(i - 6), with both signs. They are in ascending order. The rounding
matters: all values are F32, and each point is computed from the nearer end with one rounding for
product and sum (a fused multiply-add), as in torch's vectorised linspace.

Usage: bnb_map.py > src/kernels/bnb/map_data.h        (needs numpy)
"""

import numpy as np

HEADER = """\
// Written by tools/bnb_map.py: the values of the 256 codes of nested scales, ascending.
#pragma once

#include <array>

namespace loadstone::simd {

// clang-format off
inline constexpr std::array<float, 256> bnb_map = {
"""

FOOTER = """\
};
// clang-format on

}  // namespace loadstone::simd
"""


def points(count: int) -> np.ndarray:
    """Return points from 0.1 to 1. The product is exact in F64, so only F32 rounds."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count - 1))
    place = np.arange(count)
    from_first = np.float64(first) + step * place
    from_last = np.float64(last) - step * (count - 1 - place)
    return np.where(place < count // 2, from_first, from_last).astype(np.float32)


def dynamic_map() -> np.ndarray:
    """Return the values of the 256 codes."""
    numbers = [np.float32(0), np.float32(1)]
    for i in range(7):
        ends = points(2**i + 1)
        middles = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        numbers += [*middles, *-middles]
    return np.sort(np.array(numbers, np.float32))


def main() -> None:
    texts = [float(number).hex().replace("0000000p", "p") + "f" for number in dynamic_map()]
    lines = ["  " + ", ".join(texts[at : at + 4]) + "," for at in range(0, len(texts), 4)]
    print(HEADER + "\n".join(lines) + "\n" + FOOTER, end="")


if __name__ == "__main__":
    main()
