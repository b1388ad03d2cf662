"""The agents, one file each: config, networks, policy, loss, agent, presets.

They are found by name through the entry points `repertory.agents` of `setup.py`, as agents of other
packages are; see `framework.programs.registry`.
"""
