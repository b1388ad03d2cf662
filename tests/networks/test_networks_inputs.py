"""What networks take an observation for, and how the user says otherwise."""

import logging
import pickle

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs
from gymnasium import spaces
from small_programs import small_program

from agents.dqn import DQN, DQNConfig
from framework import networks, specs
from framework.networks import inputs


def array(shape, dtype=np.uint8, low=0, high=255, stacked=False):
    return (specs.StackedBoundedArray if stacked else dm_specs.BoundedArray)(shape, dtype, low, high)


FLOAT, PLANES = np.float32, "one {}-channel frame of {} -> convolution, as they are"
RGB = "RGB frame of {} -> convolution, / 255"
SEEN = {
    # Pictures, and stacks of them, whoever has stacked them.
    "picture": (array((84, 84, 3)), "one " + RGB.format("84 x 84")),
    "tall": (array((210, 160, 3)), "one " + RGB.format("210 x 160")),
    "first": (array((3, 48, 40)), "one " + RGB.format("48 x 40")),
    "wide": (array((4, 16, 128)), "one 4-channel frame of 16 x 128 -> convolution, / 255"),
    "stacked": (array((4, 84, 84, 3)), "four RGB frames of 84 x 84 -> convolution, / 255"),
    "stack": (array((4, 3, 84, 84), stacked=True), "four RGB frames of 84 x 84 -> convolution, / 255"),
    "unbounded": (dm_specs.Array((64, 64, 1), np.uint8), "one gray frame of 64 x 64 -> convolution, / 255"),
    "int64": (array((48, 48, 3), np.int64), "one " + RGB.format("48 x 48")),
    # Boards have few cells and many planes; their height and width are the sides that are alike.
    "chess": (array((8, 8, 111), bool, 0, 1), PLANES.format(111, "8 x 8")),
    "minigrid": (array((20, 7, 7), np.float32, 0, 1), PLANES.format(20, "7 x 7")),
    "seaquest": (array((10, 10, 10), np.float32, 0, 1), PLANES.format(10, "10 x 10")),
    "connect": (array((6, 7, 2), np.int8, 0, 1), PLANES.format(2, "6 x 7")),
    "go": (array((6, 7, 20), np.int8, 0, 1), PLANES.format(20, "6 x 7")),
    "cells": (array((7, 7, 3), np.uint8, 0, 10), PLANES.format(3, "7 x 7")),
    "strip": (array((2, 9, 2)), "36 numbers -> flat, / 255"),
    # Bytes that are no picture, and other numbers.
    "ram": (array((128,)), "128 numbers -> flat, / 255"),
    "gray": (array((84, 84)), "7056 numbers -> flat, / 255"),
    "levels": (array((3,), np.int64, 0, 9), "three numbers -> flat, as they are"),
    "voxels": (array((4, 5, 6, 7), np.float32), "840 numbers -> flat, as they are"),
    "action": (dm_specs.DiscreteArray(4), "one code of 4 values -> one-hot"),
    "actions": (array((2,), np.int64, 0, 3, stacked=True), "two codes of 4 values -> one-hot"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_an_encoder_does_what_is_said(name):
    spec, words = SEEN[name]
    assert inputs.describe({name: spec}) == [f"observation/{name} {spec.shape} {spec.dtype}: {words}"]
    encoder = networks.ObservationEncoder(spec)
    assert ("convolution" in words) == bool(len(encoder.images)), words
    most = torch.full((2, *spec.shape), int(getattr(spec, "maximum", np.array(255)).max()))
    if "flat" in words:
        assert encoder(most).max() == (1 if "/ 255" in words else most.max())
    elif "convolution" in words:  # With integers, as with floats that were divided before.
        floats = most / 255 if "/ 255" in words else most.float()
        torch.testing.assert_close(encoder(most.to(getattr(torch, str(spec.dtype)))), encoder(floats))


@pytest.mark.parametrize(
    ("shape", "kind", "images", "largest"),
    [
        ((84, 84), "pixels", 1, None),
        ((7, 7, 3), "numbers", 0, 255.0),
        ((7, 7, 3), "bytes", 0, 1.0),
        ((9,), "numbers", 0, 255.0),
    ],
)
def test_the_user_may_say_otherwise(shape, kind, images, largest):
    spec = {"a": array(shape), "b": array((9,))}
    told = pickle.loads(pickle.dumps(inputs.declared(spec, [f"observation/a={kind}"])))
    encoder = networks.ObservationEncoder(told["a"])
    assert len(encoder.images) == images
    features = encoder(torch.full((2, *shape), 255, dtype=torch.uint8))
    assert largest is None or features.max() == largest
    assert inputs.inputs_of(told)[1] == inputs.inputs_of(spec)[1]


@pytest.mark.parametrize(
    "text", ["camera=pixels", "observation=picture", "observation/b=pixels", "observation"]
)
def test_a_name_or_a_kind_that_is_none_is_an_error(text):
    with pytest.raises(ValueError, match=f"inputs: got '{text}'"):
        inputs.declared({"b": array((9,))}, [text])


def test_a_run_says_it_once_and_its_networks_are_made_so(caplog):
    caplog.set_level(logging.INFO, "framework.programs.make")
    agent = DQN(DQNConfig(inputs=("observation=numbers",)))
    small_program(agent)
    assert [message for message in caplog.messages if "observation" in message] == [
        "observation (3,) float32: three numbers -> flat, as they are"
    ]
    spec = specs.from_spaces(spaces.Box(0, 255, (40, 40, 3), np.uint8), spaces.Discrete(2))
    assert not len(agent.make_networks(spec).q_network.encoder.images)


def test_numbers_are_normalized_whatever_their_dtype():
    spec = {"camera": array((8, 8, 3)), "code": dm_specs.DiscreteArray(3), "ram": array((2,))}
    normalizer = networks.ObservationNormalizer(spec, enabled=True)
    rows = {
        "camera": torch.zeros(1, 4, 8, 8, 3),
        "code": torch.zeros(1, 4),
        "ram": torch.tensor([[[0, 9], [2, 9]] * 2]),
    }
    normalizer.update(rows, torch.ones(1, 4, dtype=torch.bool))
    after = normalizer(rows)
    assert after["camera"] is rows["camera"] and after["code"] is rows["code"]
    torch.testing.assert_close(after["ram"][0, :2, 0], torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(networks.ObservationEncoder(spec["ram"])(after["ram"]), after["ram"])
