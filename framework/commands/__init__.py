"""The commands of `repertory`: one module each, with `main(arguments) -> exit code`."""

import os

# Torch is not loaded yet, so idle OpenMP threads will sleep instead of spinning. PPO on Pong with two
# threads, on two cores that ten other processes use, makes 20 env steps/s like this, else below 7.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
