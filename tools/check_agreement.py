"""Compare the verdicts of ``loadstone.check`` with what transformers does on a CPU.

    python tools/check_agreement.py

Writes tiny models in several encodings, with and without defects, opens each folder with
transformers, and prints the agreement, every disagreement and the share of "unknown".
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python" / "tests" / "support"))

from check_folders import DEFECTS, ENCODINGS, MODELS, Case, folders, truth  # noqa: E402

from loadstone._adapters.check import check  # noqa: E402
from loadstone._command.doctor import silenced  # noqa: E402


def main() -> int:
    cases = [
        Case(model, encoding, defect)
        for model in MODELS
        for encoding in ENCODINGS
        for defect in DEFECTS
    ]
    counts: Counter[tuple[str, str]] = Counter()
    disagreements = []
    unknown_by: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        for case, folder, original in folders(Path(root), cases):
            with silenced():
                verdict, found = check(folder, "transformers"), truth(case, folder, original)
            counts[verdict.verdict, found] += 1
            if verdict.verdict == "unknown":
                unknown_by[case.defect if case.defect != "none" else str(case)] += 1
            if verdict.verdict not in ("unknown", found):
                disagreements.append(f"{case}: check: {verdict.verdict}; transformers: {found}")
    total = sum(counts.values())
    unknown = sum(count for (verdict, _), count in counts.items() if verdict == "unknown")
    agreed = sum(count for (verdict, found), count in counts.items() if verdict == found)
    print(f"{total} folders: {agreed} agree, {len(disagreements)} disagree, {unknown} unknown")
    for (verdict, found), count in sorted(counts.items()):
        print(f"{count:5} check: {verdict}; transformers: {found}")
    for name, count in unknown_by.most_common():
        print(f"{count:5} unknown: {name}")
    print("\n".join(disagreements))
    false = [key for key in counts if key[0] == "opens right" and key[1] != "opens right"]
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
