"""Saving a training run as it goes, and going on with one exactly where it was saved."""

from collections.abc import Mapping
from typing import Any

from graphfsdp.checkpoint import AsyncSaver, load, save
from graphfsdp.command_line import flag_name
from graphfsdp.errors import ConfigError
from graphfsdp.training.build import TrainingRun, corpus_facts
from graphfsdp.training.run_directory import begins_anew


class RunCheckpoints:
    """The checkpoints of a training run, as its flags ask for them.

    Beside model, optimizer and generators they keep this object's state. The position in the data
    is a number of sequences, and the same on every rank.
    """

    iteration = 0  # done so far
    tokens = 0  # trained on, all ranks together

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._facts: dict[str, Any] = {
            **run.config.numbers(),
            "global_batch_size": run.batch.num_sequences,
            "corpus": [*corpus_facts(run.corpus).values()],
        }
        self._differences: list[str] = []
        self._weight_decays = [group["weight_decay"] for group in run.optimizer.param_groups]
        asynchronous = run.config.save is not None and run.config.async_save
        self._saver = AsyncSaver() if asynchronous else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": {"iteration": self.iteration, "tokens": self.tokens},
            "facts": self._facts,
            "data": self._run.feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and note which settings are others now."""
        self.iteration, self.tokens = (state["position"][name] for name in ("iteration", "tokens"))
        saved = state["facts"]
        for name in sorted(saved.keys() & self._facts.keys()):
            if saved[name] != self._facts[name]:
                what = "the data" if name == "corpus" else flag_name(name)
                self._differences.append(f"{what} was {saved[name]}, is {self._facts[name]}")
        self._run.feed.load_state_dict(state["data"])

    def resume(self) -> list[str]:
        """Load what ``--load`` names, if anything; return lines to print."""
        config, run = self._run.config, self._run
        if config.load is None:
            return []
        if begins_anew(config):
            return [f"{config.load} has no checkpoint yet: the run starts from nothing"]
        loaded = load(config.load, run.model, run.optimizer, objects={"run": self})
        if self.iteration >= config.train_iters:
            raise ConfigError(
                f"{loaded.path} has {self.iteration} iterations already; give more "
                f"--train-iters than {config.train_iters} to go on"
            )
        # The hyper-parameters that this run's flags ask for; the same where these are.
        for group, decay in zip(run.optimizer.param_groups, self._weight_decays, strict=True):
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_eps
            group["weight_decay"] = decay
        lines = [f"resumed from {loaded.path} after {self.iteration} iterations"]
        if self._differences:
            lines.append(
                "other settings than saved, so no exact continuation: "
                + "; ".join(self._differences)
            )
        return lines

    def save_if_due(self, *, is_last: bool) -> None:
        run, config, done = self._run, self._run.config, self.iteration
        due = config.save_interval > 0 and done % config.save_interval == 0
        if config.save is None or not (due or is_last):
            return
        write = save if self._saver is None else self._saver.save
        write(
            config.save,
            run.model,
            run.optimizer,
            objects={"run": self},
            step=done,
            keep_last=config.keep_last,
        )

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
