"""A command whose stderr is a terminal."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

BIG = 128 << 20  # bytes of the fixture `big`; as F64 instead of BF16, four times as many


class Terminal:
    """A command whose stderr is a terminal with the given number of columns."""

    def __init__(self, command: Path, *arguments: object, columns: int = 80, term: str = "xterm"):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env=os.environ | {"TERM": term},
        )
        os.close(slave)
        self.seen = b""

    def read(self) -> Iterator[bytes]:
        """Yield all output received until then, each time there is more."""
        with contextlib.suppress(OSError):  # EIO means that the command has closed its side
            while piece := os.read(self._master, 4096):
                self.seen += piece
                yield self.seen

    def finish(self) -> tuple[int, str, str]:
        """Return status, stdout, and everything sent to the terminal."""
        for _ in self.read():
            pass
        stdout, _ = self.process.communicate()
        os.close(self._master)
        return self.process.returncode, stdout, self.seen.decode()


def lines_shown(seen: str) -> list[str]:
    return [text.split("\x1b[K")[0] for text in seen.split("\r") if "%" in text]


def pause(process: subprocess.Popen) -> None:
    """Stop a command for half a second, so that its work takes long enough for a rate."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
