"""Serialization of `TableInfo` for the wire."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.types import CallStats, RateLimiterInfo, TableInfo, TableWorkerTime, TensorSpec
from framework.types import Nest


def to_wire(info: TableInfo) -> dict[str, Any]:
    """Returns `info` as numbers, strings, lists and dicts."""
    limiter = info.rate_limiter_info
    return {
        **info._asdict(),
        "rate_limiter_info": [*limiter[:4], list(limiter.insert_stats), list(limiter.sample_stats)],
        "table_worker_time": list(info.table_worker_time),
        "signature": _signature_to_wire(info.signature),
    }


def from_wire(value: dict[str, Any]) -> TableInfo:
    """Inverts `to_wire`; a signature becomes a nest of `TensorSpec`."""
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
    leaves, structure = nests.flatten(signature)
    specs = [TensorSpec.of(leaf) for leaf in leaves]
    return [structure, [[list(spec.shape), spec.dtype.str, spec.name] for spec in specs]]


def _signature_from_wire(value: Any) -> Nest:
    if value is None:
        return None
    structure, described = value
    specs = [TensorSpec(tuple(shape), np.dtype(kind), name) for shape, kind, name in described]
    return nests.packer(structure)(specs)
