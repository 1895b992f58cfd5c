"""Train a GPT on the source of Python's standard library, whole iteration captured.

``graphfsdp train`` does the same with flags, and keeps a run in a directory; this is the
loop to copy into a program of your own:

    python examples/train_gpt.py [full_iteration | forward_backward | none] [iterations]
"""

import sys
import time

import torch

import graphfsdp
from graphfsdp.data import BYTES_VOCAB_SIZE, Feed, TokenBatches, load_corpus
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

scope = sys.argv[1] if len(sys.argv) > 1 else "full_iteration"
num_iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 300

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

corpus = load_corpus(None)  # a path works too
batches = TokenBatches(corpus, seq_length=128, batch_size=16, seed=0)
feed = Feed(batches, device)  # takes any loader, and works ahead of the training

config = GPTConfig(
    vocab_size=BYTES_VOCAB_SIZE,
    seq_length=128,
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    position_embedding_type="rope",
    hidden_dropout=0.1,
)
model = GPT(config).to(device)
optimizer = FusedAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_iterations)

# The model returns its loss when it gets targets, so no loss_fn is needed. Each batch of 16 is
# split into 2 micro-batches; both, the clipping and the optimizer are in the graph.
with graphfsdp.capture(model, optimizer, scope=scope, microbatches=2, max_grad_norm=1.0) as step:
    start = time.perf_counter()
    for iteration, (tokens, targets) in zip(range(num_iterations), feed, strict=False):
        loss = step(tokens, targets)
        scheduler.step()
        if (iteration + 1) % 10 == 0:  # reading a loss makes the host wait, so not every time
            seconds = time.perf_counter() - start
            print(
                f"iteration {iteration + 1:4}  loss {loss:.4f}  "
                f"grad norm {step.grad_norm:.3f}  {seconds:.1f} s  ({step.phase.value})"
            )
    print(step.report())

prompt = corpus.validation[:32].astype("int64")  # bytes that nothing was trained on
text = torch.from_numpy(prompt)[None].to(device)
model.eval()
with torch.no_grad():
    for _ in range(200):
        logits = model(text[:, -config.seq_length :])[:, -1]
        text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(dim=-1), 1)], dim=1)
print(bytes(text[0].tolist()).decode(errors="replace"))
