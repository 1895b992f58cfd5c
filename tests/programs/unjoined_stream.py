"""An iteration that forks a CUDA stream and never joins it."""

import torch
from torch import Tensor, nn


def leaves_a_stream_unjoined(model: nn.Module, x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    while side == torch.cuda.current_stream():  # torch hands out few streams, again and again
        side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2).sum()
    loss: Tensor = model(x)
    return loss
