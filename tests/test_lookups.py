"""Lookups that share one gradient of their table: autograd's own numbers, and nothing left behind."""

import pytest
import torch
from torch import nn
from toys import make_drafter, make_head, make_target

from xpress.lookups import gathered

V, R = 23, 5


def scored(table: nn.Embedding) -> torch.Tensor:
    """Three lookups, the second of ids that hang on the first's rows, one without a gradient to give."""
    torch.manual_seed(0)
    first = table(torch.randint(V, (2, 4)))
    second = table(first.detach().sum(-1).abs().long() % V)
    table(torch.tensor([0]))
    return (first * torch.randn_like(first)).sum() + (second**3).sum() + table(torch.tensor([3, 3])).mean()


def test_the_gradient_is_autograds_own():
    table = nn.Embedding(V, R).double()
    wanted = torch.autograd.grad(scored(table), table.weight)[0]
    with gathered(table):
        value = scored(table)
    assert "forward" not in vars(table)
    torch.testing.assert_close(value, scored(table), rtol=0, atol=0)
    for _ in range(2):  # a second backward through the same graph, too
        found = torch.autograd.grad(value, table.weight, retain_graph=True)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_beside_other_uses_of_the_weight():
    table = nn.Embedding(V, R).double()

    def value():
        return table(torch.tensor([1, 2, 2])).sum() + (table.weight**2).sum()

    wanted = torch.autograd.grad(value(), table.weight)[0]
    with gathered(table):
        found = torch.autograd.grad(value(), table.weight)[0]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("odd", [{"padding_idx": 1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_tables_that_do_more_are_left_alone(odd):
    table = nn.Embedding(V, R, **odd)
    with gathered(table):
        assert "forward" not in vars(table)


def test_nothing_is_changed_where_nothing_is_trained():
    table = nn.Embedding(V, R)
    with gathered(None), gathered(nn.Linear(2, 2)), torch.no_grad(), gathered(table):
        assert "forward" not in vars(table)
    with gathered(table.requires_grad_(False)):
        assert "forward" not in vars(table)


def test_an_error_inside_leaves_the_table_as_it_was():
    table = nn.Embedding(V, R)
    with pytest.raises(IndexError), gathered(table):
        table(torch.tensor([V]))
    assert "forward" not in vars(table) and table(torch.tensor([1])).shape == (1, R)


def test_no_table_is_filled_more_than_once_however_often_a_head_looks_up():
    """What it is for: autograd's own would make a gradient of the table's size for each lookup."""
    target = make_target()
    head = make_head("refiner", make_drafter(target)).double()
    hidden, made = torch.randn(2, 4, 32).double(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.shape == head.token_embed.weight.shape:
                made.append(str(func))
            return found

    prepared = head.prepare(hidden)
    with gathered(head):
        total = sum(head.latent(prepared, torch.full((2, 4), i)).square().sum() for i in range(5))
    with Watch():
        total.backward()
    assert len([name for name in made if "zeros" in name]) == 1 and not any("embedding" in name for name in made)
