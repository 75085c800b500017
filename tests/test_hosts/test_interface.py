"""What is read in the source of a forward that goes through transformers' attention interface, without transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.hosts import gates_for
from mmgate.hosts.interface import goes_through_interface, read_forward

ALL_ATTENTION_FUNCTIONS: dict[str, Any] = {}


def rotated(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return query * angles, key * angles


def half_of(x: Tensor) -> Tensor:
    return x[..., ::2]


class Base(nn.Module):
    """The children that the classes below call."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.pos = (nn.Linear(8, 8) for _ in range(5))
        self.qkv = nn.Linear(8, 24)
        self.norm, self.reduce, self.rate = nn.LayerNorm(4), nn.Conv1d(8, 8, 2), 0.1

    def split_into_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Plain(Base):
    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, 4)
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        memory = x
        if context is not None:
            memory = self.reduce(context)
        k, v = (self.split_into_heads(project(memory)) for project in (self.k, self.v))
        k, v = self.split_into_heads(self.k(memory)), self.split_into_heads(self.v(memory))
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        out, _ = attend(self, q, k, v, mask, dropout=0.0 if not self.training else self.rate, scaling=0.5)
        return self.out(out.reshape(*x.shape[:-1], -1))


class Joint(Base):
    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        query, key = rotated(query, key, angles)
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        rate = self.rate if self.training else 0.0
        heads = attend(self, query=query, key=key, value=value, attention_mask=None, dropout=rate)[0]
        return self.out(heads.flatten(2))


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(attend(self, q, k, v, None)[0] - attend(self, q, k, v, None)[0])


class Handed(Base):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        return self.out(attend(self, self.q(x), self.k(x), self.v(x), None, position_bias=bias)[0])


class Summed(Base):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        return self.out(attend(self, self.q(x) + self.pos(position), self.k(x), self.v(x), None)[0])


class Bare(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        return self.out(attend(self, x, self.k(x), self.v(x), None)[0])


class Shared(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        return self.out(attend(self, self.q(x), self.k(x), self.k(x), None)[0])


class Unprojected(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        return attend(self, self.q(x), self.k(x), self.v(x), None)[0]


class ProjectedTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        out = attend(self, self.q(x), half_of(self.k(x)), self.v(x), None)[0]
        return self.out(out) + self.pos(out)


def test_what_projects_is_found() -> None:
    """Through norms, methods that split heads, and branches; what is read before a projection is its argument."""
    found = read_forward(Plain())
    assert (found.projections, found.output, found.changes) == (('q', 'k', 'v'), 'out', ())
    assert found.arguments['q'] == {'x'} and found.arguments['k'] == found.arguments['v'] == {'x', 'context'}
    assert found.required == ('x', 'mask') and found.dropout == ('rate',)


def test_functions_between_projection_and_attention_are_found() -> None:
    found = read_forward(Joint())
    assert found.projections == ('qkv', 'qkv', 'qkv') and found.changes == ('rotated',)
    assert found.required == ('x', 'angles') and found.dropout == ('rate',)


@pytest.mark.parametrize('kind, reason', [
    (Twice, 'calls an attention function 2 times'),
    (Handed, 'hands position_bias to its attention function'),
    (Summed, 'makes its query from pos and q together'),
    (Bare, 'makes its query without a projection'),
    (Shared, 'projects query, key and value by q and k and k'),
    (Unprojected, 'does not project its heads'),
    (ProjectedTwice, 'projects its heads by out and pos'),
])  # fmt: skip
def test_what_does_not_fit_says_what_was_found(kind: type[Base], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf'^A {kind.__name__} {reason}\.$'):
        read_forward(kind())


def test_a_source_that_is_not_there_is_a_reason() -> None:
    space: dict[str, Any] = dict(Base=Base, ALL_ATTENTION_FUNCTIONS=ALL_ATTENTION_FUNCTIONS)
    exec('class Made(Base):\n    def forward(self, x):\n        return ALL_ATTENTION_FUNCTIONS', space)
    assert goes_through_interface(space['Made'])
    with pytest.raises(ConfigError, match='A Made has no source to read'):
        read_forward(space['Made']())


def test_other_classes_are_not_concerned() -> None:
    """A scripted module, whose class has no forward, among them."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert not any(goes_through_interface(kind) for kind in (nn.Linear, nn.ModuleDict, type(scripted)))
    assert gates_for(scripted) == []
