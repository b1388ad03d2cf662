"""The one error that the command line shows without a traceback."""


class CommandError(Exception):
    """What is wrong and what to do about it, for the person at the terminal."""
