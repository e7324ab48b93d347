import copy

import torch
from torch import nn

from policies.parallel import Replicas


def loss(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return module(rows).square().mean()


def test_the_gradient_is_that_of_the_mean_loss_over_all_batches():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    alone = copy.deepcopy(module)
    batches = [torch.randn(3, 4), torch.randn(5, 4)]
    replicas = Replicas(module, 2)
    for _ in range(2):  # the copies see the parameters as they are after a step
        mean = replicas.accumulate(loss, batches)
        expected = torch.stack([loss(alone, each) for each in batches]).mean()
        expected.backward()
        assert abs(mean - float(expected.detach())) < 1e-6
        for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            for each in (mine, other):
                assert each.grad is not None
                each.data -= 0.1 * each.grad
                each.grad = None


def test_fewer_batches_than_copies_are_enough():
    module = nn.Linear(4, 1)
    replicas = Replicas(module, 2)
    replicas.accumulate(loss, [torch.ones(2, 4)])
    assert module.weight.grad is not None
