"""The replay server; `Server` and `Table` are where `reverb.server` has them."""

from framework.replay.server.server import Server as Server
from framework.replay.tables.table import Table as Table
