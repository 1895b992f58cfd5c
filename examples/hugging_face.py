"""A Hugging Face model whose whole iteration is one graph, recomputing its activations.

    pip install transformers && python examples/hugging_face.py [full_iteration | none]

A small Llama from its configuration, so that nothing is downloaded; a pretrained one is used the
same way. Models that return their loss need no ``loss_fn``; batches are keyword arguments.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphfsdp
from graphfsdp.optim import FusedAdam

scope = sys.argv[1] if len(sys.argv) > 1 else "full_iteration"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    attention_dropout=0.1,
    use_cache=False,
)
model = LlamaForCausalLM(config).to(device).train()
model.activation_checkpointing_enable(  # gradient_checkpointing_enable before version 5
    {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": graphfsdp.recompute_contexts,
    }
)
optimizer = FusedAdam(model.parameters(), lr=3e-3)

with graphfsdp.capture(model, optimizer, scope=scope, max_grad_norm=1.0) as step:
    for iteration in range(60):
        start = torch.randint(0, 64, (8, 1))
        ids = (start + torch.arange(32)) % 64  # count from anywhere
        output = step(input_ids=ids.to(device), labels=ids.to(device))
        if iteration % 10 == 9:
            print(f"iteration {iteration + 1}  loss {output:.4f}  ({step.phase.value})")
