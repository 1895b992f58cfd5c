"""Documents packed into sequences of one length: no token attends to another document.

Which documents a batch holds is data, and its shapes are not: the mask is made inside the graph, of
each token's place in its document, which begins at a 0.
"""

import email
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.data import Corpus, Feed, TokenBatches
from graphfsdp.optim import FusedAdam

WIDTH, HEADS, TOKENS = 64, 4, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:  # [B, T] each -> [B, T, 256]
        documents = (places == 0).cumsum(dim=1)
        same = documents[:, :, None] == documents[:, None, :]
        hidden = ~same.tril().repeat_interleave(HEADS, dim=0)  # [B x HEADS, T, T]
        x = self.token(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        logits: Tensor = self.head(x)
        return logits


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor, places: Tensor) -> Tensor:
    """A document's first token is no target: it is -100, which cross entropy leaves out."""
    return nn.functional.cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    # Each file is a document, which a 0 ends; or load_corpus("tokens.npy"), with a token that does.
    texts = [path.read_bytes() for path in sorted(Path(email.__file__).parent.rglob("*.py"))]
    tokens = np.frombuffer(b"\0".join(texts), dtype=np.uint8)
    corpus = Corpus("email", tokens[:-10_000], tokens[-10_000:])
    batches = TokenBatches(
        corpus, seq_length=TOKENS, batch_size=8, eod_token=0, positions=True, mask_first=True
    )
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=3e-3)
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0) as step:
        for iteration, batch in enumerate(Feed(batches, device), start=1):
            loss = step(*batch)
            if iteration % 40 == 0:
                print(f"iteration {iteration}  loss {loss:.4f}  ({step.phase.value})")
            if iteration == 200:
                break
