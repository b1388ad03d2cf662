"""Runs as Python calls: one run, and what comes of it. Above `programs`, beside the command line."""
