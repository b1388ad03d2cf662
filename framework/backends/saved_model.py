"""Writes a policy on Keras as a SavedModel, for TensorFlow Serving and for programs without Repertory."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import tree

from framework.backends.keras import KerasAgent


def save(policy: Any, folder: pathlib.Path, text: str) -> None:
    """Writes the folder of a SavedModel, in place of an older one.

    Its signature `serving_default` takes the observation `[B, ...]`, under its own names if it is a dict, or
    as `observation`, and gives the greedy `action` `[B]`.

    Args:
      policy: the `LoadedPolicy` of a run.
      folder: the folder.
      text: goes into the file `repertory.json` in it.

    Raises:
      ValueError: The agent is not one on Keras with TensorFlow.
      FileExistsError: The folder has something else.
    """
    agent = policy.agent
    backend = agent.config.backend if isinstance(agent, KerasAgent) else "torch"
    if backend != "tensorflow":
        raise ValueError(
            f"format: got 'saved_model' for {type(agent).__name__} on {backend}, expected an agent on Keras "
            "with backend 'tensorflow'. Use torch or onnx for agents on torch."
        )
    if folder.exists() and not (folder / "saved_model.pb").exists():
        raise FileExistsError(f"{folder} is no SavedModel, and would be replaced. Give another path.")
    import tensorflow as tf

    acting = agent.make_policy(policy.networks, evaluation=True)
    variables = policy.networks.variables(acting.variables)
    for variable, leaf in zip(variables, policy.networks.leaves(acting.variables), strict=True):
        variable.assign(leaf)
    module, dtype = tf.Module(), policy.spec.actions.dtype
    module.of_layers = [each.value for each in variables]
    specs = tree.map_structure_with_path(
        lambda path, leaf: tf.TensorSpec(
            (None, *leaf.shape), leaf.dtype, "_".join(map(str, path)) or "observation"
        ),
        policy.spec.observations,
    )

    def serve(observation: Any) -> dict[str, Any]:
        values = tree.map_structure(
            lambda leaf: tf.cast(leaf, tf.float32) if leaf.dtype.is_floating else leaf, observation
        )
        return {"action": tf.cast(tf.argmax(acting.outputs(values), -1), dtype)}

    module.serve = tf.function(serve, input_signature=[specs], autograph=False)
    if folder.exists():
        shutil.rmtree(folder)
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.serve})
    (folder / "repertory.json").write_text(text, encoding="utf-8")
