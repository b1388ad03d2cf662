"""Pickles of live objects: what shares memory shares it afterwards."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch

from framework.pickling import ObjectPickler


def pickled(value):
    file = io.BytesIO()
    ObjectPickler(file).dump(value)
    return pickle.loads(file.getvalue())


def arrays():
    rows = np.arange(12.0).reshape(3, 4)
    return {
        "rows": rows,
        "columns": rows.copy(order="F"),
        "tensor": torch.arange(12.0).reshape(3, 4).numpy(),
        "transposed tensor": torch.arange(12.0).reshape(4, 3).T.numpy(),
    }


@pytest.mark.parametrize("name", arrays())
def test_views_share_the_memory_of_their_owner(name):
    owner = arrays()[name]
    views = [owner[1:2], owner[:, ::2], owner.T]
    again, *others = pickled([owner, *views])
    for view, other in zip(views, others, strict=True):
        np.testing.assert_array_equal(other, view)
        other += 1
        view += 1
    np.testing.assert_array_equal(again, owner)


def test_rows_of_an_expanded_tensor():
    rows = torch.arange(2.0).expand(3, 2).numpy()
    again = pickled([rows[:1], rows[2:]])
    np.testing.assert_array_equal(np.concatenate(again), [[0, 1], [0, 1]])
