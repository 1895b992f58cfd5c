"""A small Llama, parallelized and trained by a loop in torchtitan's style.

tests/sharding/test_fsdp2_titan.py runs it with either import; only that line is changed for it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 48, 32, 4, 2, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        size, length = x.shape[:2]
        q, k, v = (w(x).view(size, length, -1, WIDTH // HEADS) for w in (self.wq, self.wk, self.wv))
        q, k = (rotate(part, rotation).transpose(1, 2) for part in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        result: Tensor = self.wo(out.transpose(1, 2).reshape(size, length, -1))
        return result


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): TransformerBlock() for index in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        frequencies = 100.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        angles = torch.outer(torch.arange(POSITIONS), frequencies)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin()), -1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.rotation)
        out: Tensor = self.output(self.norm(x))
        return out


def apply_tp(model: Transformer, mesh: DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(
        [model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False
    )
    fully_shard(model, mesh=mesh, mp_policy=policy)


def parallelize_llama(model: Transformer, world_mesh: DeviceMesh) -> Transformer:
    if world_mesh["tp"].size() > 1:
        apply_tp(model, world_mesh["tp"])
    apply_fsdp(model, world_mesh["dp_shard"])
    return model


def parallelized(tp: int) -> tuple[Transformer, DeviceMesh]:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    return parallelize_llama(Transformer(), mesh), mesh


def loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels.flatten())


def next_batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31 * index + rank)
    starts = torch.randint(VOCABULARY, (4, 1), generator=generator)
    tokens = (starts + 5 * torch.arange(POSITIONS + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def train(tp: int, num_steps: int, accumulation: int) -> list[float]:
    """Return the losses of this rank."""
    model, mesh = parallelized(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulation):
            model.set_requires_gradient_sync(part == accumulation - 1)  # type: ignore[operator]
            batch = next_batch(accumulation * step + part, mesh["dp_shard"].get_local_rank())
            loss = loss_fn(model, *batch) / accumulation
            loss.backward()
            losses.append(loss.item())
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
        optimizer.step()
        scheduler.step()
    return losses
