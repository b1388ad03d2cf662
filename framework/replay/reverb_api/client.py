"""The methods of `reverb.Client` that every client of `framework.replay` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from framework import nest as nests
from framework.replay import addresses, contracts
from framework.replay.reverb_api.structured import Config, StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter, Writer
from framework.replay.types import ReplaySample, SampleInfo
from framework.types import Nest


class ReverbApi:
    """Reverb's methods for single steps and samples; a mixin for each `contracts.ReplayClient`."""

    #: Address of the server for other processes; None if they cannot reach it.
    address: str | None

    @property
    def server_address(self) -> str:
        """Address of the server, `host:port` if it has a port; `ValueError` if it has no address."""
        if not self.address:
            raise ValueError("server_address: got tables in this process only, which have no address.")
        is_tcp, port = self.address.startswith("tcp://"), addresses.port_of(self.address)
        return self.address.removeprefix("tcp://") if is_tcp or port is None else f"localhost:{port}"

    def insert(self: contracts.ReplayClient, data: Nest, priorities: Mapping[str, float]) -> None:
        """Inserts one item of one step into each table of `priorities`; the data is stored once.

        ```python
        client.insert({"x": 1.0}, {"replay": 2.0, "queue": 1.0})
        ```
        """
        if not priorities:
            raise ValueError("priorities: got none, expected {table: priority} with at least one table.")
        with Writer(self, 1, max_in_flight_items=1) as writer:
            writer.append(data)
            for table, priority in priorities.items():
                writer.create_item(table, 1, priority)

    def trajectory_writer(
        self: contracts.ReplayClient,
        num_keep_alive_refs: int,
        *,
        validate_items: bool = True,
        get_signature_timeout_ms: int | None = None,
    ) -> TrajectoryWriter:
        """Returns a writer of items that may refer to the last `num_keep_alive_refs` steps.

        `validate_items` and `get_signature_timeout_ms`, of newer and older versions of Reverb, have no
        effect: the tables check every item.
        """
        return TrajectoryWriter(self, num_keep_alive_refs)

    def structured_writer(self: contracts.ReplayClient, configs: Sequence[Config]) -> StructuredWriter:
        """Returns a writer that creates items by patterns; see `framework.replay.structured`."""
        return StructuredWriter(self, configs)

    def writer(
        self: contracts.ReplayClient,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ) -> Writer:
        """Returns Reverb's older writer, whose items are the last whole steps; see `Writer`."""
        return Writer(self, max_sequence_length, delta_encoded, chunk_length, max_in_flight_items)

    def sample(
        self: contracts.ReplayClient,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        unpack_as_table_signature: bool = False,
        timeout: float | None = None,
    ) -> Iterator[ReplaySample | list[ReplaySample]]:
        """Yields `num_samples` samples.

        Each counts when it is drawn. See `ReplayClient.single_samples` for what is drawn ahead.

        Args:
          table: name of the table.
          num_samples: number of samples; none for -1, as in dm-reverb.
          emit_timesteps: whether each sample is a list of `ReplaySample`, one per time step, which requires
            columns of equal length. If False, it is one `ReplaySample`.
          unpack_as_table_signature: whether the data is a nest: the table's signature or, without one, the
            nest that was written. If False, it is the list of its leaves.
          timeout: seconds for each sample; None waits without a limit.

        Raises:
          ValueError: The columns of an item that is to be split have different lengths.
          DeadlineExceededError: The timeout expired.
        """
        if num_samples < 1 and num_samples != -1:
            raise ValueError(f"num_samples: got {num_samples}, expected at least 1, or -1.")
        return _samples(self, table, num_samples, emit_timesteps, unpack_as_table_signature, timeout)


def _samples(
    client: contracts.ReplayClient, table: str, n: int, steps: bool, nested: bool, timeout: float | None
) -> Iterator[ReplaySample | list[ReplaySample]]:
    signature: Nest = None
    for number, batch in enumerate(client.single_samples(table, n, timeout)):
        if nested and not number:
            signature = client.server_info()[table].signature
        leaves, structure = nests.flatten(batch.data)
        leaves = [leaf[0] for leaf in leaves]
        info = SampleInfo(*[field[0].item() for field in batch.info])
        if nested:
            pack = nests.packer(structure if signature is None else nests.flatten(signature)[1])
        else:
            pack = list
        if not steps:
            yield ReplaySample(info, pack(leaves))
            continue
        lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError("Can't split non timestep trajectory into timesteps. Use emit_timesteps=False.")
        yield [ReplaySample(info, pack([leaf[t] for leaf in leaves])) for t in range(lengths.pop())]
