"""What is asked of every agent's config: each of its fields changes something, the device among them.

A table holds, for every field but ``device``: another value than the default, a probe (config to arrays or
text) that shows it, and what else has to be set for it to matter.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import re
import textwrap
import tokenize
from unittest import mock

import numpy as np
import pytest
import torch
from batches import learn


def learner_made(make_learner, config):
    """A probe, with its first argument given: the learner's device, its loss and its precision."""
    # Compiling takes half a minute of a slow machine; that it is asked for is what matters here.
    with mock.patch("torch.compile", return_value="compiled") as compiled:
        learner = make_learner(config)
    return str(learner.device), compiled.called, learner._precision is contextlib.nullcontext


def of_gradients(learned, make_learner):
    """The part of a table for the fields of `AgentConfig`; ``learned`` is the probe of three steps."""
    made = functools.partial(learner_made, make_learner)
    return {
        "discount": (0.5, learned, {}),
        "learning_rate": (1e-2, learned, {}),
        "learning_rate_decay": (3, learned, {}),
        "learning_rate_end": (0.9, learned, {"learning_rate_decay": 3}),
        "adam_epsilon": (1e-2, learned, {}),
        "max_gradient_norm": (1e-9, learned, {}),
        "compile_loss": (True, made, {}),
        "autocast": (True, made, {}),
    }


def of_replay(learned, table):
    """The part of a table for the fields of `OffPolicyConfig`, but for those of rewards."""
    return {
        "max_replay_size": (5000, table, {}),
        "min_replay_size": (17, table, {}),
        "batch_size": (32, table, {}),
        "samples_per_insert": (3.0, table, {}),
        "insert_burst": (7, table, {}),
        "target_update_period": (2, learned, {}),
        "target_update_rate": (1.0, learned, {}),
    }


def assert_complete(table, config_class):
    assert {*table, "device"} == {field.name for field in dataclasses.fields(config_class)}


def assert_changes_something(table, field, config):
    value, probe, others = table[field]
    base = dataclasses.replace(config, **others)
    changed = dataclasses.replace(base, **{field: value})
    assert getattr(base, field) != value
    before, again, after = probe(base), probe(base), probe(changed)
    np.testing.assert_equal(before, again)
    assert np.shape(before) != np.shape(after) or not np.all(np.asarray(before) == np.asarray(after))


def assert_learns_on_the_device(make_learner, config, batch):
    """``make_learner(config)`` makes a learner that takes ``batch``."""
    config = dataclasses.replace(config, device="cuda")
    if torch.cuda.is_available():
        learner = make_learner(config)
        assert torch.isfinite(torch.as_tensor(learn(learner, batch).metrics["loss"]))
        assert next(learner.networks.parameters()).is_cuda
    else:
        with pytest.raises(ValueError, match=r"^device: got 'cuda', expected a device of this process"):
            make_learner(config)


def assert_refuses(config_class, field, value):
    with pytest.raises(ValueError, match=rf"^{field}: got {re.escape(repr(value))}, expected "):
        config_class(**{field: value})


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
                first = node.lineno  # of the comment above, where none stands behind the field
                while not lines and source.splitlines()[first - 2].strip().startswith("#"):
                    first -= 1
                effect = " ".join(comments[line] for line in lines or range(first, node.lineno))
                effect = effect.replace("|", "\\|")
                default = ast.unparse(node.value).replace("dataclasses.field(default_factory=dict)", "{}")
                rows[node.target.id] = f"| `{node.target.id}` | `{default}` | {effect} |"
    assert list(rows) == [field.name for field in dataclasses.fields(config)]
    return "\n".join(["| field | default | effect |", "|---|---|---|", *rows.values()])
