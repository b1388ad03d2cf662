"""An agent without torch: its networks are a nest of arrays, and its learner and policy compute in numpy."""

import dataclasses

import numpy as np
import pytest
from helpers.small_programs import FAKE

import launch
from agents.random_actions import RandomActions, RandomActionsConfig
from framework import core
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, load_policy, make_program
from framework.types import StepResult
