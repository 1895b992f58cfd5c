"""Checkpoints of pipelines, each rank of which has some stages of the model.

A checkpoint does not know of stages: each tensor is saved under its name, whichever rank has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graphfsdp.base.sharded import pipeline_stages
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import name_model
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import ConfigError


class Stages(nn.ModuleList):
    """The stages of this rank under the names that their parts have in the whole model."""

    def __init__(self, stages: Sequence[Any]) -> None:
        """Hold them; ``stages`` are torch's."""
        super().__init__(stage.submod for stage in stages)
        self.indices = tuple(int(stage.stage_index) for stage in stages)

    def state_dict(  # type: ignore[override]  # a dictionary of the caller's cannot be filled
        self, *, keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the states of all stages in one.

        Raises:
            ConfigError: two stages use the same name.
        """
        found: dict[str, Any] = {}
        for module in self:
            state = module.state_dict(keep_vars=keep_vars)
            for name in state.keys() & found.keys():
                raise _refuse_name(name)
            found |= state
        return found

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of some stage."""
        for module in self:
            try:
                return module.get_submodule(target)
            except AttributeError:
                continue
        return super().get_submodule(target)


def as_module(model: Any) -> Any:
    """Return the stages of a schedule, anything else as it is."""
    stages = pipeline_stages(model)
    return Stages(stages) if stages else model


def names_elsewhere(model: nn.Module, members: Members) -> set[str]:
    """Return the names that only other ranks have; none without a pipeline. A collective then.

    ConfigError: two stages use the same name.
    """
    if not isinstance(model, Stages):
        return set()
    named = members.together(lambda: name_model(model))
    mine = {*named.tensors, *named.aliases, *named.extra}
    holders: dict[str, tuple[int, ...]] = {}
    for indices, names in members.gather((model.indices, sorted(mine))):
        for name in names:
            if holders.setdefault(name, indices) != indices:
                raise _refuse_name(name)
    return holders.keys() - mine


def joined_facts(model: nn.Module, mine: dict[str, Json], members: Members) -> dict[str, Json]:
    """Return the facts of model and optimizer of all ranks together; a collective for stages."""
    if not isinstance(model, Stages):
        return mine
    everyone = members.gather(mine)
    return members.together(lambda: _join(everyone))


def _join(everyone: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    joined: dict[str, Json] = dict(everyone[0])
    for key in ("aliases", "extra"):
        joined[key] = {name: value for facts in everyone for name, value in facts[key].items()}
    if "optimizer" not in joined:
        return joined
    optimizers: list[Any] = [facts["optimizer"] for facts in everyone]
    if len({len(each["groups"]) for each in optimizers}) > 1:
        raise ConfigError(
            "the optimizers of a pipeline have other numbers of parameter groups on each rank. "
            "Remedy: the same groups on all ranks, also where one has no parameter"
        )
    groups = []
    for rows in zip(*(each["groups"] for each in optimizers), strict=True):
        params = dict.fromkeys(name for row in rows for name in row["params"])
        groups.append({**rows[0], "params": list(params)})
    state = {name: value for each in optimizers for name, value in each["state"].items()}
    joined["optimizer"] = {**optimizers[0], "groups": groups, "state": state}
    return joined


def _refuse_name(name: str) -> ConfigError:
    return ConfigError(
        f"two stages of the pipeline call a part {name!r}, which can be saved only once. Remedy: "
        "stages whose parts have the names that they have in the whole model: build it and "
        "delete the layers of other stages from a ModuleDict, or give stages modules that keep "
        "the names"
    )
