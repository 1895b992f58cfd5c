"""Frozen, self-validating options that the packages share."""

import enum
from dataclasses import dataclass

import torch

from graphfsdp.errors import Choice, ConfigError


class Scope(Choice):
    """How much of an iteration is in the graph."""

    NONE = "none"
    FORWARD_BACKWARD = "forward_backward"
    FULL_ITERATION = "full_iteration"


class OnChange(Choice):
    """What a captured step does with what its graph was not made for."""

    RAISE = "raise"
    RECAPTURE = "recapture"  # another graph, in the same memory pool
    EAGER = "eager"  # run this call without a graph, and keep the graph


class Undo(Choice):
    """Whether a failed warm-up leaves no trace."""

    AUTO = "auto"
    NONE = "none"  # no copies are kept for it; a failure leaves the step broken


class Compile(Choice):
    """Whether a recording is compiled."""

    OFF = False
    ON = True
    AUTO = "auto"  # what is faster, piece by piece


class ShardingStrategy(enum.Enum):
    """What is cut into one part per rank. The numbers are those of the ZeRO stages."""

    NO_SHARD = "no_shard"  # nothing: gradients are averaged, every rank steps on everything
    OPTIM = "optim"  # main weights and optimizer state; gradients are reduced once an iteration
    OPTIM_GRADS = "optim_grads"  # also main grads: reduced in every microbatch
    OPTIM_GRADS_PARAMS = "optim_grads_params"  # also the weights that a forward pass computes with

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return list(ShardingStrategy).index(self)

    @classmethod
    def parse(cls, value: "str | int | ShardingStrategy") -> "ShardingStrategy":
        """Return the strategy of that name or ZeRO stage; ConfigError: there is none."""
        for strategy in cls:
            if value in (strategy, strategy.value, strategy.stage, str(strategy.stage)):
                return strategy
        known = ", ".join(f"{strategy.value!r} ({strategy.stage})" for strategy in cls)
        raise ConfigError(f"unknown sharding strategy {value!r}; expected one of {known}")


class GatherFormat(Choice):
    """What the weights of linear layers are gathered as."""

    FLOAT8 = "float8"  # e4m3, one scale for a weight
    FLOAT8_ROWWISE = "float8_rowwise"  # one scale, a power of two, for each row
    MXFP8 = "mxfp8"  # e4m3, one scale, a power of two, for 32 values of a row


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each copy of a parameter and of its gradient has. None means "as it is".

    Attributes:
        param_dtype: Dtype that forward and backward compute in; None is the parameter's own.
        main_params_dtype: Dtype of the weights that the optimizer updates; None is the dtype
            of the optimizer's main weights, or the parameter's own where it keeps none.
        main_grads_dtype: Dtype of the persistent gradient buffers; None is the main weights'.
        grad_comm_dtype: Dtype in which gradients are reduced; None is the main grads'.
        use_decoupled_grad: The optimizer reads ``param.decoupled_grad`` instead of
            ``param.grad``, so that the gradient's dtype need not be the weight's.
        reduce_dtype: FSDP2's word for ``grad_comm_dtype``.
        output_dtype: Floating-point tensors that a unit's forward returns are cast to it.
        cast_forward_inputs: Those that it is given are cast to ``param_dtype``.
        gather_format: "float8", "float8_rowwise" or "mxfp8": weights of ``nn.Linear`` go over the
            wire as 8-bit numbers with scales, and layers compute, in ``param_dtype``, with what
            these stand for. None gathers ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    use_decoupled_grad: bool = False
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather_format: GatherFormat | str | None = None

    @property
    def comm_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced, by whichever word it was given."""
        return self.grad_comm_dtype or self.reduce_dtype

    def __post_init__(self) -> None:
        if None not in (self.grad_comm_dtype, self.reduce_dtype) and (
            self.grad_comm_dtype != self.reduce_dtype
        ):
            raise ConfigError(
                f"MixedPrecisionPolicy was given grad_comm_dtype={self.grad_comm_dtype} and "
                f"reduce_dtype={self.reduce_dtype}, which mean the same. Remedy: one of them"
            )
        if self.gather_format is not None:
            object.__setattr__(self, "gather_format", GatherFormat.parse(self.gather_format))
        for name, dtype in vars(self).items():
            if not name.endswith("_dtype"):
                continue
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}"
                )


@dataclass(frozen=True)
class CaptureOptions:
    """The numbers that shape a captured step; see ``graphfsdp.capture`` for their meaning."""

    scope: Scope = Scope.FULL_ITERATION
    warmup_steps: int = 3
    microbatches: int = 1
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    on_change: OnChange = OnChange.RAISE
    max_graphs: int = 16
    verify: int = 0
    audit: int | str = "auto"
    undo: Undo = Undo.AUTO
    compile: Compile = Compile.OFF

    def __post_init__(self) -> None:
        if self.scope is Scope.NONE and self.compile is not Compile.OFF:
            raise ConfigError(
                f"compile={self.compile.value!r} compiles what was captured, and scope='none' "
                "captures nothing. Remedy: scope='full_iteration', or leave compile out; of what "
                "runs eagerly, torch.compile(model) compiles the model"
            )
        minimum = 1 if self.scope is Scope.FULL_ITERATION else 0
        at_least("warmup_steps", self.warmup_steps, minimum)
        at_least("microbatches", self.microbatches, 1)
        at_least("max_graphs", self.max_graphs, 1)
        at_least("verify", self.verify, 0)
        if self.audit != "auto" or not isinstance(self.audit, str):
            audit = self.audit
            if isinstance(audit, bool) or not isinstance(audit, int) or audit < 0:
                raise ConfigError(
                    f"audit must be 'auto', or a number of replays (0 for none), got {audit!r}"
                )
        if not isinstance(self.skip_nonfinite, bool):
            raise ConfigError(f"skip_nonfinite must be True or False, got {self.skip_nonfinite!r}")
        norm = self.max_grad_norm
        if norm is None:
            return
        if isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0:
            raise ConfigError(
                f"max_grad_norm must be a positive number (or None for no clipping), got {norm!r}"
            )


def at_least(name: str, value: int, minimum: int) -> None:
    """Refuse what is no integer of at least ``minimum``: ConfigError, which names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
