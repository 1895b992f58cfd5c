"""Saving a training run as it goes, and going on with one exactly where it was saved."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphfsdp.checkpoint import AsyncSaver, load, save
from graphfsdp.checkpoint.folder import entries
from graphfsdp.errors import ConfigError
from graphfsdp.training.build import TrainingRun
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.ranks import Ranks
from graphfsdp.training.run_directory import in_the_words_of


@dataclass(frozen=True)
class Position:
    iteration: int = 0  # iterations done
    tokens: int = 0  # trained on, all ranks together


class RunState:
    """What a checkpoint keeps of a run beside model, optimizer and generators.

    The position in the data is a number of sequences, and the same on every rank.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._facts: dict[str, Any] = {
            **run.config.numbers(),
            "global_batch_size": run.batch.num_sequences,
            "corpus": [len(run.corpus.train), run.corpus.unigram_entropy],
        }
        self._feed = run.feed
        self.position = Position()
        self.differences: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "facts": self._facts,
            "data": self._feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and note which settings are others now."""
        self.position = Position(**state["position"])
        saved = state["facts"]
        for name in sorted(saved.keys() & self._facts.keys()):
            if saved[name] != self._facts[name]:
                what = "the data" if name == "corpus" else f"--{name.replace('_', '-')}"
                self.differences.append(f"{what} was {saved[name]}, is {self._facts[name]}")
        self._feed.load_state_dict(state["data"])


class RunCheckpoints:
    """The checkpoints of a training run, as its flags ask for them."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._state = RunState(run)
        self._weight_decays = [group["weight_decay"] for group in run.optimizer.param_groups]
        asynchronous = run.config.save is not None and run.config.async_save
        self._saver = AsyncSaver() if asynchronous else None

    def resume(self) -> tuple[Position, list[str]]:
        """Load what ``--load`` names, if anything; return where the run is, and lines to print."""
        config, run = self._run.config, self._run
        if config.load is None:
            return Position(), []
        if config.load == config.save and not entries(Path(config.load)):
            return Position(), [f"{config.load} has no checkpoint yet: the run starts from nothing"]
        loaded = load(config.load, run.model, run.optimizer, objects=self._objects())
        position = self._state.position
        if position.iteration >= config.train_iters:
            raise ConfigError(
                f"{loaded.path} has {position.iteration} iterations already; give more "
                f"--train-iters than {config.train_iters} to go on"
            )
        self._apply_flags()
        lines = [f"resumed from {loaded.path} after {position.iteration} iterations"]
        if self._state.differences:
            lines.append(
                "other settings than saved, so no exact continuation: "
                + "; ".join(self._state.differences)
            )
        return position, lines

    def _apply_flags(self) -> None:
        """Set the hyper-parameters that this run's flags ask for; the same where these are."""
        config, groups = self._run.config, self._run.optimizer.param_groups
        for group, decay in zip(groups, self._weight_decays, strict=True):
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_eps
            group["weight_decay"] = decay

    def save_if_due(self, position: Position, *, is_last: bool) -> None:
        run, config, done = self._run, self._run.config, position.iteration
        due = config.save_interval > 0 and done % config.save_interval == 0
        if config.save is None or not (due or is_last):
            return
        self._state.position = position
        write = save if self._saver is None else self._saver.save
        write(
            config.save,
            run.model,
            run.optimizer,
            objects=self._objects(),
            step=done,
            keep_last=config.keep_last,
        )

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _objects(self) -> dict[str, Any]:
        return {"run": self._state}


def refuse_unusable_folder(config: TrainConfig, ranks: Ranks) -> None:
    """Make the folder for checkpoints now, rather than after the first interval."""
    if config.save is not None and ranks.is_first:
        with in_the_words_of("--save", config.save):
            Path(config.save).mkdir(parents=True, exist_ok=True)
