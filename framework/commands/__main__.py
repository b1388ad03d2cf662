"""`python -m framework.commands` is `repertory`."""

import sys

from framework.commands.cli import main

sys.exit(main())
