"""Messages of one writer that arrive while an earlier one waits for its rate limiter lose nothing."""

import numpy as np
import pytest

from framework import replay
from framework.replay.served import ServedClient


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_every_item_arrives_however_many_messages_wait(local):
    with replay.Server([replay.Table.queue("t", 150)]) as server:
        client = ServedClient(server.address, local=local)
        writer = client.batch_writer(max_in_flight_items=10_000)
        sent = 0
        for _ in range(40):  # messages of their own, of which the first fills the table
            rows = writer.append("s", {"x": np.arange(sent, sent + 50)})
            writer.create_items("t", {"x": writer.slice("s", "x", rows)})
            writer.release("s", rows)
            writer.settle()
            sent += 50
        assert client.server_info(timeout=5)["t"].current_size == 150
        seen = []
        while len(seen) < sent:
            seen.extend(client.sample_batch("t", 50, timeout=5).data["x"].tolist())
        assert seen == list(range(sent))
        writer.flush(timeout=5)
        assert writer.close(timeout=5) == 0
        client.close()
