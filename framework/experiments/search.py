"""Searches of settings with Optuna: its trials become the trials of a queue, on every engine and executor.

A study for each agent in each environment, in a file of the sweep's folder: a sweep that is started again
goes on with its trials. Optuna's median pruner ends runs whose evaluations are not promising.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from framework.experiments.queue import Trial
from framework.experiments.sweep import SweepFolder, Variant
from framework.runs.run_folder import RunFolder
from framework.runs.run_lock import RunError
from launch import extras

_FINER = 1_000_000  # The places of the next seed's evaluations begin there.


class Search:
    """The studies of a sweep. Raises RunError if Optuna is not installed."""

    def __init__(self, folder: SweepFolder):
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            advice = extras.install("optuna")
            raise RunError(f"optuna: it requires a package that is not installed: {advice}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._folder, self._sweep = optuna, folder, folder.sweep
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder.path / "optuna.log")))
        self.studies = {}
        options: dict[str, Any] = {"storage": storage, "direction": "maximize", "load_if_exists": True}
        for key in itertools.product(self._sweep.agents, self._sweep.environments):
            self.studies[key] = study = optuna.create_study(study_name=" in ".join(key), **options)
            # A sampler that begins again with its seed would repeat its first trials.
            study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))

    def trials(self) -> Iterator[Trial]:
        """The trials that a sweep before has begun, and then new ones."""
        for key, study in self.studies.items():
            for frozen in study.trials:
                if not frozen.state.is_finished():
                    yield self._trial(key, self._optuna.trial.Trial(study, frozen._trial_id))
            while len(study.trials) < (self._sweep.optuna or 0):
                yield self._trial(key, study.ask())

    def variants(self) -> list[Variant]:
        """The runs of all trials so far."""
        return [
            variant
            for key, study in self.studies.items()
            for frozen in study.trials
            for variant in self._variants(key, frozen)
        ]

    def best(self) -> Iterator[str]:
        """For each agent in each environment a line with the best trial that has ended, if one has."""
        finished = (self._optuna.trial.TrialState.COMPLETE,)
        for (agent, environment), study in self.studies.items():
            if study.get_trials(deepcopy=False, states=finished):
                best = study.best_trial
                settings = ", ".join(f"{name}={value}" for name, value in best.params.items())
                yield f"Best of {agent} in {environment}: trial {best.number}, {settings}: {best.value:g}"

    def _trial(self, key: tuple[str, str], trial: Any) -> OptunaTrial:
        for name, given in self._sweep.search.items():
            low, high, log = given["low"], given["high"], given.get("log", False)
            suggest = (
                trial.suggest_int if isinstance(low, int) and isinstance(high, int) else trial.suggest_float
            )
            suggest(name, low, high, log=log)
        for name, values in self._sweep.set.items():
            if len(values) > 1:
                trial.suggest_categorical(name, list(map(str, values)))
        variants = self._variants(key, trial)
        self._folder.add(variants)
        return OptunaTrial(variants, trial, self.studies[key], self._folder)

    def _variants(self, key: tuple[str, str], trial: Any) -> list[Variant]:
        """The runs of a trial, of whatever state."""
        settings = dict(trial.params)
        for name, values in self._sweep.set.items():
            settings[name] = next(each for each in values if len(values) == 1 or str(each) == settings[name])
        return self._sweep.variants(*key, settings, trial=f"trial{trial.number}")


@dataclass
class OptunaTrial(Trial):
    """A trial: its parameters with each seed. Its value is the mean of the objective."""

    trial: Any
    study: Any
    folder: SweepFolder

    def __post_init__(self) -> None:
        self._reported = set(self.study.trials[self.trial.number].intermediate_values)

    def prunes(self, variant: Variant, row: dict[str, Any], cpu_seconds: float | None) -> bool:
        name, seconds = variant.name, None
        if self.folder.sweep.objective != "return":
            if cpu_seconds is None:
                return False
            seconds = cpu_seconds + self.folder.cpu_seconds(name)
        # Evaluations come at other steps in each run, but on `serial`: their periods are compared.
        period: Any = RunFolder.open(self.folder.run(name)).config.evaluate_period
        place = row.get("env_steps", row.get("learner_steps", 0)) // period
        place += _FINER * self.variants.index(variant)
        if place in self._reported:  # A run that goes on repeats rows.
            return False
        self._reported.add(place)
        self.trial.report(score(row["episode_return"], seconds), place)
        return bool(self.trial.should_prune())

    def end(self, states: Sequence[str]) -> None:
        """Tells the study. A trial that was stopped or has failed stays open, so that it can go on."""
        if states[-1] == "pruned":
            import optuna

            self.study.tell(self.trial, state=optuna.trial.TrialState.PRUNED)
        elif states[-1] == "finished":
            self.study.tell(self.trial, statistics.fmean(self._value(each.name) for each in self.variants))

    def _value(self, name: str) -> float:
        reached = (self.folder.outcome(name) or {}).get("episode_return")
        if reached is None:
            raise RunError(
                f"{self.folder.run(name)} has no evaluation. Set evaluate_period, or final_episodes."
            )
        seconds = None if self.folder.sweep.objective == "return" else self.folder.cpu_seconds(name)
        return score(reached, seconds)


def score(episode_return: float, cpu_seconds: float | None) -> float:
    """The return, or the return per CPU second; a negative one times them, so that fewer are better, too."""
    if cpu_seconds is None:
        return episode_return
    return episode_return / cpu_seconds if episode_return > 0 else episode_return * cpu_seconds
