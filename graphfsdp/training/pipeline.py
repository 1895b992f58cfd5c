"""A GPT cut into the stages of a pipeline, of which each rank has one.

Shapes: B = sequences, T = tokens of a sequence, C = hidden size, V = vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import GPT, GPTConfig, embed, token_loss


class GPTStage(nn.Module):
    """Some blocks of a GPT, under their names in it; the first stage embeds, the last one ends."""

    config: GPTConfig

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        """Take over the modules of a whole model."""
        super().__init__()
        self.config = model.config
        num_layers = len(model.blocks) // num_stages
        mine = range(index * num_layers, (index + 1) * num_layers)
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in mine})
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
            self.dropout = model.dropout
        if self.is_last:
            self.final_norm, self.output = model.final_norm, model.output

    def forward(
        self,
        x: Tensor,  # [B, T] int64 tokens in the first stage, [B, T, C] in others
    ) -> Tensor:  # [B, T, C], in the last stage [B, T, V] logits
        """Capture: no host sync; positions are a slice at a fixed address."""
        if self.is_first:
            x = embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        logits: Tensor = self.output(self.final_norm(x)) if self.is_last else x
        return logits


def pipeline_mesh(config: TrainConfig, device: torch.device) -> DeviceMesh:
    """Return ranks by stage and by part of the data; as in Megatron, stages are far apart."""
    size = config.pipeline_model_parallel_size
    return init_device_mesh(
        device.type, (size, dist.get_world_size() // size), mesh_dim_names=("pp", "dp")
    )


def make_schedule(
    config: TrainConfig, stage: GPTStage, mesh: DeviceMesh, device: torch.device
) -> Any:
    """Return torch's schedule for the stage of this rank."""
    from torch.distributed import pipelining  # imports a compiler's worth of modules

    made: Any = pipelining.PipelineStage(
        stage,
        mesh.get_local_rank("pp"),
        config.pipeline_model_parallel_size,
        device,
        group=mesh.get_group("pp"),
    )
    num_microbatches = config.batch(dist.get_world_size()).num_microbatches
    return pipelining.Schedule1F1B(made, n_microbatches=num_microbatches, loss_fn=token_loss)
