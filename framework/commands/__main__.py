"""`python -m framework.commands` is `repertory`."""

import sys

from framework.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
