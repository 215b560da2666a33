"""``python -m tellin``: the command ``tellin``, where its script is not on the path."""

import sys

from tellin.entrypoints.cli import main

if __name__ == "__main__":
    sys.argv[0] = "tellin"
    sys.exit(main())
