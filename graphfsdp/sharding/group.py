"""The parameters that one `fully_shard` call took over: sharded at rest, whole while computing."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import _is_composable_with_fsdp
from torch.distributed.tensor import DTensor

from graphfsdp.base.dtensors import local_part, unwrapped
from graphfsdp.base.protocols import TAKEN_AS
from graphfsdp.base.torch_internals import key_of, local_tensor_of, parameters_of
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.buffer import ShardBuffer, version_of
from graphfsdp.sharding.extension import (
    Extension,
    forget_values,
    is_extended,
    parts_of,
    refuse_wrapper,
)
from graphfsdp.sharding.gradients import (
    Gradients,
    Reduced,
    call_when_bound,
    change,
    has_hooks,
    is_watched,
    refuse_gradient_hooks,
    watch_gradient,
)
from graphfsdp.sharding.layout import (
    BufferDtypes,
    BufferPlan,
    Slot,
    linear_weights,
    plan_buffers,
)
from graphfsdp.sharding.mesh import ModelAxes, UnitMesh, find_model_axes, find_place
from graphfsdp.sharding.meta_tensors import become
from graphfsdp.sharding.rows import make_dtensor

# On a parameter that a unit manages.
_IS_SHARDED = "_graphfsdp_is_sharded"


class NoValuesError(ConfigError, RuntimeError):
    """Parameters are on the meta device; torch's is a RuntimeError."""


class ReplacedError(ConfigError, RuntimeError):
    """A module holds something else than its sharded parameter."""


@dataclass(eq=False)
class ManagedParameter:
    """One parameter of a unit; ``owners`` are several modules where it is tied.

    ``name`` begins with a number where the unit has several modules. ``param`` is what the
    optimizer and the user see: a DTensor over this rank's main weights; ``main_grad`` is one over
    its main grads, maybe of no row. ``whole`` gives what the module held before, if somebody still
    does. ``axes``: how model parallelism has cut it; the buffer holds this rank's part of that.
    ``awaited``: the whole parameter on the meta device, until there are values.
    """

    name: str
    param: nn.Parameter
    whole: "weakref.ref[nn.Parameter]"
    owners: list[tuple[nn.Module, str]]
    buffer: ShardBuffer
    slot: Slot
    axes: ModelAxes | None = None
    main_grad: DTensor | None = None
    awaited: nn.Parameter | None = None

    def as_seen(self, tensor: Tensor) -> Tensor:
        return tensor if self.axes is None else self.axes.as_seen(tensor)

    def as_dtensor(self, local: Tensor) -> DTensor:
        """Return rows of the parameter here, or of its gradient, as what they are part of."""
        mesh, places = self.buffer.mesh.mesh, self.buffer.placements(self.slot)
        shape, axes = self.slot.shape, self.axes
        if axes is not None:
            mesh, places, shape = axes.joined, [*axes.placements, *places], axes.shape
        return make_dtensor(local, mesh, places, shape)

    @property
    def trains(self) -> bool:
        return self.param.requires_grad

    @property
    def initial_shape(self) -> tuple[int, ...]:
        """Shape of what its module's initialisation sets: whole over tensor-parallel ranks too."""
        axes = self.axes
        return axes.shape if axes is not None and axes.wraps else self.slot.shape

    def load(self, initial: Tensor) -> None:
        part = initial
        if self.axes is not None and self.axes.wraps:
            for dim, size in enumerate(self.slot.shape):
                part = part.narrow(dim, self.axes.offset(dim), size)
        self.buffer.load(self.slot, part)

    @property
    def grad_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks that hold other elements of the gradient, one for each mesh axis."""
        over_model = () if self.axes is None else self.axes.groups
        over_data = self.buffer.mesh.cut_groups if self.buffer.sharded else ()
        return (*over_model, *over_data)


@dataclass(frozen=True)
class UnitOptions:
    """How a unit is sharded; see ``fully_shard``."""

    mesh: UnitMesh
    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None  # a number of inner ranks keep weights after forward
    overlap: bool
    reduction: str = "mean"
    offload: CPUOffloadPolicy | None = None
    ignored: frozenset[nn.Parameter] = frozenset()
    place: Callable[[nn.Parameter], Any] | None = None


class ShardGroup:
    """The buffers and parameters of one unit.

    ``names`` are those of its modules; none has one until the root is known.
    """

    names: list[str]
    managed: list[ManagedParameter]
    buffers: list[ShardBuffer]

    def __init__(self, modules: Sequence[nn.Module], options: UnitOptions) -> None:
        """Take over what no unit below has taken; ConfigError if a parameter cannot be sharded."""
        self.names = [""] * len(modules)
        self.options = options
        self.divisor: float | None = None  # of gradients, in the place of the number of ranks
        self.reduced_at = 0  # when gradients were last handed to ranks
        self.managed = []
        self.buffers = []
        self.axes: dict[str, ModelAxes] = {}
        found = _free_parameters(modules, options.ignored)
        linear = linear_weights(inner for module in modules for inner in module.modules())
        by_mesh: dict[UnitMesh, dict[str, nn.Parameter]] = {options.mesh: {}}
        dims = {}
        for name, (param, _) in found.items():
            refuse_wrapper(name, param)
            dims[name], mesh = find_place(name, param, options.place, options.mesh)
            axes = find_model_axes(name, param, mesh.mesh, options.mesh.experts)
            if axes is not None:
                self.axes[name] = axes
            by_mesh.setdefault(mesh, {})[name] = param
        if options.policy.gather_format is not None:
            _refuse_packing(options.offload, self.axes)
        for mesh, of_mesh in by_mesh.items():
            for plan in plan_buffers(
                of_mesh,
                policy=options.policy,
                strategy=options.strategy,
                num_ranks=mesh.num_parts,
                linear=linear,
                dims=dims,
            ):
                self._take(found, plan, mesh)

    def _take(self, found: "dict[str, _Found]", plan: BufferPlan, mesh: UnitMesh) -> None:
        whole = found[plan.names[0]].param
        buffer = ShardBuffer(plan, mesh, whole.device, self.options.offload)
        self.buffers.append(buffer)
        if is_extended(whole):
            name, owner = plan.names[0], found[plan.names[0]].owners[0][0]
            if self.options.offload is not None or name in self.axes:
                raise ConfigError(
                    f"{name!r} is a {type(whole).__name__}, with fsdp_pre_all_gather, which goes "
                    "neither with CPUOffloadPolicy nor with tensor or expert parallelism yet. "
                    "Remedy: a plain parameter there"
                )
            buffer.extension = Extension(
                name, whole, owner, mesh.mesh, plan.dtypes.compute, self.options.policy
            )
        with torch.no_grad():
            for name, slot in zip(plan.names, plan.layout.slots, strict=True):
                buffer.load(slot, local_part(found[name].param))
        for name, slot in zip(plan.names, plan.layout.slots, strict=True):
            whole, owners = found[name].param, found[name].owners
            axes = self.axes.get(name)
            item = ManagedParameter(name, whole, weakref.ref(whole), owners, buffer, slot, axes)
            item.awaited = whole if whole.is_meta else None
            item.param = _replacement(whole, item.as_dtensor(buffer.wrapped_view(slot)))
            self._watch(item)
            setattr(whole, TAKEN_AS, name)
            for owner, attribute in owners:
                parameters_of(owner)[attribute] = item.param
            self.managed.append(item)
            buffer.params.append(item.param)

    def bind_views(self) -> None:
        """Point every parameter at where the main weights lie now, and make its gradient view."""
        for item in self.managed:
            local = item.buffer.wrapped_view(item.slot)
            dtensor: Any = item.param
            if dtensor.device == local.device:
                dtensor.data = item.as_dtensor(local)  # and torch takes its storage offset
                dtensor._local_tensor = local
            else:  # it was on the meta device
                self._become(item)
            self._bind_gradient_view(item)

    @torch.no_grad()
    def take_values(self) -> None:
        """Take over what was put in the place of shards: ``to_empty`` of a module in the unit does.

        ConfigError: it is of another dtype or shape.
        """
        for item in self.managed:
            found = unwrapped(local_tensor_of(item.param))
            if found.is_meta or self._lies_here(item):
                continue
            if item.buffer.main.is_meta:
                self.give_memory(found.device)
            mine = item.buffer.local_view(item.buffer.main, item.slot)
            if (found.dtype, found.shape) != (mine.dtype, mine.shape):
                raise self._moved_away(item)
            mine.copy_(found)
            item.awaited = None
            setattr(item.param, _IS_SHARDED, True)  # what was put there has come without it

    def give_memory(self, device: torch.device) -> None:
        """Give memory to what is on the meta device; nobody has set values there."""
        for buffer in self.buffers:
            if buffer.main.is_meta:
                buffer.leave_meta(device)
                main, grad = buffer.main, buffer.grad
                buffer.move(
                    buffer.new_zeros(main.numel(), main.dtype),
                    None if grad is None else buffer.new_zeros(grad.numel(), grad.dtype),
                )

    def _lies_here(self, item: ManagedParameter) -> bool:
        local = unwrapped(local_tensor_of(item.param))
        return key_of(local.untyped_storage()) == key_of(item.buffer.main.untyped_storage())

    def _moved_away(self, item: ManagedParameter) -> ConfigError:
        return ConfigError(
            f"parameter {self.full_name(item)!r} does not lie in the buffers of its unit any more "
            "(module.to(), param.data = ..., or load_state_dict(assign=True) after fully_shard). "
            "Remedy: move and cast the model before fully_shard, and load with assign=False"
        )

    def _bind_gradient_view(self, item: ManagedParameter) -> None:
        item.main_grad = None
        if item.buffer.grad is not None:
            # Also where no row is here: what works on lists of DTensors (clip_grad_norm_)
            # must find the same list on every rank.
            item.main_grad = item.as_dtensor(item.buffer.local_view(item.buffer.grad, item.slot))

    def follow_requires_grad(self) -> None:
        """Give main grads to parameters that ``requires_grad_`` has unfrozen since.

        Capture: allocates, once for a parameter; guards see to it that this is over by then.
        """
        for buffer in self.buffers:
            if buffer.gradients is None and buffer.trainable:
                with torch.inference_mode(False), torch.no_grad():
                    buffer.make_gradients()
        for item in self.managed:
            if item.main_grad is None:
                self._bind_gradient_view(item)
            if item.trains and not is_watched(item.param):
                self._watch(item)

    def check_memory(self) -> None:
        """Refuse shards without values, and those that were moved: training would miss the new."""
        for item in self.managed:
            if item.awaited is not None:
                raise NoValuesError(
                    f"parameter {self.full_name(item)!r} was made on the meta device and has no "
                    "values yet. Remedy: graphfsdp.materialize(model), or graphfsdp.load(path, "
                    "model), before the first forward pass"
                )
            if not self._lies_here(item):
                raise self._moved_away(item)

    def check_in_place(self) -> None:
        """Refuse what was put into the modules in the place of shards: nobody would use it."""
        for item in self.managed:
            for owner, name in item.owners:
                if parameters_of(owner).get(name) is not item.param:
                    raise ReplacedError(
                        f"parameter {self.full_name(item)!r} has been replaced since fully_shard "
                        "(module.weight = nn.Parameter(...), or torch.func.functional_call), and "
                        "modules compute with what ranks have gathered of the sharded one. Remedy: "
                        "write into it (with torch.no_grad(): module.weight.copy_(values)), after "
                        "to_empty() if it is on the meta device; or replace it before fully_shard"
                    )

    @property
    def awaits_values(self) -> bool:
        return any(item.awaited is not None for item in self.managed)

    @property
    def name(self) -> str:
        return " + ".join(self.names)

    def full_name(self, item: ManagedParameter) -> str:
        module, name = self.names[0], item.name
        if len(self.names) > 1:
            index, name = name.split(".", 1)
            module = self.names[int(index)]
        return f"{module}.{name}".lstrip(".")

    def cast(self, dtype: torch.dtype) -> None:
        """Go on with floating-point parameters of another dtype, the same for all who hold them."""
        self.take_values()
        for buffer in self.buffers:
            if buffer.dtypes.main.is_floating_point:
                dtypes = BufferDtypes.of(dtype, self.options.policy)
                buffer.cast(dataclasses.replace(dtypes, main=dtype))
        for item in self.managed:
            if item.param.dtype != item.buffer.dtypes.main:
                item.param.grad = None
                self._become(item)
        self.bind_views()

    def _become(self, item: ManagedParameter) -> None:
        new = item.as_dtensor(item.buffer.wrapped_view(item.slot))
        become(item.param, nn.Parameter(new, item.param.requires_grad), self.full_name(item))
        self._watch(item)

    def _watch(self, item: ManagedParameter) -> None:
        # Weakly: autograd holds hooks where the garbage collector does not look.
        of = (weakref.ref(self), weakref.ref(item), item.name)
        watch_gradient(item.param, functools.partial(_reduced, *of))

    def full_views(self) -> Iterator[tuple[ManagedParameter, Tensor]]:
        """Yield every parameter with its whole, gathered weight; gathers what is not here."""
        for buffer in self.buffers:
            buffer.unshard()
        for item in self.managed:
            yield item, item.buffer.whole_weight(item.slot)

    def copies(self) -> list[tuple[Tensor, int]]:
        """Return the whole weights that are copies, with the versions that they have now."""
        copies = [buffer.copy for buffer in self.buffers]
        return [(copy, version_of(copy)) for copy in copies if copy is not None]

    def install_shards(self) -> None:
        self.install(item.param for item in self.managed)

    def install(self, tensors: Iterable[Tensor]) -> None:
        for item, tensor in zip(self.managed, tensors, strict=True):
            for owner, name in item.owners:
                # Past nn.Module.__setattr__, which takes nothing but Parameters here.
                seen = tensor if tensor is item.param else item.as_seen(tensor)
                parameters_of(owner)[name] = seen  # type: ignore[assignment]

    def reshard(self, *, outside: bool = False, to_few: bool = False) -> None:
        for buffer in self.buffers:
            buffer.reshard(outside=outside, to_few=to_few)

    def describe(self, group: dist.ProcessGroup) -> list[str]:
        """Return one line per parameter with all that must be equal on the ranks of a group.

        Ranks of model parallelism may hold parts of other lengths, at other places, in another
        order.
        """
        options = self.options
        of_unit = {
            "strategy": options.strategy.value,
            "reshard_after_forward": options.reshard_after_forward,
            "outer ranks": options.mesh.num_outer,
            "cuts the optimizer over them": options.mesh.cuts_outside,
            "overlap": options.overlap,
        }
        lines = [f"unit {self.name!r} with {of_unit}"]
        for item in self.managed:
            dtypes, slot = item.buffer.dtypes, item.slot
            facts = {
                "shape": slot.shape if item.axes is None else item.axes.shape,
                "main weight": dtypes.main,
                "computed in": dtypes.compute,
                "main grad": dtypes.grad,
                "gathered as": item.buffer.plan.gather_format,
                "trainable": item.trains,
                "without values": item.awaited is not None,
            }
            if group in item.buffer.mesh.groups:
                facts |= {"part": slot.shape, "cut by": slot.dim, "at": slot.offset}
            lines.append(f"{self.full_name(item)} with {facts}")
        return lines if group in options.mesh.groups else sorted(lines)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return self._groups(self.axes.values())

    @property
    def equal_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks have the same values while whole: not those of experts."""
        return self._groups(axes for axes in self.axes.values() if axes.wraps)

    def _groups(self, over_model: Iterable[ModelAxes]) -> tuple[dist.ProcessGroup, ...]:
        over_data = (self.options.mesh, *(buffer.mesh for buffer in self.buffers))
        found = [group for mesh in over_data for group in mesh.groups]
        found += [group for axes in over_model for group in axes.all_groups]
        return tuple(dict.fromkeys(found))

    @property
    def is_old(self) -> bool:
        return any(buffer.is_old for buffer in self.buffers)

    @property
    def trainable(self) -> list[ManagedParameter]:
        return [item for item in self.managed if item.trains]

    @property
    def gradients(self) -> list[Gradients]:
        return [buffer.gradients for buffer in self.buffers if buffer.gradients is not None]

    @property
    def has_pending_gradients(self) -> bool:
        return any(gradients.is_pending for gradients in self.gradients)

    def has_main_grads(self) -> bool:
        """Whether main grads hold something to add to; those without a gradient get zeros then."""
        name = self.grad_attribute
        # Also those that are frozen by now, whose gradients are in the same memory.
        held = [item for item in self.managed if item.buffer.grad is not None]
        unbound = [item for item in held if getattr(item.param, name, None) is None]
        if len(unbound) == len(held):
            return False
        for item in unbound:
            if item.buffer.grad is not None:
                item.buffer.local_view(item.buffer.grad, item.slot).zero_()
        return True

    @torch.no_grad()
    def bind_main_grads(self) -> None:
        """Bind the main grads of those parameters that have got a gradient since the last time.

        Capture: what hooks of gradients launch.
        """
        bound = []
        for item in self.managed:
            gradients = item.buffer.gradients
            if gradients is not None and item.slot.index in gradients.landed:
                gradients.landed.remove(item.slot.index)
                setattr(item.param, self.grad_attribute, item.main_grad)
                bound.append(item)
        for item in bound:
            call_when_bound(item.param)

    @property
    def has_gradient_hooks(self) -> bool:
        return any(has_hooks(item.param) for item in self.managed)

    @torch.no_grad()
    def call_hooks(self, gradients: Gradients, reduced: Tensor) -> None:
        """Give hooks of ``register_hook`` the gradients that ranks have just reduced, to change."""
        for item in self.managed:
            mine = item.buffer.gradients is gradients and item.slot.index in gradients.landed
            if mine and has_hooks(item.param):
                local = item.buffer.local_view(reduced, item.slot)
                change(item.param, item.as_dtensor(local))

    @property
    def grad_attribute(self) -> str:
        return "decoupled_grad" if self.options.policy.use_decoupled_grad else "grad"


def _refuse_packing(offload: CPUOffloadPolicy | None, model_parallel: Iterable[str]) -> None:
    if offload is not None:
        raise ConfigError(
            "gather_format quantises main weights where they are computed with, and "
            "CPUOffloadPolicy keeps them in the CPU's memory. Remedy: one of the two"
        )
    for name in model_parallel:
        raise ConfigError(
            f"gather_format does not go with tensor or expert parallelism yet: {name!r} is cut by "
            "it, so its scale would be another one on each of those ranks. Remedy: "
            "gather_format=None for the units of such layers"
        )


class _Found(NamedTuple):
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]


def _free_parameters(modules: Sequence[nn.Module], ignored: Set[nn.Parameter]) -> dict[str, _Found]:
    """Return the parameters that are not sharded yet, each once, with all that hold them."""
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module_name, owner in _named_modules(modules):
        for name, param in parameters_of(owner).items():
            if param is None or hasattr(param, _IS_SHARDED) or param in ignored:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if hasattr(param, TAKEN_AS):
                raise ConfigError(
                    f"parameter {full_name!r} is tied to {getattr(param, TAKEN_AS)!r}, which "
                    "another unit has taken over. Remedy: let one unit hold both modules (wrap "
                    "neither of them, or a common parent)"
                )
            refuse_gradient_hooks(param, full_name)
            found.setdefault(id(param), (full_name, param, []))[2].append((owner, name))
    return {name: _Found(param, owners) for name, param, owners in found.values()}


def _named_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for index, module in enumerate(modules):
        others = (below for below in module.modules() if not _is_composable_with_fsdp(below))
        replicated = {inner for other in others for inner in other.modules()}  # by DDP: left alone
        for name, inner in module.named_modules():
            if inner in replicated:
                continue
            yield (f"{index}.{name}".rstrip(".") if len(modules) > 1 else name), inner


def _reduced(
    group_reference: "weakref.ref[ShardGroup]",
    item_reference: "weakref.ref[ManagedParameter]",
    name: str,
) -> Reduced:
    group, item = group_reference(), item_reference()
    if group is None or item is None:  # its model is gone
        return Reduced(name, 0, ())
    return Reduced(group.full_name(item), group.reduced_at, item.buffer.mesh.groups)


def _replacement(param: nn.Parameter, view: Tensor) -> nn.Parameter:
    """Return the parameter that takes the place of a whole one, with all its attributes."""
    sharded = nn.Parameter(view, requires_grad=param.requires_grad)
    inner = parts_of(param) if is_extended(param) else ()
    for attribute, value in vars(param).items():
        if attribute not in inner:
            setattr(sharded, attribute, value)
    setattr(sharded, _IS_SHARDED, True)
    # Whoever still holds the whole parameter (an optimizer made before) must not keep its memory,
    # nor go on training a copy that nobody uses.
    param.grad = None
    if is_extended(param):
        forget_values(param)
    elif isinstance(param, DTensor):
        param._local_tensor = local_tensor_of(param).new_empty(0)
    elif not param.is_meta:  # which has none, and is still asked for its shape
        param.data = param.data.new_empty(0)
    return sharded
