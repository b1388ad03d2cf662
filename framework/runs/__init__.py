"""A run: its settings, its folder, the agents that it may name, and its services."""
