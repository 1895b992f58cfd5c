"""The adapter that fits any optimizer: its numbers are baked into a recording, and guarded."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from graphfsdp.base.changes import Change, refuse
from graphfsdp.base.dtensors import local_part, num_meshes
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError
from graphfsdp.optim.adapters.baked_values import BakedValues
from graphfsdp.optim.adapters.precision_guard import (
    OptimizerFacts,
    check_precision,
    main_grad_dtype,
)
from graphfsdp.optim.adapters.skip_counter import make_skip_counter


class Adapter:
    """What all adapters share.

    Attributes:
        optimizer: The user's optimizer.
        use_decoupled_grad: It reads ``param.decoupled_grad`` instead of ``param.grad``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, facts: OptimizerFacts) -> None:
        self.optimizer = optimizer
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (optimizer,)
        self.use_decoupled_grad = facts.use_decoupled_grad
        self._facts = facts
        self._name = facts.name

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype that the persistent gradient of ``param`` has under ``policy``."""
        return main_grad_dtype(param, policy, self._facts)

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        """Refuse what this optimizer cannot step on; see the two methods that are called.

        Raises:
            PrecisionError: a gradient would reach the optimizer as a casted copy.
            ConfigError: the optimizer's settings cannot be captured.
        """
        check_precision(named_params, policy, self._facts)
        if scope is Scope.FULL_ITERATION:
            self._check_inside_graph(named_params, policy)
        self._check_anywhere(named_params)

    def _check_inside_graph(
        self, named_params: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        """Refuse what no graph can hold of the step."""

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse what the optimizer cannot do in a graph or outside of one."""

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""
        yield from _state_tensors(self.optimizer)


class BakedAdapter(Adapter):
    """Any optimizer; its numbers are baked into the recording, so a change is refused."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, facts: OptimizerFacts | None = None
    ) -> None:
        super().__init__(
            optimizer,
            facts
            or OptimizerFacts(
                name=f"{type(optimizer).__module__.split('.')[0]} {type(optimizer).__name__}",
                use_decoupled_grad=False,
                main_weight_dtype=lambda param: param.dtype,
                mixed_gradients=False,
                keeps_main_weights=False,
            ),
        )
        self._baked: BakedValues | None = None
        self._skipped: Tensor | None = None  # [] float32
        self._skips_itself = False

    def prepare_skipping(self, scope: Scope) -> None:
        """Make the counter of skipped steps.

        Raises:
            ConfigError: the optimizer cannot skip a step inside a graph.
        """
        self._skips_itself = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        if scope is Scope.FULL_ITERATION and not self._skips_itself:
            raise ConfigError(
                f"{self._name} cannot leave a step out by a tensor, so skip_nonfinite=True would "
                "have to read on the host whether a gradient is finite. Ways out: fused=True, if "
                "it has that; graphfsdp.optim.FusedAdam; or scope='forward_backward', which leaves "
                "the optimizer outside the graph"
            )
        self._skipped = make_skip_counter(self.optimizer)

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that were skipped so far; None without skipping."""
        return self._skipped

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""
        yield from super().state_tensors()
        if self._skipped is not None:
            yield "number of skipped steps", self._skipped

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Scale the gradients in place, then take one step.

        Capture: as capturable as the optimizer is.
        """
        if found_inf is not None and self._skipped is not None:
            self._skipped.add_(found_inf)
            if not self._skips_itself and bool(found_inf):  # outside the graph: the host may read
                return
        if grad_scale is not None:
            attribute = "decoupled_grad" if self.use_decoupled_grad else "grad"
            found = (
                getattr(param, attribute, None)
                for group in self.optimizer.param_groups
                for param in group["params"]
            )
            # This rank's parts: a list of DTensors would have to lie on one mesh.
            grads = [local_part(grad) for grad in found if grad is not None]
            if grads:
                torch._foreach_mul_(grads, grad_scale)
        if found_inf is None or not self._skips_itself:
            self._take_step()
            return
        vars(self.optimizer)["found_inf"] = found_inf  # as torch's GradScaler hands it over
        try:
            self._take_step()
        finally:
            del vars(self.optimizer)["found_inf"]

    def _take_step(self) -> None:
        self.optimizer.step()

    def bake(self) -> None:
        """Remember every value of every group."""
        self._baked = BakedValues(self.optimizer.param_groups)

    def changes(self) -> list[Change]:
        """Return every value that is not what the recording has baked in."""
        if self._baked is None:
            return []
        return self._baked.changes(self.optimizer.param_groups, self._name)

    def before_replay(self) -> None:
        """Refuse a changed value.

        Raises:
            GuardError: a value that the recording has baked in was changed; it is named.
        """
        refuse(self.changes())
        # Schedulers warn when they have not seen a step, and a replay calls none.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse kernels over lists of parameters on several meshes.

        Raises:
            ConfigError: there is such a group.
        """
        for index, group in enumerate(self.optimizer.param_groups):
            how = next((key for key in ("foreach", "fused") if group.get(key)), None)
            if how is not None and num_meshes(group["params"]) > 1:
                raise ConfigError(
                    f"group {index} of {self._name} has {how}=True and parameters on several "
                    "device meshes (or DTensors beside plain tensors), which torch cannot put into "
                    f"one list. Ways out: {how}=False; graphfsdp.optim.FusedAdam, FusedSGD or "
                    "FusedLion, which step on this rank's parts; a group for each mesh"
                )

    def _check_inside_graph(
        self, named_params: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        """Refuse an lr that would be read on the host.

        Raises:
            ConfigError: lr is a tensor on another device than the parameters.
        """
        for index, group in enumerate(self.optimizer.param_groups):
            lr = group.get("lr")
            if not isinstance(lr, Tensor):
                continue
            for param in group["params"]:
                if param.device != lr.device:
                    raise ConfigError(
                        f"lr of group {index} of {self._name} is a tensor on {lr.device}, its "
                        f"parameters are on {param.device}: it would be read on the host and "
                        "baked. Move lr to the parameters' device, or use "
                        "graphfsdp.optim.FusedAdam, which reads numbers anew in each replay"
                    )


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for row, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for key, value in group.items():
            if isinstance(value, Tensor):
                yield f"{key} of group {row}", value
        for position, param in enumerate(group["params"]):
            name = names[position] if names else f"parameter {position} of group {row}"
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value
