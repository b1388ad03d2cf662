"""Each number of batches fetched ahead has a row, with a learner and without."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import prefetch


@pytest.mark.parametrize("flags", [[], ["--idle"]], ids=["learner", "idle"])
def test_the_table(flags, capsys):
    prefetch.main(["--batch-size=4", "--items=30", "--seconds=0.05", "--prefetch", "0", "2", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("batches of 4, 0.2 MB, on cpu")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]
    assert [row[0] for row in rows] == ["none needed"] * (not flags) + ["0", "2"]
    assert all(float(row[1]) > 0 for row in rows)


def test_the_table_of_replay_holds_whole_transitions():
    client = prefetch.filled_table(600)
    assert client.server_info()["replay"].current_size == 600
    with prefetch.Dataset(client, "replay", 8, prefetch=0) as dataset:
        data = next(dataset).data
    assert data["observation"].shape == data["next_observation"].shape == (8, 84, 84, 4)
    assert (np.asarray(data["observation"]) != np.asarray(data["next_observation"])).mean() > 0.9
