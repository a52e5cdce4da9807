"""What of a ResNet is hot: a meter follows a short training, its commits carry the heat, and a table says it.

python docs/examples/heat_resnet.py runs/resnet --steps 60
tierload heat runs/resnet --sort heat
tierload heat runs/resnet --history
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import tierload
from tierload.heat import HeatMeter

CLASSES = 4
SHOWN = "conv1 layer1.0.conv1 layer2.3.conv2 layer3.5.conv2 layer4.2.conv2 fc.weight".split()


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images of half the size or the same out."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.downsample(x))


class ResNet34(nn.Module):
    """The 34 layers of ResNet-34, as narrow as is wanted, for small images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for number, blocks in enumerate((3, 4, 6, 3), 1):
            outputs = width << (number - 1)
            first = Block(inputs, outputs, stride=1 if number == 1 else 2)
            others = [Block(outputs, outputs, stride=1) for _ in range(blocks - 1)]
            self.add_module(f"layer{number}", nn.Sequential(first, *others))
            inputs = outputs
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of images."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in noise; how steep they are is the class."""
    labels = torch.randint(0, CLASSES, (count,))
    lines = torch.linspace(0, 6, 16)
    stripes = torch.sin(lines[:, None] * labels[:, None, None] + lines + torch.rand(count, 1, 1))
    return stripes[:, None] + 0.5 * torch.randn(count, 3, 16, 16), labels


def main() -> None:
    """Trains, saves every tenth step, and prints what the last commit says."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("store")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--width", type=int, default=8)
    options.add_argument("--audit", action="store_true", help="measure every radius at the end: minutes")
    given = options.parse_args()

    torch.manual_seed(0)
    model = ResNet34(given.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fixed, labels = images(8)  # an eighth of a batch, for radii
    meter = HeatMeter(model, optimizer, closure=lambda: F.cross_entropy(model(fixed), labels))
    for step in range(1, given.steps + 1):
        batch, targets = images(64)
        loss = F.cross_entropy(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = step == given.steps
        if last and given.audit:
            meter.audit()
        if last or step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
            tierload.save({"model": model, "optimizer": optimizer}, given.store, step=step, heat=meter)

    with tierload.open(given.store) as store:
        table = store.heat()
    assert table is not None
    print(f"\n{'layer':<16}{'mean gradient activity':>24}{'mean spectral radius':>24}{'locality':>12}")
    for number, key in enumerate(table.keys):
        name = key.removeprefix("model/")
        for shown in SHOWN:
            if name in (shown, f"{shown}.weight"):
                columns = f"{table.gradient[number]:>24.4g}{table.radius[number]:>24.4g}{table.locality[number]:>12.3f}"
                print(f"{shown:<16}{columns}")


if __name__ == "__main__":
    main()
