"""The commands of `repertory`: one module each, with `main(arguments) -> exit code`."""

import os

# Before torch is loaded: idle OpenMP threads sleep instead of spinning. PPO on Pong with two threads on two
# cores that ten other processes use makes 20 env steps/s like this (with one thread 19), and below 7 without.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
