"""``python -m graphfsdp`` is the command line."""

import sys

from graphfsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
