"""PPO on a pole that is to be balanced: each update of the policy is one launch.

The environment is a few lines of tensors, many poles at once, and stays outside of the graph; an
update has clipping, entropy, a value function and gradient clipping in it, and a batch of fixed
size. Small networks and many updates: where launches are all that costs.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import graphfsdp
from graphfsdp.optim import FusedAdam

POLES, HORIZON, EPOCHS, MINIBATCHES = 64, 64, 4, 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
Categorical.set_default_validate_args(False)  # it would look on the host


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def moved(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Barto, Sutton and Anderson's cart and pole: position, speed, angle, its speed."""
    _, v, angle, turn = state.unbind(1)
    push = (10 * (2 * action - 1) + 0.05 * turn**2 * angle.sin()) / 1.1
    bend = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    speed = push - 0.05 * bend * angle.cos() / 1.1
    state = state + 0.02 * torch.stack([v, speed, turn, bend], dim=1)
    fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)
    return torch.where(fallen[:, None], torch.rand_like(state) * 0.1 - 0.05, state), fallen


def loss_fn(agent: Agent, *batch: Tensor) -> Tensor:
    seen, action, old, gain, goal = batch
    policy = Categorical(logits=agent.actor(seen))
    ratio = (policy.log_prob(action) - old).exp()
    actor = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    critic = (agent.critic(seen).squeeze(1) - goal).square().mean()
    loss: Tensor = actor + 0.5 * critic - 0.01 * policy.entropy().mean()
    return loss


agent = Agent().to(device)
optimizer = FusedAdam(agent.parameters(), lr=2e-3, eps=1e-5)
state = torch.rand(POLES, 4, device=device) * 0.1 - 0.05
with graphfsdp.capture(agent, optimizer, loss_fn=loss_fn, max_grad_norm=0.5) as step:
    for iteration in range(40):
        rows, values, falls = [], [], []
        with torch.no_grad():
            for _ in range(HORIZON):
                policy = Categorical(logits=agent.actor(state))
                action = policy.sample()
                rows.append((state, action, policy.log_prob(action)))
                values.append(agent.critic(state).squeeze(1))
                state, fallen = moved(state, action)
                falls.append(fallen.float())
            gains, gain = [], torch.zeros(POLES, device=device)
            after = agent.critic(state).squeeze(1)
            for value, fall in zip(reversed(values), reversed(falls), strict=True):
                surprise = 1 - fall + 0.99 * after * (1 - fall) - value
                gain, after = surprise + 0.95 * 0.99 * gain * (1 - fall), value
                gains.append(gain)
        gain = torch.cat(gains[::-1])
        batch = [*map(torch.cat, zip(*rows, strict=True))]
        batch += [(gain - gain.mean()) / gain.std(), gain + torch.cat(values)]
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(gain), device=device).chunk(MINIBATCHES):
                loss = step(*(part[chosen] for part in batch))
        if iteration % 10 == 9:
            length = POLES * HORIZON / max(1.0, torch.stack(falls).sum().item())
            print(
                f"iteration {iteration + 1}  {length:.0f} moves between falls  ({step.phase.value})"
            )
