"""Every fault of tests/mutants.yaml still applies; `make release` runs the tests that must fail for it."""

import collections
import shlex

from mutants import ROOT, read_mutants, sample


def test_every_mutant_applies():
    mutants = read_mutants()
    rooms = collections.Counter("/".join(mutant.file.split("/")[:2]) for mutant in mutants)
    for room in ("commands", "environments", "networks", "programs", "replay", "runs", "workers"):
        assert rooms[f"framework/{room}"] >= 10, room
    assert not [name for name, n in collections.Counter(m.name for m in mutants).items() if n > 1]
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        changed = mutant.apply(text)
        assert changed != text, mutant.name
        compile(changed, mutant.file, "exec")
        files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files), mutant.name


def test_a_seed_says_which_mutants_are_tested():
    mutants = read_mutants()
    first, again, other = (sample(mutants, 20, seed) for seed in ("a", "a", "b"))
    assert first == again != other and len({*first}) == 20
