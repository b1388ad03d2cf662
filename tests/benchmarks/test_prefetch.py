"""Each number of batches fetched ahead has a row, with a learner and without."""

import pytest

from benchmarks.learner import prefetch


@pytest.mark.parametrize("flags", [[], ["--idle"]], ids=["learner", "idle"])
def test_the_table(flags, capsys):
    prefetch.main(["--batch-size=4", "--items=30", "--seconds=0.05", "--prefetch", "0", "2", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("batches of 4, 0.2 MB, on cpu")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]
    assert [row[0] for row in rows] == ["none needed"] * (not flags) + ["0", "2"]
    assert all(float(row[1]) > 0 for row in rows)
