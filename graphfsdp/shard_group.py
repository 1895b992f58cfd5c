"""The parameters that one `fully_shard` call took over: sharded at rest, whole while computing."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.flat_buffer import contiguous_stride
from graphfsdp.layout import Slot
from graphfsdp.meta_tensors import become
from graphfsdp.shard_buffer import ShardBuffer
from graphfsdp.unit_mesh import UnitMesh
from graphfsdp.unit_plan import BufferPlan, ParameterKind, plan_buffers


@dataclass(eq=False)
class ManagedParameter:
    """One parameter of a unit.

    Attributes:
        name: Full name within the unit's module.
        param: What the optimizer and the user see: a DTensor over this rank's main weights.
        whole: What the module held before, if somebody still does.
        owners: The modules and attribute names that hold it (several where it is tied).
        buffer: The flat buffer that it lies in.
        slot: Where it lies there.
        main_grad: DTensor over this rank's main grads, maybe of no row; None if frozen.
        awaited: The whole parameter on the meta device whose values are still to come; None once
            there are values.
    """

    name: str
    param: nn.Parameter
    whole: "weakref.ref[nn.Parameter]"
    owners: list[tuple[nn.Module, str]]
    buffer: ShardBuffer
    slot: Slot
    main_grad: DTensor | None = None
    awaited: nn.Parameter | None = None


@dataclass(frozen=True)
class UnitOptions:
    """How a unit is sharded; see ``fully_shard``."""

    mesh: UnitMesh
    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    reduction: str = "mean"


class ShardGroup:
    """The buffers and parameters of one unit.

    Attributes:
        name: Full name of the unit's module, set when the root is known; "" until then.
        managed: Its parameters.
        buffers: Its flat buffers.
    """

    name: str
    managed: list[ManagedParameter]
    buffers: list[ShardBuffer]

    def __init__(self, module: nn.Module, options: UnitOptions) -> None:
        """Take over the parameters of a module that no unit below it has taken.

        Raises:
            ConfigError: a parameter cannot be sharded.
        """
        self.name = ""
        self.options = options
        self.managed = []
        self.buffers = []
        found = _free_parameters(module)
        kinds = {
            name: ParameterKind(tuple(p.shape), p.dtype, p.requires_grad, str(p.device))
            for name, (p, _) in found.items()
        }
        plans = plan_buffers(
            kinds,
            policy=options.policy,
            strategy=options.strategy,
            num_ranks=options.mesh.num_parts,
        )
        for plan in plans:
            self._take(found, plan)

    def _take(self, found: "dict[str, _Found]", plan: BufferPlan) -> None:
        options = self.options
        whole, _ = found[plan.names[0]]
        buffer = ShardBuffer(
            plan.layout,
            dtypes=plan.dtypes,
            device=whole.device,
            mesh=options.mesh,
            strategy=plan.strategy,
            trainable=plan.trainable,
        )
        self.buffers.append(buffer)
        with torch.no_grad():
            buffer.load([found[name][0].detach() for name in plan.names])
        for name, slot in zip(plan.names, plan.layout.slots, strict=True):
            whole, owners = found[name]
            param = _make_dtensor(whole, buffer, slot, options)
            setattr(whole, _TAKEN_AS, name)
            for owner, attribute in owners:
                owner._parameters[attribute] = param
            item = ManagedParameter(name, param, weakref.ref(whole), owners, buffer, slot)
            item.awaited = whole if whole.is_meta else None
            self.managed.append(item)

    def bind_views(self) -> None:
        """Point every parameter at where the main weights lie now, and make its gradient view."""
        for item in self.managed:
            local = item.buffer.local_view(item.buffer.main, item.slot)
            dtensor: Any = item.param
            if dtensor.device == local.device:
                dtensor._local_tensor = local
            else:  # it was on the meta device
                new = _as_dtensor(local, item.slot, item.buffer, self.options)
                become(dtensor, nn.Parameter(new, dtensor.requires_grad), self.full_name(item))
            item.main_grad = None
            if item.buffer.grad is not None:
                # Also where no row is here: what works on lists of DTensors (clip_grad_norm_)
                # must find the same list on every rank.
                view = item.buffer.local_view(item.buffer.grad, item.slot)
                item.main_grad = _as_dtensor(view, item.slot, item.buffer, self.options)

    def check_memory(self) -> None:
        """Refuse parameters that were moved out of the unit's buffers.

        Raises:
            ConfigError: a parameter's shard lies elsewhere; training would go on with the old one.
        """
        for item in self.managed:
            if item.awaited is not None:
                raise ConfigError(
                    f"parameter {self.full_name(item)!r} was made on the meta device and has no "
                    "values yet. Remedy: graphfsdp.materialize(model), or graphfsdp.load(path, "
                    "model), before the first forward pass"
                )
            local: Tensor = item.param._local_tensor  # type: ignore[attr-defined]
            if local.untyped_storage()._cdata != item.buffer.main.untyped_storage()._cdata:
                raise ConfigError(
                    f"parameter {self.full_name(item)!r} does not lie in the "
                    "buffers of its unit any more (module.to(), param.data = ..., or "
                    "load_state_dict(assign=True) after fully_shard). Remedy: move and cast the "
                    "model before fully_shard, and load with assign=False"
                )

    @property
    def awaits_values(self) -> bool:
        """Whether some parameter was made on the meta device and has no values yet."""
        return any(item.awaited is not None for item in self.managed)

    def full_name(self, item: ManagedParameter) -> str:
        """Return the name of a parameter from the root on, as far as the root is known."""
        return f"{self.name}.{item.name}".lstrip(".")

    def full_views(self) -> Iterator[tuple[ManagedParameter, Tensor]]:
        """Yield every parameter with its whole, gathered weight; gathers what is not here."""
        for buffer in self.buffers:
            buffer.unshard()
        for item in self.managed:
            assert item.buffer.full is not None
            yield item, item.buffer.full_view(item.buffer.full, item.slot)

    def reshard(self, *, outside: bool = False) -> None:
        """Drop the gathered weights of every buffer; see ``ShardBuffer.reshard``."""
        for buffer in self.buffers:
            buffer.reshard(outside=outside)

    def describe(self) -> list[str]:
        """Return one line per parameter with all that must be equal on every rank."""
        options = self.options
        kind = f"{options.strategy.value}, reshard_after_forward={options.reshard_after_forward}"
        if options.mesh.outer is not None:
            kind += f", {options.mesh.num_outer} outer ranks"
            kind += " with a part of the optimizer each" if options.mesh.cuts_outside else ""
        lines = [f"unit {self.name!r} ({kind})"]
        for item in self.managed:
            dtypes = item.buffer.dtypes
            lines.append(
                self.full_name(item)
                + f" of shape {item.slot.shape} at {item.slot.offset}, main weight {dtypes.main}, "
                f"computed in {dtypes.compute}, main grad {dtypes.grad}, "
                f"{'trainable' if item.buffer.trainable else 'frozen'}"
                f"{'' if item.awaited is None else ', without values'}"
            )
        return lines

    @property
    def trainable(self) -> list[ManagedParameter]:
        """The parameters that get gradients."""
        return [item for item in self.managed if item.buffer.trainable]


# On a whole parameter: its name in the unit that has taken it over.
_TAKEN_AS = "_graphfsdp_taken_as"
_Found = tuple[nn.Parameter, list[tuple[nn.Module, str]]]


def _free_parameters(module: nn.Module) -> dict[str, _Found]:
    """Return the parameters that are not sharded yet, each once, with all that hold them."""
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module_name, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is None or isinstance(param, DTensor):
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if hasattr(param, _TAKEN_AS):
                raise ConfigError(
                    f"parameter {full_name!r} is tied to {getattr(param, _TAKEN_AS)!r}, which "
                    "another unit has taken over. Remedy: let one unit hold both modules (wrap "
                    "neither of them, or a common parent)"
                )
            found.setdefault(id(param), (full_name, param, []))[2].append((owner, name))
    return {name: (param, owners) for name, param, owners in found.values()}


def _as_dtensor(local: Tensor, slot: Slot, buffer: ShardBuffer, options: UnitOptions) -> DTensor:
    return DTensor.from_local(
        local,
        options.mesh.mesh,
        options.mesh.placements(buffer.layout, slot, sharded=buffer.sharded),
        run_check=False,
        shape=torch.Size(slot.shape),
        stride=contiguous_stride(slot.shape),
    )


def _make_dtensor(
    param: nn.Parameter, buffer: ShardBuffer, slot: Slot, options: UnitOptions
) -> nn.Parameter:
    """Return the parameter that takes the place of a whole one, with all its attributes."""
    local = buffer.local_view(buffer.main, slot)
    sharded = nn.Parameter(
        _as_dtensor(local, slot, buffer, options), requires_grad=param.requires_grad
    )
    for name, value in vars(param).items():
        setattr(sharded, name, value)
    # Whoever still holds the whole parameter (an optimizer made before) must not keep its memory,
    # nor go on training a copy that nobody uses.
    param.grad = None
    if not param.is_meta:  # which has none, and is still asked for its shape
        param.data = param.data.new_empty(0)
    return sharded


__all__ = ["ManagedParameter", "ShardGroup", "UnitOptions"]
