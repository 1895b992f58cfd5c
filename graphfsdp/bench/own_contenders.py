"""graphfsdp itself as a contender: eager, and captured in each scope."""

from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.bench.batches import Batch
from graphfsdp.bench.contender import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    PEAK_LR,
    WEIGHT_DECAY,
    Contender,
    GraphFacts,
    Setting,
    initial_model,
    to_bf16,
)
from graphfsdp.bench.profile_names import GraphNode, replay_nodes
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.optim import FusedAdam

WARMUP_STEPS = 3


class OwnContender(Contender):
    """``graphfsdp.capture`` with FusedAdam; on several ranks the model is sharded."""

    def __init__(self, setting: Setting, scope: Scope, *, compiled: bool = False) -> None:
        model = initial_model(setting)
        policy: MixedPrecisionPolicy | None = None
        if setting.ranks.launched:
            if setting.bf16:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            _shard(model, setting, policy or MixedPrecisionPolicy())
        elif setting.bf16:
            to_bf16(model)
        self.optimizer = FusedAdam(
            model.parameters(),
            lr=PEAK_LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            master_weights=setting.bf16 and not setting.ranks.launched,
        )
        trained: Any = torch.compile(model) if compiled else model
        self._scope = scope
        self.step = graphfsdp.capture(
            trained,
            self.optimizer,
            scope=scope,
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=MAX_GRAD_NORM,
            mp_policy=policy,
        )

    def train(self, batch: Batch) -> Tensor:  # [] float32 loss
        """Train one step: eagerly, or by one replay."""
        loss: Tensor = self.step(*batch)
        return loss

    def graph_facts(self) -> GraphFacts:
        """Return what the step's report says."""
        report = self.step.report()
        if not report.num_captures:
            return GraphFacts()
        return GraphFacts(report.capture_ms, report.num_nodes, report.pool_bytes)

    def operator_us(self) -> tuple[float, ...]:
        """Time each operator of a whole recorded iteration, on a CPU."""
        if self._scope is not Scope.FULL_ITERATION:
            return ()
        return tuple(self.step.report(measure=True).node_us)

    def replay_nodes(self) -> tuple[GraphNode, ...]:
        """Return what the step's report says."""
        report = self.step.report()
        return replay_nodes(report) if report.num_captures else ()

    def close(self) -> None:
        """Free the graph."""
        self.step.close()


def _shard(model: nn.Module, setting: Setting, policy: MixedPrecisionPolicy) -> None:
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        graphfsdp.fully_shard(block, strategy=setting.strategy, mp_policy=policy)
    graphfsdp.fully_shard(model, strategy=setting.strategy, mp_policy=policy)
