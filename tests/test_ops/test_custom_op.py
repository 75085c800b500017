"""How operators meet torch: the same numbers in eager mode, as a registered operator and below its torch version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TORCH, one_graph
from torch import Tensor

from mmgate.errors import UnsupportedCall
from mmgate.ops import custom_op, ms_deform_attn


def _fake(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _scaled_sum(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """Annotations are strings here, and hold what a schema needs: an optional, a number, two results."""
    total = x.clone() if y is None else x + y
    return total * factor, x.sign()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.factor, ctx.second = inputs[2], inputs[1] is not None
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return grad * ctx.factor, grad * ctx.factor if ctx.second else None, None


@pytest.fixture(scope='module')
def scaled_sum() -> custom_op.Operator:
    operator = custom_op.operator('test_scaled_sum', _fake)(_scaled_sum)
    operator.differentiate(_backward, _setup_context)
    return operator


@pytest.mark.parametrize('second', [True, False], ids=['two_tensors', 'one_tensor'])
def test_eager_gradients(scaled_sum: custom_op.Operator, second: bool) -> None:
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in ((x, y) if second else (x,))]
    assert torch.autograd.gradcheck(lambda *t: scaled_sum(t[0], t[1] if second else None, 2.5)[0], inputs)
    with torch.no_grad():
        assert not scaled_sum(x, None, 1.0)[0].requires_grad


@pytest.mark.parametrize('second', [True, False], ids=['two_tensors', 'one_tensor'])
def test_a_second_derivative_is_refused(scaled_sum: custom_op.Operator, second: bool) -> None:
    """In place of one that lacks the part of the saved inputs; a graph that nobody follows does no harm."""
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=True) if second else None
    (first,) = torch.autograd.grad(scaled_sum(x.sin(), y, 2.5)[0].square().sum(), x, create_graph=True)
    plain = 2.5 * (x.sin() + y if second else x.sin())
    torch.testing.assert_close(first, torch.autograd.grad(plain.square().sum(), x)[0])
    with pytest.raises(UnsupportedCall, match='first derivatives alone.*backend="torch"'):
        first.square().sum().backward()


def test_gradients_with_a_graph_may_be_changed_in_place(scaled_sum: custom_op.Operator) -> None:
    """As a hook does that clips them."""
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda grad: grad.clamp_(-1, 1))
    scaled_sum(x, None, 2.5)[0].sum().backward(create_graph=True)
    torch.testing.assert_close(x.grad.detach(), torch.ones(3, 4))


def test_transforms_of_torch_func_are_refused(scaled_sum: custom_op.Operator) -> None:
    with pytest.raises(UnsupportedCall, match='does not run under transforms of torch.func'):
        torch.func.grad(lambda y: scaled_sum(y, None, 2.0)[0].sum())(torch.randn(3))


@pytest.mark.skipif(TORCH < (2, 11), reason='torch 2.1 to 2.7, at least, read no sizes of levels under torch.func')
def test_transforms_of_torch_func_get_another_backend() -> None:
    value, locations, logits = torch.randn(1, 4, 1, 8), torch.rand(1, 2, 1, 1, 2, 2), torch.randn(1, 2, 1, 1, 2)
    shapes, starts = torch.tensor([(2, 2)]), torch.tensor([0])

    def by(backend: str) -> Tensor:
        def total(y: Tensor) -> Tensor:
            return ms_deform_attn(y, shapes, starts, locations, logits, backend=backend).sum()

        return torch.func.grad(total)(value)

    torch.testing.assert_close(by('auto'), by('torch'))


@one_graph
def test_registered_where_something_traces(scaled_sum: custom_op.Operator) -> None:
    registered = torch.ops.mmgate.test_scaled_sum.default
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    torch.library.opcheck(registered, (x, y, 2.0))
    seen = []

    def spy(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: scaled_sum(x, y, 2.0)[0], fullgraph=True, backend=spy)
    torch.testing.assert_close(compiled(x), scaled_sum(x, y, 2.0)[0])
    assert any('test_scaled_sum' in str(target) for target in seen)


def test_without_registration_torch_compile_still_gives_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, 'CAN_REGISTER', False)
    operator = custom_op.Operator('test_unregistered', _scaled_sum, _fake)
    operator.differentiate(_backward, _setup_context)
    outside = custom_op.outside_graphs(lambda x: operator(x, None, 3.0)[0])
    x = torch.randn(5, requires_grad=True)
    output = torch.compile(lambda x: outside(x) + 1, backend='eager')(x)
    output.sum().backward()
    torch.testing.assert_close(output, 3 * x + 1)
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))
