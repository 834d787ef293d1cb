#!/usr/bin/env python3
"""Draw a terminal session of the command, docs/images/terminal.svg (`make screenshots`).

The command plans a small Llama in a pseudo-terminal, so that the picture has its real colours.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from screenshots import llama

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "terminal.svg"
COMMAND = os.environ.get("LOADSTONE_CLI", str(Path(sys.executable).with_name("loadstone")))
COLUMNS, LINE, CHAR, MARGIN = 112, 18, 7.9, 14
# The SGR codes that the command writes (cli/voice.cpp).
COLOURS = {
    "31": "#f87171",
    "32": "#4ade80",
    "33": "#facc15",
    "34": "#60a5fa",
    "35": "#c084fc",
    "36": "#22d3ee",
    "90": "#9ca3af",
}


def in_terminal(command: list[str], folder: Path) -> str:
    """Return the output of a command connected to a terminal."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment["XDG_CACHE_HOME"] = str(folder)  # without rates from `loadstone bench`
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its
    ) as running:
        os.close(its)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux raises it after the other side has closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    if running.returncode:
        raise RuntimeError(f"{command} ended with {running.returncode}")
    return written.decode()


def spans(line: str) -> str:
    """Convert a line with SGR sequences to SVG."""
    parts, style = [], ""
    for piece in re.split(r"(\x1b\[[\d;]*m)", line):
        if code := re.fullmatch(r"\x1b\[([\d;]*)m", piece):
            codes = code[1].split(";")
            bold = "font-weight='bold' " if "1" in codes else ""
            colour = next((COLOURS[each] for each in codes if each in COLOURS), "")
            style = bold + (f"fill='{colour}'" if colour else "")
        elif piece:
            text = escape(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", piece))
            parts.append(f"<tspan {style}>{text}</tspan>" if style else text)
    return "".join(parts)


def draw(text: str) -> str:
    """Draw the final screen as SVG; of overwritten lines only the last state is visible."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    width, height = int(COLUMNS * CHAR) + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + 13 + LINE * row}" xml:space="preserve">'
        f"{spans(line)}</text>"
        for row, line in enumerate(lines)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        "<title>loadstone in a terminal</title>\n"
        "<style>text { font: 13px monospace; fill: #e5e7eb; }</style>\n"
        '<rect width="100%" height="100%" rx="8" fill="#111827"/>'
    )
    return "\n".join([head, *rows, "</svg>", ""])


def picture() -> str:
    """Return the picture of a plan and a load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(llama(4, 256), folder / "model.safetensors")
        shown = ""
        for command in ("plan", "load"):
            shown += f"$ loadstone {command} model.safetensors\r\n"
            shown += in_terminal([COMMAND, command, "model.safetensors"], folder)
    return draw(shown)


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
