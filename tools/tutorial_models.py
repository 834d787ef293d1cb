"""Write the tiny random models that the tutorials name, one folder for each page."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/tutorials"


def main() -> None:
    sys.path.insert(0, str(ROOT / "python/tests/support"))
    from docs_worlds import WORLDS

    for page in sorted(PAGES.glob("*.md")):
        folder = Path(sys.argv[1]) / page.stem
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for write in WORLDS[str(page.relative_to(ROOT))].files:
            write(folder)
        print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir())) or '(empty)'}")


if __name__ == "__main__":
    main()
