"""A small residual net for images of 32 x 32 pixels.

Shapes: B = images, C = channels, S = side of the image in pixels.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

NUM_COLOURS = 3
NUM_STAGES = 3


@dataclass(frozen=True)
class ConvConfig:
    """The shape of the model.

    Attributes:
        channels: Of the first stage; each of the two later ones has twice as many.
        blocks_per_stage: Residual blocks of each stage.
    """

    channels: int
    blocks_per_stage: int
    num_classes: int = 10
    image_size: int = 32


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut.

    Source: He et al. 2015 (arXiv:1512.03385), figure 2.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        stride = 1 if num_in == num_out else 2
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.shortcut = None if stride == 1 else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(
        self,
        x: Tensor,  # [B, C, S, S]
    ) -> Tensor:  # [B, C or 2 C, S or S / 2, S or S / 2]
        """Run one block.

        Capture: no host sync; running statistics are updated in place.
        """
        inner = F.relu(self.norm1(self.conv1(x)))
        short = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.norm2(self.conv2(inner)) + short)


class ConvNet(nn.Module):
    """A stem, three stages of residual blocks, and a linear layer; returns its loss."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.config = config
        width = config.channels
        self.stem = nn.Conv2d(NUM_COLOURS, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        for stage in range(NUM_STAGES):
            for index in range(config.blocks_per_stage):
                after = 2 * width if stage > 0 and index == 0 else width
                blocks.append(ResidualBlock(width, after))
                width = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, config.num_classes)

    def forward(
        self,
        images: Tensor,  # [B, 3, S, S] float32
        classes: Tensor,  # [B] int64
    ) -> Tensor:  # [] float32, nats per image
        """Classify images.

        Capture: no host sync.
        """
        x = F.relu(self.stem_norm(self.stem(images.to(self.stem.weight.dtype))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(dim=(2, 3)))
        loss: Tensor = F.cross_entropy(logits.float(), classes)
        return loss
