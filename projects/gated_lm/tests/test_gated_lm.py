"""The attention against its formula and against transformers, the converter, and the study on a toy text."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from projects.gated_lm import study
from projects.gated_lm.convert import convert
from projects.gated_lm.model import VARIANTS, CausalAttention, Decoder

TOKENS, WIDTH, HEADS, KV_HEADS, SIZE = 9, 32, 4, 2, 8
GROUP = HEADS // KV_HEADS


def noise(module: nn.Module, seed: int = 7) -> Any:
    """Return ``module`` in float64, every parameter drawn from a normal distribution."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.double) * 0.3)
    return module


def tokens(width: int = WIDTH) -> Tensor:
    return torch.randn(2, TOKENS, width, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``(B, N, H, d)`` for ``(B, N, H|Hk, d)``, one head after the other, rotated as complex numbers."""
    count, size = q.shape[1], q.shape[-1]
    turns = torch.outer(torch.arange(count).double(), 1 / 1e4 ** (torch.arange(0, size, 2) / size))

    def rotated(x: Tensor) -> Tensor:
        z = torch.complex(*(half.contiguous() for half in x.chunk(2, -1))) * torch.exp(1j * turns)[:, None]
        return torch.cat((z.real, z.imag), -1)

    q, k, heads = rotated(q), rotated(k), []
    for head in range(q.shape[2]):
        of_key = head // (q.shape[2] // k.shape[2])
        logits = q[:, :, head] @ k[:, :, of_key].transpose(1, 2) / size**0.5
        logits = logits.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        heads.append(logits.softmax(-1) @ v[:, :, of_key])
    return torch.stack(heads, 2)


@pytest.mark.parametrize('variant', list(VARIANTS))
def test_every_row_is_its_formula(variant: str) -> None:
    options = VARIANTS[variant]
    module, x = noise(CausalAttention(WIDTH, HEADS, KV_HEADS, SIZE, options)), tokens()
    place, gated = None, lambda t: t
    if options is not None:
        place, act = options.get('position', 'G1'), options.get('act', 'sigmoid')
        gates = {'G2': KV_HEADS, 'G3': KV_HEADS}.get(place, HEADS)
        gates = 1 if options.get('head_shared') == 'projection' else gates
        raw = F.linear(x, module.gate.gate_weight, module.gate.gate_bias).unflatten(-1, (gates, -1))
        assert raw.shape[-1] == (1 if options.get('granularity') == 'headwise' else SIZE)
        score = {'sigmoid': torch.sigmoid, 'silu': F.silu, 'ns_sigmoid': lambda t: (1 + t.sigmoid()) / 2}[act](raw)
        if options.get('head_shared') == 'average':
            score = sum(score.unbind(2))[:, :, None] / HEADS
        gated = (lambda t: t + score) if options.get('form') == 'additive' else (lambda t: t * score)

    def at(position: str, t: Tensor) -> Tensor:
        return gated(t) if place == position else t

    q, k, v = (p(x).unflatten(-1, (-1, SIZE)) for p in (module.q_proj, module.k_proj, module.v_proj))
    heads = at('G1', attend(at('G4', q), at('G3', k), at('G2', v)))
    out = at('G5', module.o_proj(heads.flatten(2)).unflatten(-1, (HEADS, SIZE))).flatten(2)
    torch.testing.assert_close(module(x)[0], out, rtol=0, atol=1e-12)


@pytest.mark.parametrize('variant', ['none', 'g1-elementwise'])
def test_attention_read_is_attention_used(variant: str) -> None:
    module, x = noise(CausalAttention(WIDTH, HEADS, KV_HEADS, SIZE, VARIANTS[variant])), tokens()
    out, (weights, score) = module(x, look=True)
    assert torch.equal(out, module(x)[0])
    assert (score is None) == (variant == 'none')
    v = module.v_proj(x).unflatten(-1, (KV_HEADS, SIZE)).transpose(1, 2).repeat_interleave(GROUP, 1)
    heads = weights @ v * (1 if score is None else score)
    torch.testing.assert_close(module.o_proj(heads.transpose(1, 2).flatten(2)), out)


def test_rows_share_their_start_and_the_control_its_size() -> None:
    models = {}
    for variant in VARIANTS:
        torch.manual_seed(3)
        models[variant] = Decoder(variant)
    plain = models['none'].state_dict()
    for variant, model in models.items():
        state = model.state_dict()
        same = [name for name in plain if variant != 'wide-ffn' or name.startswith('attention')]
        assert all(torch.equal(plain[name], state[name]) for name in same), variant
    gates = [layer.gate.gate_weight for layer in models['g1-elementwise'].attention]
    assert not torch.equal(gates[0], gates[1])
    size = {variant: sum(p.numel() for p in model.parameters()) for variant, model in models.items()}
    assert size['g1-head-shared'] == size['g1-elementwise']  # as the paper's table prints
    assert abs(size['wide-ffn'] / size['g1-elementwise'] - 1) < 2.5e-3 < size['wide-ffn'] / size['none'] - 1


@pytest.fixture
def qwen3_next(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return transformers' module in which nothing falls back to float32: float() gives float64."""
    pytest.importorskip('transformers', reason='needs transformers: pip install transformers')
    pytest.importorskip('transformers.models.qwen3_next', reason='this transformers has no Qwen3-Next')
    from transformers.models.qwen3_next import modeling_qwen3_next

    monkeypatch.setattr(Tensor, 'float', Tensor.double)
    return modeling_qwen3_next


@pytest.mark.parametrize(
    ('heads', 'kv_heads', 'size', 'rotated', 'bias'),
    [(4, 2, 8, 0.25, False), (6, 2, 16, 0.5, True), (4, 4, 8, 1.0, False)],
)
def test_whole_attention_is_that_of_transformers(
    qwen3_next: Any, heads: int, kv_heads: int, size: int, rotated: float, bias: bool
) -> None:
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        attention_bias=bias,
        rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=rotated),
    )
    config._attn_implementation = 'sdpa'
    theirs = noise(qwen3_next.Qwen3NextAttention(config, 0))
    x = tokens()
    positions = qwen3_next.Qwen3NextRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    expected, _ = theirs(x, positions, None)
    ours = convert(config.to_dict(), theirs.state_dict())
    assert expected.abs().mean() > 0.1
    assert (ours(x)[0] - expected).abs().max() < 1e-14 * max(1, expected.abs().max())


@pytest.mark.parametrize(
    ('layout', 'heads', 'kv_heads', 'bias'),
    [('elementwise', 6, 2, False), ('elementwise', 4, 4, True), ('headwise', 4, 2, True), ('headwise', 4, 1, False)],
)
def test_release_layouts(layout: str, heads: int, kv_heads: int, bias: bool) -> None:
    """The release's computation: the joint projection's channels are parted by key head, then in queries and gates."""
    group, gate_size = heads // kv_heads, SIZE if layout == 'elementwise' else 1
    joint = noise(nn.Linear(WIDTH, heads * (SIZE + gate_size), bias=bias), 1)
    key, value = (noise(nn.Linear(WIDTH, kv_heads * SIZE, bias=bias), seed) for seed in (2, 3))
    output, x = noise(nn.Linear(heads * SIZE, WIDTH, bias=bias), 4), tokens()
    q, gate = joint(x).unflatten(-1, (kv_heads, -1)).split((group * SIZE, group * gate_size), -1)
    k, v = (p(x).unflatten(-1, (kv_heads, SIZE)) for p in (key, value))
    q, gate = q.reshape(2, TOKENS, heads, SIZE), gate.reshape(2, TOKENS, heads, gate_size)
    expected = output((attend(q, k, v) * gate.sigmoid()).flatten(2))
    state = {}
    for name, projection in dict(q_proj=joint, k_proj=key, v_proj=value, o_proj=output).items():
        state |= {f'{name}.{kind}': tensor for kind, tensor in projection.state_dict().items()}
    config = dict(hidden_size=WIDTH, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=SIZE)
    config |= {f'{layout}_attn_output_gate': True, 'rope_theta': 1e4, 'rms_norm_eps': 1e-6}
    torch.testing.assert_close(convert(config, state)(x)[0], expected, rtol=0, atol=1e-12)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(study, 'BATCH', 2)
    monkeypatch.setattr(study, 'TESTS', 2)
    path = tmp_path / 'text.txt'
    path.write_text('\n\n'.join(f'line {i}: the cat sat on the mat and the dog on the log' for i in range(200)))
    return path


def test_study_runs_resumes_and_reports(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--out`` in work_dirs of the current folder; a report without it reads the project's table."""
    monkeypatch.chdir(tmp_path)
    out = Path('work_dirs/gated_lm.csv')

    def run(seeds: str) -> None:
        study.main(['run', *f'--variants none g1-headwise --steps 3 --seeds {seeds}'.split(), '--text', str(text)])

    run('0')
    first = out.read_text()
    run('0 1')
    whole = out.read_text()
    assert whole.startswith(first) and not capsys.readouterr().out
    run('1')
    assert out.read_text() == whole and 'Give another --out' in capsys.readouterr().out
    rows = study.read(out)
    assert [(row['variant'], row['seed']) for row in rows] == [
        (variant, seed) for seed in '01' for variant in ('none', 'g1-headwise')
    ]
    assert float(rows[0]['loss']) < 6 and len(rows[0]['first_by_layer'].split()) == 4
    assert 0.4 < float(rows[1]['gate']) < 0.6
    table = study.report(rows).splitlines()
    assert len(table) == 4 and '| 0 1 |' in table[2] and table[2].split(' | ')[10] == '-'
    study.main(['report'])
    assert '| none | 0.003 | 1600 | 0.25 | 165760 | 0 1 2 3 4 |' in capsys.readouterr().out


def test_figure_is_drawn_of_what_the_table_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip('matplotlib.pyplot', reason='needs matplotlib: pip install matplotlib')
    figures = importlib.import_module('projects.gated_lm.figures')
    monkeypatch.chdir(tmp_path)
    keys = dict(variant='none', rate=str(study.RATE), steps=str(study.STEPS), rotated='0.25')
    row = keys | dict(first_by_layer='0.1 0.2', peak_by_layer='3 4', curve='5.5 4.5 3.5')
    lines = [row, row | dict(first_by_layer='0.3 0.4'), row | dict(rate='1.0', first_by_layer='9 9')]
    Path('table.csv').write_text('\n'.join([','.join(row), *(','.join(line.values()) for line in lines)]))
    for given in ([], ['table.csv']):  # the project's table first
        figures.main(given)
        assert Path('work_dirs/gated_lm.png').stat().st_size > 5000
    first, _, curve = pyplot.gcf().axes
    assert first.lines[0].get_ydata() == pytest.approx([0.2, 0.3])
    assert curve.lines[0].get_xdata()[0] == pytest.approx(study.POINT * study.BATCH * study.WINDOW / 1000)
    pyplot.close('all')


def test_uniform_attention_measures_as_such() -> None:
    """Queries of zero attend to all they see alike; the mean over queries 16 to 95 of 1 / (q + 1) is 0.0222."""
    model = Decoder('none')
    for layer in model.attention:
        nn.init.zeros_(layer.q_proj.weight)
    measured = study.measure(model, torch.arange(20000) % 256)
    uniform = sum(1 / (q + 1) for q in range(16, study.WINDOW)) / (study.WINDOW - 16)
    assert measured['first'] == pytest.approx(uniform, rel=1e-4)


def test_loss_at_twice_the_length_is_of_what_lies_beyond() -> None:
    """Of a model that knows the next byte within the trained length, and nothing beyond it."""

    def early(tokens: Tensor, look: bool = False) -> Any:
        logits = 50.0 * F.one_hot((tokens + 1) % 256, 257)
        logits[:, study.WINDOW :] = 0
        return logits, [((torch.zeros(1, 1, study.WINDOW, study.WINDOW), None), logits)]

    measured = study.measure(early, torch.arange(20000) % 256)
    assert measured['loss_at_twice'] == pytest.approx(math.log(257))
    assert measured['loss'] < measured['loss_at_twice']


def test_a_spike_is_a_loss_far_above_those_before_it() -> None:
    losses = [1.0] * 140
    losses[50] = 9.0  # while the rate still rises
    losses[110:113] = [1.4] * 3
    assert study.spikes(losses) == 0
    losses[100], losses[120] = 1.55, 1.65  # 0.5 above the mean of the 20 losses before, which is 1.0875
    assert study.spikes(losses) == 2
    losses[120] = 1.55
    assert study.spikes(losses) == 1


def test_docstrings_are_texts_of_this_python() -> None:
    texts = list(study.docstrings())
    assert len(texts) > 3000 and len(set(texts)) == len(texts)
    assert any('Return the absolute value' in text or 'regular expression' in text for text in texts)
