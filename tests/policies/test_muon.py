import torch
from torch import nn

from policies.muon import Muon, orthogonalized


def test_singular_values_are_moved_near_one():
    torch.manual_seed(0)
    for shape in ((2, 32, 32), (3, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.4 and values.max() < 1.3


def test_a_step_is_that_of_torchs_muon():
    """Torch's runs in bfloat16, so the steps differ by its precision."""
    torch.manual_seed(1)
    start = [torch.randn(8, 24), torch.randn(24, 8), torch.randn(8, 24)]
    own, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    optimizers = [
        Muon(own, lr=0.1, weight_decay=0.01),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01, momentum=0.95),
    ]
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in start]
        for parameters, optimizer in zip((own, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for mine, other, begin in zip(own, theirs, start, strict=True):
        assert (mine - other).norm() < 0.05 * (mine - begin).norm()
