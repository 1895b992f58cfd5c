"""`graphfsdp.load`: a checkpoint into what exists, in place, on any ranks.

Note [Main weights]: a float32 main weight is saved as the model's weight where the model keeps it
(sharding), or beside a narrower one in the optimizer's state (``master_param``). Each form loads
into the other one, bit for bit. Transformer Engine may have there the 16 bits that a bfloat16
weight lacks; those load beside such a weight alone.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.stateful import Stateful

from graphfsdp.base.dtensors import local_part, wrap_like
from graphfsdp.base.protocols import units_of
from graphfsdp.checkpoint.folder import Json, check_files, read_manifest, resolve
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    STEP,
    NamedModel,
    checked_objects,
    decode,
    name_model,
    params_by_name,
    part_of,
    set_random_state,
    state_part,
)
from graphfsdp.errors import CheckpointMismatchError, ConfigError
from graphfsdp.optim.adapters.baked import make_skip_counter
from graphfsdp.optim.fused.adam import FusedAdam
from graphfsdp.sharding.materialize import memory_for_values

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule

_MAIN = "master_param"
# Say how a step is run, not what it computes.
_RUN_SETTINGS = frozenset({"foreach", "capturable", "differentiable", "fused"})


@dataclass(frozen=True)
class Loaded:
    """What a load has done.

    Attributes:
        step: Number that the checkpoint was saved with.
        path: Its folder.
    """

    step: int
    path: Path


def load(
    path: str | os.PathLike[str],
    model: "nn.Module | PipelineSchedule",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a training state; every rank calls it, between two iterations.

    Values are copied into the tensors that exist, so a captured step goes on with them. The
    number of ranks, the sharding strategy and the precisions need not be those of the save. First
    every checksum is checked and everything compared; nothing is written if something is wrong.

    A model on the meta device gets memory for the values first. What no state dict of it has (some
    buffers) is initialised as by ``materialize``.

    Args:
        path: A folder of checkpoints, or one checkpoint in it.
        model: Whose parameters and buffers are filled; or a schedule of torch's pipelines, each
            rank of which loads what its stages have.
        optimizer: Its state and hyper-parameters too; None leaves the saved ones unread.
        objects: As for ``save``; saved ones that are not given are left unread.
        step: Which checkpoint of the folder; None is the latest.
        rng: Also set the generators, if they were saved.
        process_group: Ranks that load together; None is all.

    Returns:
        The step and the folder.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        CheckpointDamagedError: something in it is not what was saved.
        CheckpointMismatchError: it does not fit; the whole difference is listed.
        ConfigError: an argument cannot be used.
    """
    members = Members.find(process_group)
    things, named = members.together(lambda: (checked_objects(objects), name_model(model)))
    folder = members.first(lambda: resolve(Path(path), step))
    facts = members.together(lambda: read_manifest(folder))
    check_files(folder, facts["files"], members)
    loading = members.together(lambda: _Loading(folder, facts, named))

    def plan() -> None:
        if optimizer is not None:
            loading.plan_optimizer(optimizer)
        loading.plan_model()
        loading.plan_ranks(things, members, rng=rng)

    with memory_for_values(named.module), torch.no_grad():
        members.together(plan)
        told = members.gather((loading.problems, loading.unused))
        problems = list(dict.fromkeys(line for lines, _ in told for line in lines))
        # What a checkpoint has of other stages of a pipeline is loaded there.
        problems += sorted(set.intersection(*(set(unused) for _, unused in told)))
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointMismatchError(
                f"the checkpoint {folder} does not fit; nothing was loaded:\n{listed}\n"
                "Remedy: the model and optimizer that were saved; a part of a checkpoint is read "
                "by torch's functions (docs/checkpoints.md)"
            )
        members.together(loading.read)
    for unit in units_of(named.module):
        unit.reshard()  # whole weights that were gathered before are not the loaded ones
    return Loaded(int(facts["step"]), folder)


class _Loading:
    """What is read into which tensor, worked out before anything is written; what does not fit."""

    def __init__(self, folder: Path, facts: Mapping[str, Json], model: NamedModel) -> None:
        self.problems: list[str] = []
        self.unused: list[str] = []  # problems, unless another rank has use for it
        self._facts, self._model = facts, model
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        found: Mapping[str, Any] = self._metadata.state_dict_metadata
        self._dtypes = {key: tensor.properties.dtype for key, tensor in found.items()}
        self._shapes = {key: tuple(tensor.size) for key, tensor in found.items()}
        self._parts: dict[str, Tensor] = {}  # this rank's, by key
        self._afterwards: list[Callable[[], object]] = []  # in this order

    def read(self) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(self._parts), self._metadata)
        with torch.device("cpu"):  # where slices of files come to
            self._reader.read_data(planner.create_local_plan(), planner)
        for action in self._afterwards:
            action()

    def _read_into(self, key: str, part: Tensor) -> None:
        """Fill this rank's part of a tensor; a second one is filled from the first."""
        first = self._parts.setdefault(key, part)
        if first is not part:
            self._afterwards.append(lambda: local_part(part).copy_(local_part(first)))

    def _read_whole(self, key: str) -> Tensor:
        found = torch.empty(self._shapes[key], dtype=self._dtypes[key], device="cpu")
        self._read_into(key, found)
        return found

    def _read_like(self, key: str, param: Tensor, existing: object = None) -> Tensor:
        """Read into what exists where it has the dtype and the rows, else into a new tensor."""
        dtype = self._dtypes[key]
        if isinstance(existing, Tensor) and existing.dtype == dtype:
            part = state_part(param, existing)
            if part is not None:
                self._read_into(key, part)
                return existing
        new = _new_like(param, dtype)
        self._read_into(key, new)
        return new

    def plan_model(self) -> None:
        """Plan it behind the optimizer, whose wider weights a model's may be made of."""
        for name, tensor in self._model.tensors.items():
            key, main = f"{MODEL}{name}", f"{OPTIMIZER}{name}.{_MAIN}"
            if key not in self._shapes:
                self.problems.append(f"model: {name!r} is missing in the checkpoint")
                continue
            shape, dtype = self._shapes[key], self._dtypes[key]
            if shape != tuple(tensor.shape):
                self.problems.append(
                    f"model: {name!r}: saved {list(shape)}, here {list(tensor.shape)}"
                )
            # From the main weight, where that has more digits to give.
            elif main not in self._shapes or dtype.itemsize >= tensor.dtype.itemsize:
                self._read_into(key, part_of(tensor))
            elif self._dtypes[main] == torch.float32:
                self._read_into(main, part_of(tensor))
            else:
                self.problems.append(
                    f"model: {name!r}: saved in {dtype} and the bits that it lacks, here "
                    f"{tensor.dtype}"
                )
        extra = self._facts["extra"]
        for name, (module, _) in self._model.extra.items():
            if name in extra:
                state = decode(extra[name], self._read_whole)
                self._afterwards.append(partial(module.set_extra_state, state))
            else:
                self.problems.append(f"model: {name!r} is missing in the checkpoint")
        saved = {key.removeprefix(MODEL) for key in self._shapes if key.startswith(MODEL)}
        here = self._model.tensors.keys() | self._model.extra.keys()
        self.unused += [
            f"model: {name!r} is in the checkpoint, but not in the model"
            for name in (saved | extra.keys()) - here
        ]

    def plan_ranks(self, things: Mapping[str, Stateful], members: Members, *, rng: bool) -> None:
        """Plan what each rank has apart: objects, buffers, generators."""
        ranks: list[dict[str, Json]] = self._facts["ranks"]
        is_new, as_many = members.rank >= len(ranks), members.size == len(ranks)
        saved = ranks[0 if is_new else members.rank]
        loads: dict[str, Callable[[Any], object]] = {
            f"objects/{name}": thing.load_state_dict for name, thing in things.items()
        }
        for name in things:
            key = f"objects/{name}"
            if key not in saved:
                self.problems.append(f"objects: {name!r} is missing in the checkpoint")
            elif not as_many and any(each[key] != saved[key] for each in ranks):
                self.problems.append(
                    f"objects: {name!r} was saved with a state of its own on each of "
                    f"{len(ranks)} ranks; here are {members.size}"
                )
        if as_many:
            loads["buffers"] = self._set_buffers
        if rng:
            loads["random"] = partial(set_random_state, new_rank=members.rank if is_new else None)
        for key, take_over in loads.items():
            if key in saved:
                state = decode(saved[key], self._read_whole)
                self._afterwards.append(partial(take_over, state))

    def _set_buffers(self, state: Mapping[str, Tensor]) -> None:
        buffers = self._model.buffers()
        for name in buffers.keys() & state.keys():
            buffers[name].copy_(state[name])

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        saved, kind = self._facts.get("optimizer"), type(optimizer).__name__
        if saved is None:
            self.problems.append("optimizer: the checkpoint was saved without one")
            return
        if kind != saved["kind"]:
            self.problems.append(f"optimizer: saved from {saved['kind']}, here a {kind}")
            return
        current = optimizer.state_dict()
        hypers: list[list[Json]] = [[] for _ in optimizer.param_groups]
        state: dict[Any, Any] = {}
        as_saved: dict[Any, dict[str, Any]] = {}
        has_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        names: set[str] = set()
        for row, name, param, index in params_by_name(self._model, optimizer, current):
            names.add(name)
            if name not in saved["hyper"]:
                self.problems.append(f"optimizer: {name!r} was not trained by the saved optimizer")
                continue
            hypers[row].append(saved["hyper"][name])
            here = current["state"].get(index, {})
            read = self._read_state(saved["state"][name], name, param, here, optimizer)
            if read:
                state[index] = read
            if has_torchs and self._dtypes.get(f"{MODEL}{name}") == param.dtype:
                as_saved[param] = read
        self.unused += [
            f"optimizer: the checkpoint has a state of {name!r}, which this one does not train"
            for name, its_state in saved["state"].items()
            if its_state and name not in names
        ]
        groups = []
        for row, (group, found) in enumerate(zip(current["param_groups"], hypers, strict=True)):
            if any(each != found[0] for each in found):
                self.problems.append(
                    f"optimizer: parameters of group {row} were saved with hyper-parameters that "
                    "are not the same"
                )
            numbers = decode(found[0], self._read_whole) if found else {}
            numbers = {key: value for key, value in numbers.items() if key not in _RUN_SETTINGS}
            groups.append({**group, **numbers})
        rest = decode(saved["rest"], self._read_whole)
        more = {key: value for key, value in rest.items() if key in current}
        state_dict = {**current, "state": state, "param_groups": groups, **more}
        if isinstance(optimizer, FusedAdam):
            try:
                optimizer.match(state_dict)
            except ConfigError as error:
                self.problems.append(f"optimizer: {error}")
        self._afterwards.append(lambda: _load_in_place(optimizer, state_dict, as_saved))
        if "control" in rest and "control" not in current:
            skipped = rest["control"]["skipped_steps"]
            self._afterwards.append(lambda: make_skip_counter(optimizer).copy_(skipped))

    def _read_state(
        self,
        saved: Mapping[str, Json],
        name: str,
        param: Tensor,
        here: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Return a parameter's state, its tensors yet to be filled; empty if none was saved.

        ``here`` is what the optimizer has of it, by key.
        """
        wanted: Mapping[str, Any] = here
        if isinstance(optimizer, FusedAdam):
            wanted = optimizer.settings.state_dtypes(param)

        def find(where: str) -> Tensor:
            key = where.removeprefix(f"{OPTIMIZER}{name}.")
            if key != STEP and self._shapes[where] == tuple(param.shape):
                return self._read_like(where, param, here.get(key))
            return self._read_whole(where)

        found: dict[str, Any] = {
            key: decode(value, find)
            for key, value in saved.items()
            if key != _MAIN or key in wanted
        }
        weight = self._dtypes.get(f"{MODEL}{name}", param.dtype)
        if weight.itemsize <= param.dtype.itemsize or _MAIN not in wanted or _MAIN in saved:
            return found
        found[_MAIN] = self._read_like(f"{MODEL}{name}", param)
        if not saved and isinstance(optimizer, FusedAdam):
            # Never stepped: only a state of zeros can hold a main weight that was saved wider.
            found[STEP] = torch.zeros((), device="cpu")
            found |= {
                key: _new_like(param, torch.float32).zero_() for key in wanted if key != _MAIN
            }
        return found


def _new_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return wrap_like(torch.empty_like(local_part(param.detach()), dtype=dtype), param)


def _load_in_place(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    as_saved: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Load a state into the tensors that exist, so that a captured step goes on with it.

    torch's optimizers put new tensors into their state and their groups. Where one existed with
    the same shape, dtype and device, its values are replaced instead; numbers of groups come from
    a file, on the CPU, and torch leaves them there. It also casts states to the dtype of their
    parameter, which would round wider ones: of the parameters in ``as_saved`` they keep their own.
    """

    def places() -> dict[Any, dict[str, Any]]:  # what each parameter and each group has
        states = {param: own for param, own in optimizer.state.items() if isinstance(own, dict)}
        return {**states, **dict(enumerate(optimizer.param_groups))}

    before = {place: dict(entries) for place, entries in places().items()}
    optimizer.load_state_dict(state_dict)
    for place, entries in places().items():
        for key, new in dict(entries).items():
            exact, old = as_saved.get(place, {}).get(key), before.get(place, {}).get(key)
            if isinstance(exact, Tensor) and exact.dtype != new.dtype:
                entries[key] = new = exact.to(new.device)
            if not isinstance(old, Tensor) or new is None or new is old:
                continue
            if not isinstance(new, Tensor):
                new = torch.as_tensor(new, dtype=old.dtype, device=old.device)
            kinds = [(t.shape, t.dtype, local_part(t).shape) for t in (new, old)]
            if kinds[0] == kinds[1] and new.device in (old.device, torch.device("cpu")):
                local_part(old).copy_(local_part(new))
                entries[key] = old
