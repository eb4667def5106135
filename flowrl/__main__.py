"""`python -m flowrl` is the `flowrl` command."""

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
