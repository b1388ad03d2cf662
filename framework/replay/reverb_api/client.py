"""What every client has of Reverb's own interface, on top of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework import nest as nests
from framework.replay.reverb_api.sequence_writer import Writer
from framework.replay.reverb_api.structured import Config
from framework.replay.reverb_api.structured_writer import StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter
from framework.replay.types import ReplaySample, SampleInfo
from framework.types import Nest


class ReverbApi:
    """Methods of ``reverb.Client`` for classes with ``batch_writer``, ``sample_batch`` and
    ``server_info``."""

    def insert(self, data: Nest, priorities: Mapping[str, float]) -> None:
        """Inserts one item with one step, whose data is stored once, into each table of ``priorities``.

        ::

            client.insert({"x": 1.0}, {"replay": 2.0, "queue": 1.0})
        """
        if not priorities:
            raise ValueError("priorities: got none, expected {table: priority} with at least one table")
        with TrajectoryWriter(self, 1) as writer:
            step = writer.append(data)
            leaves, structure = nests.flatten(step)
            # One step with its time axis, as Reverb stores it.
            timed = nests.packer(structure)([leaf_history(writer, path) for path in nests.paths(structure)])
            for table, priority in priorities.items():
                writer.create_item(table, priority, timed if leaves else step)

    def trajectory_writer(self, num_keep_alive_refs: int, *, validate_items: bool = True) -> TrajectoryWriter:
        """A writer of trajectories that may point at the last ``num_keep_alive_refs`` steps."""
        return TrajectoryWriter(self, num_keep_alive_refs, validate_items)

    def writer(
        self,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ) -> Writer:
        """Reverb's older writer, whose items are the last so many whole steps; see ``Writer``."""
        return Writer(self, max_sequence_length, delta_encoded, chunk_length, max_in_flight_items)

    @property
    def server_address(self) -> str:
        """Where the server is, ``host:port`` for TCP; ValueError if it serves this process only."""
        address = getattr(self, "address", None)
        if not address:
            raise ValueError("server_address: the tables are in this process only and have no address")
        return str(address).removeprefix("tcp://")

    def structured_writer(self, configs: Sequence[Config]) -> StructuredWriter:
        """A writer that makes items by patterns; see ``framework.replay.reverb_api.structured``."""
        return StructuredWriter(self, configs)

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        unpack_as_table_signature: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """``num_samples`` samples one after another; each counts when it is handed out.

        Args:
          emit_timesteps: each sample is a list of ``ReplaySample``, one per time step, which needs columns of
          one length;
            otherwise it is one ``ReplaySample``.
          unpack_as_table_signature: the data is the nest that was written; otherwise the list of its leaves.
          timeout: seconds for each sample; None waits for ever.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples: got {num_samples}, expected at least 1")
        return self._samples(table, num_samples, emit_timesteps, unpack_as_table_signature, timeout)

    def _samples(self, table: str, n: int, steps: bool, nested: bool, timeout: float | None) -> Iterator[Any]:
        for _ in range(n):
            batch = self.sample_batch(table, 1, timeout=timeout)  # type: ignore[attr-defined]
            leaves, structure = nests.flatten(batch.data)
            leaves = [leaf[0] for leaf in leaves]
            info = SampleInfo(*[field[0] for field in batch.info])
            pack = nests.packer(structure) if nested else list
            if not steps:
                yield ReplaySample(info, pack(leaves))
                continue
            lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
            if len(lengths) != 1 or -1 in lengths:
                raise ValueError("Can't split non timestep trajectory into timesteps.")
            yield [ReplaySample(info, pack([leaf[t] for leaf in leaves])) for t in range(lengths.pop())]


def leaf_history(writer: TrajectoryWriter, path: str) -> Any:
    """The last step of a column with its time axis."""
    return writer._columns[path][-1:]
