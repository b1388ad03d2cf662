"""The agents, one file each: config, networks, policy, loss, agent, presets.

The entry points `repertory.agents` of `setup.py` give them names, like agents of other packages; see
`framework.runs.registry`.
"""
