"""Samples on their way from a table to a reader."""

from __future__ import annotations

import dataclasses

import numpy as np

from framework.replay.rows.layout import Part
from framework.replay.tables.items import Items
from framework.replay.types import SampleInfo


@dataclasses.dataclass(slots=True, eq=False)
class Delivery:
    """Samples that count, and whose rows are kept until they are released or given back.

    ```python
    delivery = table.sample(256, timeout=1.0)                     # drawn: no other reader gets these turns
    sample = gather(table.name, delivery.info, delivery.parts)    # of `rows.layout`; or send the parts
    table.release(delivery)                                       # the rows may be used again; or
    table.give_back(delivery)                                     # as if never drawn
    ```

    Attributes:
      items: the `Items` that the samples were drawn from; a reset of the table makes new ones. None before
        the first draw, and after the delivery was released or given back.
      slots: the table's numbers of the items, int64 `[n]`.
      info: `SampleInfo` of arrays `[n]`.
      parts: the samples by layout; see `rows.layout`.
      ages: number of items that were inserted after each, int64 `[n]`; see `TableInfo.sampled_age`.
    """

    items: Items | None = None
    slots: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    info: SampleInfo = dataclasses.field(init=False)
    parts: list[Part] = dataclasses.field(init=False)
    ages: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
