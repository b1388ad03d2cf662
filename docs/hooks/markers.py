"""Makes the tables of fields, names and recorded results in the pages. It is also a hook of MkDocs.

What a marker makes stands between the marker and `<!-- end -->`, so that a page reads the same in a checkout
and on the site. `python docs/hooks/markers.py --write` (`make pages`) makes these parts; a test compares.

`<!-- fields: MODULE:CLASS -->`: all fields of a dataclass.
`<!-- fields: agents -->`: the fields of all agents' configs, each config under a heading.
`<!-- table: results.learning ROW ROW -->`: rows of `results/records`; without names, all.
`<!-- tasks: results.learning -->`: all of them, by task, with their pictures.
`<!-- table: results.nightly -->`: the rows of `results/records/nightly`.
`<!-- presets: agents -->`: the settings of the presets of whole suites, by source.
`<!-- names: MODULE -->`: the public names of a module, with the first sentence about each.
`<!-- graph: AGENT -->`: the picture of the agent's program graph, a file beside the page.

The hook makes pictures in `results/records` files of the site, and puts a page outside of `docs`, whose links
into `docs` become the site's, in place of `<!-- include: FILE -->` and the line below it.
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
MARKER = re.compile(r"(<!-- (fields|table|tasks|presets|names|graph): (\S+)(.*) -->\n)(?s:.*?)(<!-- end -->)")
INCLUDE = re.compile(r"<!-- include: (\S+) -->\n.*")


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


def default_of(field):
    has_default = field.default is not dataclasses.MISSING
    return repr(field.default if has_default else field.default_factory())


def fields_table(config, names=None):
    """The fields of the dataclass `config`, or those with these names, as a table in Markdown.

    A field without a comment is an error.
    """
    lines, effects = ["| field | default | effect |", "|---|---|---|"], effects_of(config)
    for field in dataclasses.fields(config):
        if names is not None and field.name not in names:
            continue
        effect = effects[field.name].replace("|", "\\|")
        if not effect:
            raise ValueError(f"{config.__name__}.{field.name} has no comment that says what it does")
        lines.append(f"| `{field.name}` | `{default_of(field)}` | {effect} |")
    return "\n".join(lines)


def agents_fields():
    """A section for each config of the registered agents and for each of their bases.

    A section has a table of the fields that its class declares, and the names and defaults of the others.
    """
    registry = module_of("framework.runs.registry")
    names_of = {}
    for name in registry.agent_names():
        config = type(registry.find_agent(name).make_config())
        names_of.setdefault(config, []).append(name)
    configs = {base: [] for config in names_of for base in config.__mro__ if inspect.get_annotations(base)}
    heading = {config: min(names_of.get(config, [config.__name__]), key=len) for config in configs}
    sections = []
    for config in sorted(configs, key=lambda config: (config not in names_of, heading[config])):
        inherited = {}  # Names and defaults by the class that declares them last.
        for field in dataclasses.fields(config):
            declared = next(base for base in config.__mro__ if field.name in inspect.get_annotations(base))
            inherited.setdefault(declared, []).append(field)
        own = inherited.pop(config, [])
        parts = [f"## {heading[config]}", fields_table(config, {field.name for field in own})]
        parts[1:1] = [f"Also of `{name}`." for name in names_of.get(config, []) if name != heading[config]]
        for base in sorted(inherited, key=config.__mro__.index):
            fields = ", ".join(f"`{field.name}={default_of(field)}`" for field in inherited[base])
            parts.append(f"From [{heading[base]}](#{heading[base].lower()}): {fields}.")
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def presets_table():
    """A row for each agent, its preset of a suite, and the source of some of the preset's settings."""
    registry, presets = module_of("framework.runs.registry"), module_of("framework.runs.presets")
    lines = ["| agent | environments | source | settings |", "|---|---|---|---|"]
    for name in registry.agent_names():
        known = presets.presets_of(registry.find_agent(name).load())
        suites = {}
        for pattern, preset in known.items():
            if "*" in pattern or ":" not in pattern:
                shown = pattern.replace(presets.MUJOCO, "gymnasium:ROBOT-v*")
                suites.setdefault(id(preset), (preset, []))[1].append(f"`{shown}`")
        for preset, patterns in suites.values():
            agent, where = name, ", ".join(patterns)
            for source, fields in preset.by_source().items():
                settings = ", ".join(f"`{field}={value!r}`" for field, value in fields.items())
                lines.append(f"| {agent} | {where} | {source} | {settings or 'defaults'} |")
                agent = where = ""
    return "\n".join(lines)


def names_table(name):
    """The public names of a module with the first line of what is said about each."""
    module = module_of(name)
    lines = ["| name | what it is |", "|---|---|"]
    for public, value in sorted(vars(module).items(), key=lambda item: item[0].lower()):
        if not public.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            first = inspect.getdoc(value).partition("\n")[0].replace("|", "\\|")
            lines.append(f"| `{public}` | {first} |")
    return "\n".join(lines)


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


def results_by_task(module):
    """The recorded results in a section for each task."""
    learning = module_of(module)
    return learning.tasks(learning.recorded(learning.ROWS, RECORDS))


def graph_picture(agent):
    """The program graph of the agent with this name, as SVG."""
    graph = module_of("framework.commands.graph")
    groups, _ = graph.build(agent)
    return graph.as_svg(agent, groups)


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


def made(markdown):
    """The page with what its markers make, and the pictures that it shows, by their names."""
    pictures = {}

    def part(marker):
        begin, kind, name, rows, end = marker.groups()
        if kind == "table":
            text = results_table(name, rows.split())
        elif kind == "tasks":
            text = results_by_task(name)
        elif kind == "presets":
            text = presets_table()
        elif kind == "names":
            text = names_table(name)
        elif kind == "graph":
            pictures[f"{name}.svg"] = graph_picture(name)
            text = f"![The program graph of {name}]({name}.svg)"
        elif name == "agents":
            text = agents_fields()
        else:
            module, _, config = name.partition(":")
            text = fields_table(getattr(module_of(module), config))
        return f"{begin}\n{text}\n\n{end}"

    text, count = MARKER.subn(part, markdown)
    if count != len(re.findall(r"<!-- (?!include|end)", markdown)):
        raise ValueError("a marker has an unknown name or no `<!-- end -->`")
    return text, pictures


def on_page_markdown(markdown, **_):
    """The page as MkDocs calls it: with pages from outside, and with links to the site's pictures."""
    markdown = INCLUDE.sub(lambda marker: included(marker[1]), markdown)
    return markdown.replace("../results/records/", "results/records/")


def stale(write=False):
    """The files in `docs` that differ from what their markers make; with `write`, written again."""
    files = {}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        files[page], pictures = made(page.read_text(encoding="utf-8"))
        files.update({page.parent / name: picture for name, picture in pictures.items()})
    different = [
        path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in different if write else ():
        path.write_text(files[path], encoding="utf-8")
    return [path.relative_to(ROOT).as_posix() for path in different]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"got {sys.argv[1:]}, expected --write")
    for file in stale(write=True):
        print(f"{file} was made anew")
