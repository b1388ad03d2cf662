"""Runs as Python calls, one or many: what stands above `programs`, beside the command line."""
