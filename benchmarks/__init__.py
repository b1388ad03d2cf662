"""Speed, in folders by subject. The commands for everybody lie at the top, and run by their path:

- `throughput.py`: whole programs beside peers
- `pair.py`: whole programs here and at another commit
- `hot_path.py`: the functions that a step passes
- `gpu.py`: everything that needs a GPU
- `count_lines.py`: code lines of folders

The others run as modules from the root of the repository: `python -m benchmarks.replay.compare`.
"""
