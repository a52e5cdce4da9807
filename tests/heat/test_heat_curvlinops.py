"""Products and radii against curvlinops, an implementation of others: F. Dangel et al., arXiv 2501.19183."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.heat.oracles import Attentive
from tierload.heat.curvature import Curvature
from tierload.heat.isolation import undisturbed
from tierload.heat.lanczos import TOLERANCE
from tierload.heat.products import DoubleBackward, FiniteDifferences

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch, the second opinion, is not installed")


class _Words(nn.Module):
    """Logits in the order that a loss of flat targets wants."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attentive(tied=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.inner(words).flatten(0, 1)


def _mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(12, 5), torch.randint(3, (12,))


def _cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = nn.Conv2d(1, 3, 3, stride=2), nn.GELU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 4)
    return nn.Sequential(*layers), torch.randn(6, 1, 8, 8), torch.randint(4, (6,))


def _attention() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    words = torch.randint(11, (4, 9))
    return _Words(), words[:, :-1], words[:, 1:].flatten()


@pytest.mark.parametrize("of", [_mlp, _cnn, _attention], ids=["MLP", "CNN", "attention"])
def test_products_and_radii_are_those_of_curvlinops(of: Callable) -> None:
    torch.manual_seed(0)
    model, inputs, targets = of()
    model.eval()
    parameters = list(model.parameters())

    def closure() -> torch.Tensor:
        return F.cross_entropy(model(inputs), targets)

    found = Curvature(model, parameters).measure(range(len(parameters)), closure, [1.0] * len(parameters))
    for at, parameter in enumerate(parameters):
        with sdpa_kernel(SDPBackend.MATH):
            block = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), [parameter], [(inputs, targets)])
            whole = block @ torch.eye(parameter.numel())
        vector = F.normalize(torch.randn(parameter.numel()), dim=0)
        with undisturbed(model), sdpa_kernel(SDPBackend.MATH):
            (exact,) = DoubleBackward(closure, model, parameters).products({at: vector})
            (near,) = FiniteDifferences(closure, model, parameters).products({at: vector})
        assert torch.allclose(exact, whole @ vector, rtol=1e-4, atol=1e-6)
        assert torch.linalg.vector_norm(near - exact) <= 1e-2 * exact.norm() + 1e-5
        radius = torch.linalg.eigvalsh((whole + whole.T) / 2).abs().max()
        assert found[at].value == pytest.approx(float(radius), rel=TOLERANCE)
