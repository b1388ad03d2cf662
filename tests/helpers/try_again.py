"""Tries the tests again that failed in the run of pytest before this, alone; for CI.

``python tests/helpers/try_again.py CACHE``, the `cache_dir` of that run: exits with 0 if there were at most
three and all pass. It names them: a test that fails and then passes is a defect, to mend or to list in
``tests/quarantine.txt``.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

MOST = 3  # more than these are no accident


def main() -> int:
    cache = sys.argv[1]
    file = pathlib.Path(cache, "v", "cache", "lastfailed")
    failed = sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
    if not 0 < len(failed) <= MOST:
        return 1
    print("\n##### FAILED, and tried once more, alone:", *failed, sep="\n##### ", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", f"cache_dir={cache}", *failed]
    result = subprocess.run(command, check=False)
    if result.returncode == 0:
        print("##### Passed at the second try: mend these tests, or name them in tests/quarantine.txt.")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
