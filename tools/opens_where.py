"""Write the table of docs/opens-where.md: readers for each output of ``loadstone convert``.

    python tools/opens_where.py

Writes every encoding in every style, for a dense model and for models with experts, and opens each
output with transformers alone. The outcomes also become rules of ``loadstone.check``. A test
compares each cell of the page with its own measurement.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: made by tools/opens_where.py -->", "<!-- end of table -->"

sys.path.insert(0, str(ROOT / "python" / "tests" / "support"))

import readback_foreign as foreign  # noqa: E402
from readback_cells import (  # noqa: E402
    SOURCES,
    Cell,
    styles_of,
    write_cell,
    write_source,
    written_encodings,
)


def table(root: Path) -> list[str]:
    """Return the rows, one per style of an encoding, and write the rules."""
    sources = {each: write_source(each, root / str(each)) for each in SOURCES}
    rows = foreign.head()
    openings = {}
    for encoding in written_encodings():
        for style in styles_of(encoding):
            outcomes = {}
            for source, folder in sources.items():
                cell = Cell(encoding, style, source)
                output = write_cell(cell, folder, root / str(cell))
                outcomes[source] = foreign.outcome(cell, output)
            rows.append(foreign.row(encoding, style, outcomes))
            name = f"{encoding} {style or 'bitsandbytes'}"
            openings[name] = foreign.opening(outcomes, output)
    foreign.write_rules(openings)
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Path(folder))
    text = foreign.PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    made = "\n".join([BEGIN, f"<!-- made with {foreign.releases()} -->", "", *rows, "", END])
    foreign.PAGE.write_text(before + made + after)


if __name__ == "__main__":
    main()
