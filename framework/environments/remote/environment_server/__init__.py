"""Serves environments to a run of Repertory from a separate process.

This package imports nothing of Repertory: copy its folder to where the environment is, another host or
another Python. It needs Python 3.8 or newer, numpy, pyzmq, msgpack, and the package of the environment:

    python -m environment_server gymnasium:CartPole-v1 --connect HOST:5555 --key environments.key --num-envs 8

The name is `gymnasium:ID`, `gym:ID` (the package before gymnasium), or `module:object` of a callable that
returns an environment with the methods of gymnasium's or dm_env's; its parameter `seed`, if it has one,
receives the env's seed. From a script, with `serve` of `server` and `EnvironmentsOf` of `batches`:
`serve(EnvironmentsOf(make_one), ["HOST:5555"], "environments.key", num_envs=8)`.
"""
