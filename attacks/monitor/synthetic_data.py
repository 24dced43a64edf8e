"""Makes up data whose gradient leads from one fabricated state to the next (Zhang et al., 2022)."""

import math

import torch
from scene import Scene, caught, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.fleet.provenance.verification import RATIO_LIMIT
from tallystick.testing.attacks import must

RATE, ITERATIONS = 0.5, 1500


def attack(scene: Scene) -> str:
    del scene
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 16)).double()
    parameters = list(model.parameters())
    wanted = [1e-3 * torch.randn_like(p) for p in parameters]  # the fabricated update
    data = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(
        64, 16, dtype=torch.float64, requires_grad=True
    )  # soft ones: more freedom than a real job gives
    search = torch.optim.Adam([data, labels], lr=0.05)
    size = math.sqrt(sum(float((w * w).sum()) for w in wanted))

    def distance() -> Tensor:
        loss = cross_entropy(model(data), labels.softmax(dim=1))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        off = (((w + RATE * g) ** 2).sum() for w, g in zip(wanted, gradients, strict=True))
        return sum(off, start=torch.zeros((), dtype=torch.float64))

    found: list[float] = []
    for _ in range(ITERATIONS):
        search.zero_grad()
        value = distance()
        value.backward()
        search.step()
        found.append(float(value.detach().sqrt()) / size)
    best = min(found)
    before = [p.detach().clone() for p in parameters]
    reached = torch.autograd.grad(cross_entropy(model(data), labels.softmax(dim=1)), parameters)
    bits = sum(
        int((p - RATE * g).float().ne((p + w).float()).sum())
        for p, g, w in zip(before, reached, wanted, strict=True)
    )
    count = sum(p.numel() for p in parameters)
    must(best < found[0] / 3, f"the search does not come nearer: {found[0]:.3g} to {best:.3g}")
    must(bits > 0, "the made-up data reach the state to the last bit")
    return caught(
        f"exactness and the pre-commitment. {ITERATIONS} steps of search over 64 made-up records for one step of {count} weights "
        f"bring the ratio from {found[0]:.2f} to {best:.3f} (limit {RATIO_LIMIT}); {bits} of {count} weights still differ in "
        "their bits. Limit: without logs and without data committed before step 0, such data may pass the ratio test"
    )


if __name__ == "__main__":
    main(attack, __doc__)
