"""Write the tiny models of the tutorials and of "Fix a failing script", one folder per page."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def worlds() -> dict[str, Any]:
    """Return the files of each page, see docs_worlds.py."""
    sys.path.insert(0, str(ROOT / "python/tests/support"))
    from docs_worlds import HEAL_PAGE, HEAL_WORLD, WORLDS

    pages = {**WORLDS, HEAL_PAGE: HEAL_WORLD}
    return {page: pages[page] for page in pages if page.startswith(("docs/tutorials/", HEAL_PAGE))}


def main() -> None:
    for page, world in worlds().items():
        folder = Path(sys.argv[1]) / Path(page).stem
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for write in world.files:
            write(folder)
        print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir())) or '(empty)'}")


if __name__ == "__main__":
    main()
