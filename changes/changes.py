"""Changes for the next release, a file for each: `NAME.KIND.md`, where KIND is one of KINDS.

    python changes/changes.py              prints the unreleased part of the changelog with these files
    python changes/changes.py 0.3.0        writes it into CHANGELOG.md as that release, and deletes the files

`make tag` sets the tags of the releases in `releases.txt`.
"""

import datetime
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "removed", "fixed")
UNRELEASED = "\n## Unreleased\n"


def fold(changelog: str, news: dict[str, list[str]]) -> tuple[str, str, str]:
    """The changelog before its unreleased part, that part with the `news` by kind, and the rest."""
    before, _, rest = changelog.partition(UNRELEASED)
    part, mark, older = rest.partition("\n## ")
    for kind in KINDS:
        title = f"\n### {kind.title()}\n\n"
        if lines := "".join(f"- {line}\n" for line in news.get(kind, [])):
            old = part if title in part else f"{part}{title}"
            head, _, tail = old.partition(title)
            part = f"{head}{title}{lines}{tail if tail[:1] in ('-', '') else chr(10) + tail}"
    return before, part, mark + older


if __name__ == "__main__":
    log, files = ROOT / "CHANGELOG.md", sorted((ROOT / "changes").glob("*.*.md"))
    found: dict[str, list[str]] = {}
    for file in files:
        found.setdefault(file.suffixes[0][1:], []).append(file.read_text(encoding="utf-8").strip())
    before, part, older = fold(log.read_text(encoding="utf-8"), found)
    if version := "".join(sys.argv[1:]):
        title = f"\n## {version} — {datetime.date.today()}\n"
        log.write_text(f"{before}{UNRELEASED}{title}{part}{older}", encoding="utf-8")
        for file in files:
            file.unlink()
    else:
        print(part.strip())
