"""What agents are made of.

- ``core``, ``types``, ``specs``: the contracts, the data and its description.
- ``environments``, ``environment_loop``, ``observers``: anything as a batched environment, and what steps it.
- ``actors``, ``adders``: acting, and experience as replay items.
- ``replay``, ``datasets``: the Reverb-style server, and its items as batches.
- ``learners``, ``losses``, ``networks``: batches as parameters.
- ``programs``: agents as program graphs, for ``launch``.
- ``counting``, ``checkpointing``, ``loggers``: what a run keeps.
"""
