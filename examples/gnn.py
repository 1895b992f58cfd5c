"""A graph network on whole graphs of many sizes: padded to one size, so that one recording does.

Nodes belong to one of two communities, and edges mostly stay within them; a few nodes tell which
community is theirs. Messages are added by `index_add`; padding points at a node that nobody reads.
"""

import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam

MAX_NODES, MAX_EDGES, WIDTH = 64, 512, 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:  # [MAX_NODES + 1, 3], [2, MAX_EDGES]
        hidden = self.enter(nodes)
        for own, others in zip(self.own, self.others, strict=True):
            sums = torch.zeros_like(hidden).index_add(0, edges[1], others(hidden)[edges[0]])
            hidden = hidden + (own(hidden) + sums).relu()
        logits: Tensor = self.leave(hidden)
        return logits


def community() -> tuple[Tensor, Tensor, Tensor]:
    """Return a graph of a size of its own, padded: nodes, edges, targets (-100 for padding)."""
    size = int(torch.randint(24, MAX_NODES + 1, ()))
    labels = torch.randint(2, (size,))
    chance = torch.where(labels[:, None] == labels, 0.12, 0.01)
    edges = (torch.rand(size, size) < chance).nonzero().T[:, :MAX_EDGES]
    told = torch.rand(size) < 0.2
    nodes = torch.zeros(MAX_NODES + 1, 3)
    nodes[:size, 0] = 1
    nodes[torch.arange(size)[told], 1 + labels[told]] = 1
    padded = torch.full((2, MAX_EDGES), MAX_NODES)  # from the last node to itself
    padded[:, : edges.shape[1]] = edges
    targets = torch.full((MAX_NODES + 1,), -100)
    targets[:size] = labels
    return nodes.to(device), padded.to(device), targets.to(device)


def loss_fn(
    model: nn.Module, nodes: Tensor, edges: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    logits = model(nodes, edges)
    right = ((logits.argmax(dim=1) == targets).sum() / (targets >= 0).sum()).detach()
    return nn.functional.cross_entropy(logits, targets), right


model = Network().to(device)
optimizer = FusedAdam(model.parameters(), lr=3e-3)
with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0) as step:
    rights = []
    for iteration in range(600):
        _, right = step(*community())
        rights.append(right)
        if iteration % 200 == 199:
            mean = torch.stack(rights[-100:]).mean()
            print(f"iteration {iteration + 1}  right {mean:.3f}  ({step.phase.value})")
