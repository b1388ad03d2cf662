"""What agents are made of.

- ``core``, ``types``, ``specs``: the contracts, the data and its description.
- ``environments``: anything as a batched environment.
- ``actors``, ``adders``: acting, the loop that steps an environment, and experience as replay items.
- ``replay``, ``datasets``: the Reverb-style server, and its items as batches.
- ``learners``, ``losses``, ``networks``: batches as parameters.
- ``programs``: agents as program graphs, for ``launch``.
- ``checkpoints``, ``loggers``, ``commands``: what a run keeps, and the command line.
"""
