"""A trial of a forward that goes through an attention interface like transformers', without transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.hosts import gates_for
from mmgate.hosts.interface import TRIAL, attend_in_trial, goes_through_interface, try_on_meta

ALL_ATTENTION_FUNCTIONS: dict[str, Any] = {TRIAL: attend_in_trial}


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
        self.norm, self.normed, self.rate = nn.LayerNorm(4), nn.LayerNorm(8), 0.1
        self.config = SimpleNamespace(_attn_implementation='sdpa')

    def split_into_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Plain(Base):
    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, 4)
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        memory = x
        if context is not None:
            memory = self.normed(context)
        k, v = self.split_into_heads(self.k(memory)), self.split_into_heads(self.v(memory))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, mask, dropout=0.0 if not self.training else self.rate, scaling=0.5)
        return self.out(out.reshape(*x.shape[:-1], -1))


class Joint(Base):
    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        query, key = rotated(query, key, angles[:, None, :, :4])
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, query=query, key=key, value=value, attention_mask=None)[0].flatten(2))


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(attend(self, q, k, v, None)[0] - attend(self, q, k, v, None)[0])


class Handed(Base):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, self.q(x), self.k(x), self.v(x), None, position_bias=bias)[0])


class Summed(Base):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, self.q(x) + self.pos(position), self.k(x), self.v(x), None)[0])


class Bare(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, x, self.k(x), self.v(x), None)[0])


class Shared(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, self.q(x), self.k(x), self.k(x), None)[0])


class Unprojected(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, self.q(x), self.k(x), self.v(x), None)[0]


class ProjectedTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out = attend(self, self.q(x), half_of(self.k(x)), self.v(x), None)[0]
        return self.out(out) + self.pos(out)


class Rotary(Base):
    def forward(self, x: Tensor, position_embeddings: Any = None) -> Tensor:
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        if position_embeddings is not None:
            cosines, sines = position_embeddings
            q, k = q * cosines + q.flip(-1) * sines, k * cosines + k.flip(-1) * sines
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, q, k, v, None)[0].flatten(2))

    head_dim = 4


class Scaled(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        return self.out(attend(self, (q * 0.5)[None].squeeze(0), k / 2, v, None)[0].flatten(2))


class SummedAtTimes(Base):
    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        if position is not None:
            q = q + self.split_into_heads(self.pos(position))
        return self.out(attend(self, q, k, v, None)[0].flatten(2))


class SummedByFlag(Base):
    def forward(self, x: Tensor, first: bool = False) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        q = q + self.split_into_heads(self.pos(x)) if first else q
        return self.out(attend(self, q, k, v, None)[0].flatten(2))


class Pooled(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        return self.out(attend(self, q[:, :, ::2], k, v, None)[0].flatten(2))


class Grouped(Base):
    def forward(self, x: Tensor) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if self.training:
            x = torch.cat(x.split(x.shape[1] // 3, 1))  # which fails for other tokens than a multiple of 3
        q, k, v = (self.split_into_heads(project(x)) for project in (self.q, self.k, self.v))
        rate = self.rate if self.training else 0.0
        return self.out(attend(self, q, k, v, None, dropout=rate)[0].flatten(2))


class Failing(Base):
    def forward(self, x: Tensor) -> Any:
        raise RuntimeError('for no tokens')


class Never(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def test_what_projects_is_found() -> None:
    """Through norms, methods that split heads, and branches, and with the rate of dropout in training."""
    found = try_on_meta(Plain().eval())
    assert (found.projections, found.output, found.changes) == (('q', 'k', 'v'), 'out', False)
    assert (found.heads, found.head_dim, found.dropout) == (2, 4, 0.1)
    assert try_on_meta(Grouped()).dropout == 0.1


def test_modules_of_one_class_may_differ_in_their_rates() -> None:
    module = Plain()
    assert try_on_meta(module).dropout == 0.1
    module.rate = 0.2
    assert try_on_meta(module).dropout == 0.2


def test_changes_between_projection_and_attention_are_found() -> None:
    """With cosines and sines that may be left out, too; one factor for all numbers is none."""
    assert try_on_meta(Joint()).projections == ('qkv', 'qkv', 'qkv')
    assert try_on_meta(Joint()).changes and try_on_meta(Rotary()).changes and not try_on_meta(Scaled()).changes


def test_a_trial_changes_nothing() -> None:
    """Neither the module nor the random numbers, also in inference mode."""
    module = Plain().eval()
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        try_on_meta(module)
    assert before == {name: dict(vars(part)) for name, part in module.named_modules()}
    assert module.config._attn_implementation == 'sdpa' and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize('kind, reason', [
    (Twice, 'calls its attention function 2 times'),
    (Never, 'has not called its attention function'),
    (Handed, 'hands position_bias to its attention function'),
    (Summed, 'makes its query from pos and q together'),
    (SummedAtTimes, 'makes its query from pos and q together'),
    (SummedByFlag, 'makes its query from pos and q together'),
    (Bare, 'makes its query without a projection'),
    (Shared, 'projects query, key and value by q and k and k'),
    (Unprojected, 'does not project its heads'),
    (ProjectedTwice, 'projects its heads by out and pos'),
    (Pooled, r'attends between other tokens than it projects: 2 x 128 heads, but 512 tokens projected by q\. .*'),
    (Failing, r'does not run in a trial \(RuntimeError: for no tokens\)'),
])  # fmt: skip
def test_what_does_not_fit_says_what_was_found(kind: type[Base], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf'^A {kind.__name__} {reason}\.$'):
        try_on_meta(kind())


def test_a_class_without_a_source_is_tried_as_well() -> None:
    space: dict[str, Any] = dict(Base=Base, ALL_ATTENTION_FUNCTIONS=ALL_ATTENTION_FUNCTIONS)
    exec('class Made(Base):\n    def forward(self, x):\n        return ALL_ATTENTION_FUNCTIONS', space)
    assert goes_through_interface(space['Made'])
    with pytest.raises(ConfigError, match='A Made has not called its attention function'):
        try_on_meta(space['Made']())


def test_an_attention_without_a_config_is_refused() -> None:
    module = Plain()
    del module.config
    with pytest.raises(ConfigError, match='A Plain has no config that names its attention function'):
        try_on_meta(module)


def test_other_classes_are_not_concerned() -> None:
    """A scripted module, whose class has no forward, among them."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert not any(goes_through_interface(kind) for kind in (nn.Linear, nn.ModuleDict, type(scripted)))
    assert gates_for(scripted) == []
