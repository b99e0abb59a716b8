"""`python -m truedraft` is the command `truedraft`."""

import sys

from truedraft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
