"""Environments in other processes: environment servers of a run, and applications that ask for actions."""

from framework.environments.remote.external import ExternalEnvironment as ExternalEnvironment
from framework.environments.remote.servers import RemoteEnvironment as RemoteEnvironment
