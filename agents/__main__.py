"""``python -m agents`` is ``repertory``."""

import sys

from agents.cli import main

if __name__ == "__main__":
    sys.exit(main())
