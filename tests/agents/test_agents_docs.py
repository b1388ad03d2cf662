"""The page of each agent holds every field of its config, with the default and the comment beside it."""

import ast
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
    """All fields of ``config`` as a table in Markdown, from the source of the class."""
    source = textwrap.dedent(inspect.getsource(config))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = ["| field | default | effect |", "|---|---|---|"]
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            lines_of_node = [line for line in range(node.lineno, node.end_lineno + 1) if line in comments]
            first = node.lineno  # without a comment behind it, the one above it
            while not lines_of_node and source.splitlines()[first - 2].strip().startswith("#"):
                first -= 1
            effect = " ".join(comments[line] for line in lines_of_node or range(first, node.lineno))
            effect = effect.replace("|", "\\|")
            lines.append(f"| `{node.target.id}` | `{ast.unparse(node.value)}` | {effect} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_every_field(name):
    table = fields_table(type(find_agent(name).make_config()))
    assert table.count("\n") > 20 and not any(line.endswith("|  |") for line in table.splitlines())
    assert table in (PAGES / f"{name}.md").read_text(encoding="utf-8"), (
        f"docs/agents/{name}.md lacks\n{table}"
    )
