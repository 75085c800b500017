"""The reader of sources that writes the table of transformers' attention classes: its findings and its refusals."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers

from mmgate.hosts.interface import hash_of
from mmgate.hosts.interface_classes import CLASSES, WRITTEN_WITH

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / 'tools/dev')
    from interface_table import Source, UnreadError, form_of, read, sources

CHILDREN = {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'pos_proj', 'qkv', 'norm', 'reduce', 'o_norm'}
LINEAR = {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'pos_proj', 'qkv'}
HEAD = """
def forward(self, hidden_states, attention_mask=None, position_embeddings=None, key_value_states=None, bias=None):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
"""
PROJECTED = """
    q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
"""
OTHER_QUERY = PROJECTED.replace('q_proj(hidden_states)', 'q_proj(bias)')
ATTENDED = """
    rate = 0.0 if not self.training else self.attention_dropout
    heads, weights = attend(self, q, k, v, attention_mask, dropout=rate, scaling=self.scaling)
    return self.o_proj(heads.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights
"""


def source(*parts: str) -> Source:
    (function,) = ast.parse(HEAD + '\n'.join(textwrap.indent(textwrap.dedent(part), '    ') for part in parts)).body
    assert isinstance(function, ast.FunctionDef)
    return Source('modeling_mine.MineAttention', function, CHILDREN, LINEAR)


def test_what_projects_is_found() -> None:
    found = read(source(PROJECTED, ATTENDED))
    assert found.projections == ('q_proj', 'k_proj', 'v_proj')
    assert (found.output, found.dropout) == ('o_proj', 'attention_dropout')
    assert found.arguments == (frozenset({'hidden_states'}),) * 3 and not found.changes and not found.others


@pytest.mark.parametrize('form, parts', [
    ('self', (PROJECTED, ATTENDED)),
    ('self', ('q, k, v = self.qkv(hidden_states).unflatten(-1, (3, -1, self.head_dim)).unbind(2)', ATTENDED)),
    ('rotated_self', (PROJECTED, 'q, k = apply_rotary_pos_emb(q, k, *position_embeddings)', ATTENDED)),
    ('rotated_self', (PROJECTED, 'q = self.norm(q)', ATTENDED)),
    ('rotated_self', (PROJECTED, 'q = q * self.scaling', ATTENDED)),
    ('positioned_self', (
        'v = self.v_proj(hidden_states)',
        'if position_embeddings is not None:\n    hidden_states = hidden_states + position_embeddings',
        'q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)',
        ATTENDED,
    )),
    ('key_value', (
        'memory = hidden_states if key_value_states is None else key_value_states',
        'q, k, v = self.q_proj(hidden_states), self.k_proj(memory), self.v_proj(memory)',
        ATTENDED,
    )),
])  # fmt: skip
def test_the_form_of_a_class_is_found(form: str, parts: tuple[str, ...]) -> None:
    assert form_of(source(*parts)) == form


@pytest.mark.parametrize('words, parts', [
    ('calls an attention function 0 times', (PROJECTED, 'return self.o_proj(v)')),
    ('hands position_bias to its', (PROJECTED, 'return attend(self, q, k, v, None, position_bias=bias)[0]')),
    ('makes its query from pos_proj and q_proj together', (PROJECTED, 'q = q + self.pos_proj(bias)', ATTENDED)),
    ('makes its query without a projection', (PROJECTED, 'q = hidden_states', ATTENDED)),
    ('makes a mask from what it projects', (PROJECTED, 'attention_mask = q @ k', ATTENDED)),
    ('projects its heads by o_proj and pos_proj', (
        PROJECTED, 'heads = attend(self, q, k, v, None)[0]', 'return self.o_proj(heads) + self.pos_proj(heads)',
    )),
    ('has a cache', (PROJECTED, 'k, v = cache.update(k, v)', ATTENDED)),
    ('has reduce, which no form has', ('hidden_states = self.reduce(hidden_states)', PROJECTED, ATTENDED)),
    ('has pad, which no form has', ('hidden_states = F.pad(hidden_states, (0, 0, 0, 1))', PROJECTED, ATTENDED)),
    ('has o_norm, which no form has', (
        PROJECTED, 'heads = attend(self, q, k, v, None)[0]', 'return self.o_norm(self.o_proj(heads)), None',
    )),
    ('projects bias; hidden_states; hidden_states, which no form does', (OTHER_QUERY, ATTENDED)),
])  # fmt: skip
def test_another_class_has_no_form(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UnreadError, match=words):
        form_of(source(*parts))


def test_the_table_is_what_the_tool_writes() -> None:
    """For the release that it was written with; in another one a class may have another source, or be gone."""
    if transformers.__version__ != WRITTEN_WITH:
        pytest.skip(f'the table was written with transformers {WRITTEN_WITH}')
    found = {}
    for one in sources(Path(transformers.__file__).parent):
        try:
            found[one.name] = (form_of(one), hash_of(one.forward))
        except UnreadError:
            continue
    assert found == CLASSES
