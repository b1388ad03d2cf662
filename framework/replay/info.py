"""`TableInfo` as it travels."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.types import CallStats, RateLimiterInfo, TableInfo, TableWorkerTime
from framework.types import Nest


def to_wire(info: TableInfo) -> dict[str, Any]:
    """Numbers, strings, lists and dicts only."""
    limiter = info.rate_limiter_info
    return {
        **info._asdict(),
        "rate_limiter_info": [*limiter[:4], list(limiter.insert_stats), list(limiter.sample_stats)],
        "table_worker_time": list(info.table_worker_time),
        "signature": _signature_to_wire(info.signature),
    }


def from_wire(value: dict[str, Any]) -> TableInfo:
    """The opposite of `to_wire`; a signature comes back as a nest of ``dm_env.specs.Array``."""
    spi, low, high, size, inserts, samples = value["rate_limiter_info"]
    return TableInfo(
        **{
            **value,
            "rate_limiter_info": RateLimiterInfo(
                spi, low, high, size, CallStats(*inserts), CallStats(*samples)
            ),
            "table_worker_time": TableWorkerTime(*value["table_worker_time"]),
            "signature": _signature_from_wire(value["signature"]),
        }
    )


def _signature_to_wire(signature: Nest) -> Any:
    if signature is None:
        return None
    specs, structure = nests.flatten(signature)
    described = []
    for spec in specs:
        shape = [None if size is None else int(size) for size in spec.shape]
        kind = np.dtype(getattr(spec.dtype, "as_numpy_dtype", spec.dtype)).str
        described.append([shape, kind, str(getattr(spec, "name", None) or "")])
    return [structure, described]


def _signature_from_wire(value: Any) -> Nest:
    if value is None:
        return None
    from dm_env import specs

    structure, described = value
    leaves = []
    for shape, kind, name in described:
        # dm_env knows no open sizes; they come back as 0.
        leaves.append(specs.Array([size or 0 for size in shape], np.dtype(kind), name or None))
    return nests.packer(structure)(leaves)
