"""Denoising diffusion: noise and time steps are drawn inside the graph, anew in each replay.

A small model learns where two half moons are, by saying which noise was added to a point; then it
draws points by itself. The average of the weights is updated behind the step.
"""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphfsdp
from graphfsdp.optim import FusedAdam

NUM_STEPS = 100
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
betas = torch.linspace(1e-4, 0.1, NUM_STEPS, device=device)
kept = (1 - betas).cumprod(dim=0)  # [NUM_STEPS], the share of the point that is left


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(NUM_STEPS, 128)
        self.points = nn.Linear(2, 128)
        self.body = nn.Sequential(
            nn.SiLU(),
            nn.Linear(128, 128),
            nn.SiLU(),
            nn.Linear(128, 128),
            nn.SiLU(),
            nn.Linear(128, 2),
        )

    def forward(self, points: Tensor, times: Tensor) -> Tensor:  # [N, 2], [N] -> [N, 2]
        noise: Tensor = self.body(self.points(points) + self.times(times))
        return noise


def moons(number: int) -> Tensor:  # [number, 2]
    angle = torch.rand(number) * torch.pi
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    chosen = torch.where(torch.rand(number, 1) < 0.5, upper, lower)
    return (chosen - torch.tensor([0.5, 0.25])).to(device)


def loss_fn(model: nn.Module, points: Tensor) -> Tensor:
    times = torch.randint(NUM_STEPS, points.shape[:1], device=device)
    noise = torch.randn_like(points)
    share = kept[times].unsqueeze(-1)
    return nn.functional.mse_loss(
        model(share.sqrt() * points + (1 - share).sqrt() * noise, times), noise
    )


model = Denoiser().to(device)
average = AveragedModel(model, device=device, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = FusedAdam(model.parameters(), lr=3e-3)
with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
    for iteration in range(1500):
        loss = step(moons(512))
        average.update_parameters(model)
        if iteration % 500 == 499:
            print(f"iteration {iteration + 1}  loss {loss:.4f}  ({step.phase.value})")

with torch.no_grad():
    drawn = torch.randn(500, 2, device=device)
    for time in reversed(range(NUM_STEPS)):
        noise = average(drawn, torch.full((500,), time, device=device))
        drawn = (drawn - betas[time] / (1 - kept[time]).sqrt() * noise) / (1 - betas[time]).sqrt()
        drawn += betas[time].sqrt() * torch.randn_like(drawn) * (time > 0)
    near, noise = (
        torch.cdist(points, moons(2000)).min(dim=1).values.mean()
        for points in (drawn, torch.randn_like(drawn))
    )
print(f"drawn points are {near:.3f} from the moons, noise is {noise:.3f}")
