"""Packaging of Repertory. What is tested together, to the exact version, stands in ``constraints/``."""

import pathlib
import runpy

from setuptools import find_packages, setup

# The markers of the extras that some Pythons lack.
marker = runpy.run_path(str(pathlib.Path(__file__).with_name("launch") / "extras.py"))["marker"]

ATARI = ["ale-py>=0.10", "opencv-python-headless>=4.8"]
# The tests of dm-control are skipped where it is missing.
DM_CONTROL = [f"dm-control>=1.0.20; {marker('dm-control')}", "mujoco<4"]
MINATAR = ["minatar>=1.0.15"]
MINIGRID = [f"minigrid>=3; {marker('minigrid')}"]
# PettingZoo's particle environments are in mpe2.
MINARI = ["minari[hdf5]>=0.5"]
PETTINGZOO = ["pettingzoo>=1.25", "mpe2>=1"]
# EnvPool is not among TEST: it takes 0.7 GB.
ENVPOOL = [f"envpool>=1; {marker('envpool')}"]
EXAMPLES = ["optuna>=4"]
# Policies as ONNX files, and over HTTP.
EXPORT = ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.20"]
KERAS = ["keras>=3.12"]
SERVE = ["starlette>=0.40", "uvicorn>=0.30", "httptools>=0.6"]
WANDB = ["wandb>=0.18"]
# What runs the notebooks in examples/notebooks; a user of Jupyter has these.
NOTEBOOKS = ["ipykernel>=6", "nbclient>=0.10", "nbformat>=5.9"]
SLURM = ["submitit>=1.5"]
TEST = [
    *ATARI,
    *DM_CONTROL,
    *MINATAR,
    *MINIGRID,
    *EXAMPLES,
    *PETTINGZOO,
    *SLURM,
    *EXPORT,
    *KERAS,
    *SERVE,
    "pytest>=8",
    "pytest-cov",
    "pytest-rerunfailures",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "scipy",
    "ruff",
    "mypy",
]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26", "latex2mathml>=3.78"]

setup(
    name="repertory",
    version="0.2.0",
    description="Actor-model reinforcement learning in PyTorch with a Reverb-style replay server",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["framework*", "agents*", "launch*"]),
    package_data={name: ["py.typed"] for name in ("framework", "agents", "launch")},
    install_requires=[
        "numpy>=1.23",
        "dm-env>=1.6",
        "dm-tree>=0.1.8",
        # Before 2.10, `autocast` under `no_grad` fills its cache of weights without their history, and the
        # forward after it loses gradients.
        "torch>=2.10",
        "gymnasium[classic-control]>=1.1",
        "pyzmq>=26",
        "msgpack>=1",
        "cloudpickle>=2.2",
        "psutil>=5.9",
        "tyro>=0.8",
        "rich>=13",
        "tensorboard>=2.8",
        "matplotlib>=3.7",
        "imageio[ffmpeg]>=2.31",
        "lz4>=4",
        "pyyaml>=6",
    ],
    extras_require={
        "test": TEST,
        "docs": DOCS,
        "examples": EXAMPLES,
        "optuna": EXAMPLES,
        "atari": ATARI,
        "mujoco": ["gymnasium[mujoco]>=1.1"],
        "dm-control": DM_CONTROL,
        "minatar": MINATAR,
        "minigrid": MINIGRID,
        "minari": MINARI,
        # MuJoCo 3.12 returns other types, with which gymnasium-robotics makes no Fetch robots.
        "robotics": ["gymnasium-robotics>=1.4", "mujoco<3.12"],
        "wandb": WANDB,
        "slurm": SLURM,
        "notebooks": NOTEBOOKS,
        "export": EXPORT,
        "keras": KERAS,
        "keras-tensorflow": [*KERAS, "tensorflow>=2.18"],
        "keras-jax": [*KERAS, "jax>=0.5"],
        "serve": SERVE,
        "pettingzoo": PETTINGZOO,
        "open-spiel": ["open-spiel>=1.5"],
        "envpool": ENVPOOL,
        "box2d": ["gymnasium[box2d]>=1.1"],
        "ray": ["ray>=2.40"],
        "reverb": ["dm-reverb>=0.7.2", "tensorflow>=2.8,<2.16", "numpy<2"],
        "deepmind": [
            "dm-launchpad==0.5.2",
            "dm-reverb==0.7.2",
            "tensorflow-cpu==2.8.4",
            "protobuf<3.21",
            "numpy<1.24",
        ],
    },
    entry_points={
        "console_scripts": ["repertory=framework.commands.cli:main"],
        "launch.nodes": [f"{name}=framework.replay.node:{name}" for name in ("ReplayNode", "ReverbNode")],
        "repertory.agents": [
            "a2c=agents.a2c:A2C",
            "a3c=agents.a3c:A3C",
            "apex=agents.apex:ApeX",
            "appo=agents.appo:APPO",
            "batch_ppo=agents.batch_ppo:BatchPPO",
            "bc=agents.bc:BC",
            "c51=agents.c51:C51",
            "cql=agents.cql:CQL",
            "crossq=agents.crossq:CrossQ",
            "d4pg=agents.d4pg:D4PG",
            "ddpg=agents.td3:DDPG",
            "dqfd=agents.dqfd:DQfD",
            "dqn=agents.dqn:DQN",
            "dreamer=agents.dreamer:Dreamer",
            "droq=agents.droq:DroQ",
            "edac=agents.edac:EDAC",
            "impact=agents.impact:IMPACT",
            "impala=agents.impala:IMPALA",
            "iqn=agents.iqn:IQN",
            "iql=agents.iql:IQL",
            "keras_dqn=agents.keras_dqn:KerasDQN",
            "keras_ppo=agents.keras_ppo:KerasPPO",
            "maml=agents.maml:MAML",
            "mappo=agents.mappo:MAPPO",
            "mbmpo=agents.mbmpo:MBMPO",
            "mpo=agents.mpo:MPO",
            "ppo=agents.ppo:PPO",
            "ppo_dqn=agents.ppo_dqn:PPODQN",
            "ppo_lagrangian=agents.ppo_lagrangian:PPOLagrangian",
            "pqn=agents.pqn:PQN",
            "r2d2=agents.r2d2:R2D2",
            "qr_dqn=agents.qr_dqn:QRDQN",
            "rainbow=agents.rainbow:Rainbow",
            "rlpd=agents.rlpd:RLPD",
            "random_actions=agents.random_actions:RandomActions",
            "rebrac=agents.rebrac:ReBRAC",
            "recurrent_td3=agents.recurrent_td3:RecurrentTD3",
            "sac=agents.sac:SAC",
            "simba=agents.simba:SimBa",
            "simba_v2=agents.simba_v2:SimBaV2",
            "td3=agents.td3:TD3",
            "td3_bc=agents.td3_bc:TD3BC",
            "td7=agents.td7:TD7",
            "tqc=agents.tqc:TQC",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
