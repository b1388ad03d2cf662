"""Datasets: replay items as batches on the learner's device.

```python
dataset = Dataset(client, "replay", batch_size=256, device="cuda")
for sample in dataset:                       # ReplaySample of torch tensors, [N, ...] or [N, T, ...]
    result = learner.step(sample)
    dataset.update_priorities(sample.info.key, result.priorities)
```

The dataset gathers rows directly into its batches, in pinned memory if the device is a GPU. It prefetches in
a thread where the program has threads.

`read_episodes`, `write_episodes` and `record` are for episodes in files; see `framework.datasets.files`.
"""

from framework.datasets.dataset import Dataset as Dataset
from framework.datasets.demonstrations import DEMONSTRATIONS_TABLE as DEMONSTRATIONS_TABLE
from framework.datasets.episodes import EpisodeDataset as EpisodeDataset
from framework.datasets.files import read_episodes as read_episodes
from framework.datasets.files import write_episodes as write_episodes
from framework.datasets.mixture import Mixture as Mixture
from framework.datasets.mixture import table_numbers as table_numbers
from framework.datasets.recording import record as record
from framework.datasets.tf_data import as_tf as as_tf
from framework.replay import ReplaySample as ReplaySample
from framework.replay import SampleInfo as SampleInfo
