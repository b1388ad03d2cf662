"""The rows of the throughput benchmark: each names a program that there is."""

import pytest

from benchmarks import throughput
from benchmarks.programs import peers
from framework.programs import make_agent

ROWS = [(group, label) for group, rows in throughput.GROUPS.items() for label in rows]


@pytest.mark.parametrize(("group", "label"), ROWS, ids=[f"{group}: {label}" for group, label in ROWS])
def test_names_a_program(group, label):
    row = throughput.GROUPS[group][label]
    if isinstance(row, throughput.Peer):
        assert row.row in peers.ROWS
        return
    config = make_agent(row.agent, **row.config).config  # which checks its fields
    envs = row.program["envs_per_actor"]
    if "impala" in row.agent:
        assert (config.queue_batches - 1) * config.batch_size >= envs, "an actor could not add its unrolls"
