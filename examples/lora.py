"""LoRA on a Hugging Face model: frozen weights, small adapters, one graph for the iteration.

    pip install transformers peft && python examples/lora.py

A small Llama from its configuration, so that nothing is downloaded; a pretrained one is used the
same way. Only the adapters are trained, saved, and have gradients and optimizer state.
"""

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import graphfsdp
from graphfsdp.optim import FusedAdam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
model = get_peft_model(LlamaForCausalLM(config), lora).to(device).train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = FusedAdam(trained, lr=1e-2)
before = {name: value.clone() for name, value in model.get_base_model().named_parameters()}

with graphfsdp.capture(model, optimizer, max_grad_norm=1.0) as step:
    for iteration in range(120):
        start = torch.randint(0, 64, (8, 1))
        ids = ((start + torch.arange(32)) % 64).to(device)  # count from anywhere
        loss = step(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        if iteration % 30 == 29:
            print(f"iteration {iteration + 1}  loss {loss:.4f}  ({step.phase.value})")

frozen = {
    name: value for name, value in model.get_base_model().named_parameters() if "lora" not in name
}
assert all(torch.equal(before[name], value) for name, value in frozen.items())
adapters = sum(value.numel() for value in get_peft_model_state_dict(model).values())
print(f"{adapters:,} numbers were trained, {sum(v.numel() for v in frozen.values()):,} were not")
