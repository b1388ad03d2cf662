"""Code lines of folders: no blank lines, no comments, no docstrings.

python benchmarks/count_lines.py framework agents launch
"""

from __future__ import annotations

import ast
import io
import pathlib
import sys
import tokenize

SKIP = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """How many lines of `source` hold code."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            text = node.body[0]
            documentation.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIP:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def main(folders: list[str]) -> None:
    total = 0
    for folder in folders:
        counts = [code_lines(path.read_text(encoding="utf-8")) for path in pathlib.Path(folder).rglob("*.py")]
        total += sum(counts)
        print(f"{sum(counts):7,} {folder} ({len(counts)} files, longest {max(counts, default=0)})")
    print(f"{total:7,} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
