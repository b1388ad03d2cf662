"""The page of each agent holds every field of its config, with the default and the comment beside it."""

import ast
import dataclasses
import inspect
import io
import pathlib
import textwrap
import tokenize

import pytest

from framework.programs.registry import find_agent

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "agents"
NAMES = ("dqn", "impala", "ppo", "sac")


def fields_table(config):
    """All fields of ``config`` as a table in Markdown, from the sources of the class and of its bases."""
    rows = {}
    for cls in reversed(config.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                lines = [line for line in range(node.lineno, node.end_lineno + 1) if line in comments]
                above = source.splitlines()[node.lineno - 2].strip()  # where none stands behind the field
                effect = " ".join(comments[line] for line in lines) or above.lstrip("# ")
                effect = effect.replace("|", "\\|")
                rows[node.target.id] = f"| `{node.target.id}` | `{ast.unparse(node.value)}` | {effect} |"
    assert list(rows) == [field.name for field in dataclasses.fields(config)]
    return "\n".join(["| field | default | effect |", "|---|---|---|", *rows.values()])


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_every_field(name):
    table = fields_table(type(find_agent(name).make_config()))
    assert table.count("\n") > 20 and not any(line.endswith("|  |") for line in table.splitlines())
    assert table in (PAGES / f"{name}.md").read_text(encoding="utf-8"), (
        f"docs/agents/{name}.md lacks\n{table}"
    )
