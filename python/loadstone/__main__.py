"""``python -m loadstone``: see :mod:`loadstone._command.command`."""

import sys

from loadstone._command.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
