"""Write the tables of docs/lossless.md: from each encoding to each other encoding.

    python tools/lossless_table.py

A test compares each cell of the page with its own measurement.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tables: made by tools/lossless_table.py -->", "<!-- end of tables -->"

sys.path.insert(0, str(ROOT / "python" / "tests" / "support"))

import lossless_cells as cells  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = {each: cells.normal_source(folder / each, each) for each in cells.ENCODINGS}
        tables = [
            cells.table(sources, targets, folder) for targets in (cells.FOLDERS, cells.BLOCKS)
        ]
    text = cells.PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    cells.PAGE.write_text(before + "\n".join([BEGIN, *tables, END]) + after)


if __name__ == "__main__":
    main()
