"""A hook of MkDocs: markers in pages become tables of fields and of recorded results, and pictures of graphs.

`<!-- fields: MODULE:CLASS -->` stands for all fields of a dataclass.
`<!-- fields: agents -->` stands for the fields of all agents' configs, each config under a heading.
`<!-- table: results.learning ROW ROW -->` stands for rows of `results/records`; without names, for all.
`<!-- table: results.nightly -->` stands for the rows of `results/records/nightly`.
`<!-- graph: AGENT -->` stands for the picture of the agent's program graph.
`<!-- include: FILE -->` stands for a page outside of `docs`, whose links into `docs` become the site's.
Pictures in `results/records` become files of the site.
The line below a marker tells readers of the Markdown where to find the table; the table replaces it.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import pathlib
import re
import sys
import textwrap
import tokenize

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results" / "records"
MARKER = re.compile(r"<!-- (fields|table|graph|include): (\S+)(.*) -->\n.*")


def module_of(name):
    """The module of this checkout."""
    if str(ROOT) not in sys.path:  # Here, as MkDocs restores the path after loading.
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(name)


def effects_of(config):
    """The comments of all fields, behind or above them, from the sources of the class and of its bases."""
    effects = {}
    for cls in reversed(config.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                lines = [line for line in range(node.lineno, node.end_lineno + 1) if line in comments]
                first = node.lineno
                while not lines and source.splitlines()[first - 2].strip().startswith("#"):
                    first -= 1
                lines = lines or range(first, node.lineno)
                effects[node.target.id] = " ".join(comments[line] for line in lines)
    return effects


def fields_table(config):
    """All fields of the dataclass `config` as a table in Markdown. A field without a comment is an error."""
    lines, effects = ["| field | default | effect |", "|---|---|---|"], effects_of(config)
    for field in dataclasses.fields(config):
        effect = effects[field.name].replace("|", "\\|")
        if not effect:
            raise ValueError(f"{config.__name__}.{field.name} has no comment that says what it does")
        has_default = field.default is not dataclasses.MISSING
        default = field.default if has_default else field.default_factory()
        lines.append(f"| `{field.name}` | `{default!r}` | {effect} |")
    return "\n".join(lines)


def agents_fields():
    """A section for each config of the registered agents, with all of its fields."""
    registry = module_of("framework.runs.registry")
    names_of = {}
    for name in registry.agent_names():
        config = registry.find_agent(name).make_config()
        names_of.setdefault(type(config), []).append(name)
    sections = (
        f"## {', '.join(names)} {{#{min(names, key=len)}}}\n\n{fields_table(config)}"
        for config, names in names_of.items()
    )
    return "\n\n".join(sections)


def results_table(module, names):
    """What `python -m MODULE --table` prints of the recorded results, for the rows named or for all."""
    learning = module_of("results.learning")
    if module == "results.nightly":
        nightly = module_of(module)
        return nightly.table(RECORDS / "nightly", list(nightly.rows()))
    results = learning.recorded(names or learning.ROWS, RECORDS)
    if missing := set(names) - set(results):
        raise ValueError(f"{RECORDS} has no results of {sorted(missing)}")
    return learning.table(results)


def graph_picture(agent):
    """The program graph of the agent with this name as SVG inside HTML."""
    graph = module_of("framework.commands.graph")
    groups, _ = graph.build(agent)
    return f"<div>{''.join(graph.as_svg(agent, groups).splitlines())}</div>"


def included(name):
    """The page of this name at the root. Links to files that are no part of the site become their text."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\[([^]]+)\]\((?!https?:)[A-Z]+\.md\)", r"\1", text)


def on_files(files, config):
    """The pages and, as files of the site, the pictures in `results/records`."""
    for picture in RECORDS.glob("*.png"):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown, **_):
    """The page with its tables, and with links to the site's pictures, as MkDocs calls it."""

    def table(marker):
        kind, name, rows = marker.groups()
        if kind == "table":
            return results_table(name, rows.split())
        if name == "agents":
            return agents_fields()
        if kind == "include":
            return included(name)
        if kind == "graph":
            return graph_picture(name)
        module, _, config = name.partition(":")
        return fields_table(getattr(module_of(module), config))

    return MARKER.sub(table, markdown.replace("../results/records/", "results/records/"))
