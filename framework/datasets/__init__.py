"""Datasets: replay items as batches on the learner's device.

```python
dataset = Dataset(client, "replay", batch_size=256, device="cuda")
for sample in dataset:                       # ReplaySample of torch tensors, [N, ...] or [N, T, ...]
    result = learner.step(sample)
    dataset.update_priorities(sample.info.key, result.priorities)
```

The dataset gathers rows straight into its batches (pinned memory if the device is a GPU), prefetches in a
thread where the program has threads; see `Dataset` for every argument.
"""

from framework.datasets.dataset import Dataset
from framework.replay import ReplaySample, SampleInfo

__all__ = [
    "Dataset",
    "ReplaySample",
    "SampleInfo",
]
