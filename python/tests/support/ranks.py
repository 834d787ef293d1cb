"""Runs the programs ``rank_*.py``: one process per rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(program: Path, folder: Path, world: int) -> list[dict[str, Any]]:
    """Run the program with a process per rank; return the results by rank."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(number), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(world)
    ]
    said = [each.communicate()[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * len(ranks), "\n".join(said)[-8000:]
    return [json.loads((folder / f"{each}.json").read_text()) for each in range(world)]
