"""Tries the tests again that failed in the run of pytest before this, alone; for CI.

``python tests/helpers/try_again.py``: exits with 0 if there were at most three and all pass. It names them: a
test that fails and then passes is a defect, to mend or to list in ``tests/quarantine.txt``.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

MOST = 3  # more than these are no accident
FAILED = pathlib.Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text(encoding="utf-8"))) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return 1
    print("\n##### FAILED, and tried once more, alone:", *failed, sep="\n##### ", flush=True)
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *failed], check=False)
    if result.returncode == 0:
        print("##### Passed at the second try: mend these tests, or name them in tests/quarantine.txt.")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
