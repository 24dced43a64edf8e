"""Trains on bytes that its model casts itself, and is evaluated and gone on with outside of steps."""

import torch
from torch import nn

import tallystick


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.float() / 255)


generator = torch.Generator().manual_seed(0)
images = torch.randint(0, 256, (160, 12), generator=generator, dtype=torch.uint8)
labels = torch.randint(0, 3, (160,), generator=generator)
torch.manual_seed(0)
model = Pixels()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
tallystick.attach(model, optimizer)
for step in range(12):
    batch = slice(step * 8, step * 8 + 8)
    model.train()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            print(step, (model(images).argmax(1) == labels).float().mean().item())
