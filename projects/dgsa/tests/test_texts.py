"""The paper's parameter counts, the task made from docstrings, training, and DiffLlama as a second witness."""

import csv
import gzip
import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip('scipy', reason='the report takes Student intervals from scipy, which is not installed')

from mmgate import record, swap_attention
from projects.dgsa import data, figures, study
from projects.dgsa.model import ATTENTIONS, TABLE_2, TextClassifier, compared, count_parameters
from projects.dgsa.side_by_side import train_side_by_side

EXPANSIONS = (2, 4, 16 / 3)
TABLE6 = {  # millions, by expansion; layers and classes
    'rotten_tomatoes': ((3.8, 4.6, 5.1), 2),
    'imdb': ((25.7, 26.9, 27.7), 2),
    'ag_news': ((13.2, 14.4, 15.2), 4),
    '20_newsgroups': ((12.0, 12.8, 13.4), 20),
}
SMALL = dict(dim=16, layers=2, heads=2, length=12, dropout=0.0)
BRIEF = dict(SMALL, epochs=1, batch=8, lr=1e-3, warmup=2, bfloat16=False)
FEW = [(f'{name} {"word " * number}{name}', label) for label, name in enumerate('abc') for number in range(12)]


def implied_vocabulary(name, layers, rounding=0.05e6):
    """Return the fewest and most words with which all three of a data set's counts come out."""
    printed, classes = TABLE6[name]
    fewest, most = 0, math.inf
    for millions, expansion in zip(printed, EXPANSIONS, strict=True):
        without = count_parameters(1, classes, layers=layers, expansion=expansion) - 256
        fewest = max(fewest, math.ceil((millions * 1e6 - rounding - without) / 256))
        most = min(most, math.floor((millions * 1e6 + rounding - without) / 256))
    return fewest, most


@pytest.mark.parametrize(
    ('name', 'words'), [('rotten_tomatoes', 7_700), ('imdb', 89_700), ('ag_news', 40_850), ('20_newsgroups', 39_780)]
)
def test_table_6_has_a_vocabulary(name, words):
    fewest, most = implied_vocabulary(name, study.SETTINGS[name]['layers'])
    assert fewest <= words <= most
    assert most - fewest < 300


def test_20_newsgroups_has_4_layers():
    fewest, most = implied_vocabulary('20_newsgroups', 6)
    assert most < fewest  # no vocabulary gives the three counts with Table 4's 6 layers


@pytest.mark.parametrize('name', TABLE6)
def test_a_network_twice_as_wide_does_not_fit(name):
    printed, classes = TABLE6[name]
    steps = [
        count_parameters(9, classes, layers=study.SETTINGS[name]['layers'], expansion=e) for e in (4, 8)
    ]  # Linear(C, 2 e C), SwiGLU, Linear(e C, C) for e = 2 and 4
    assert abs(steps[1] - steps[0] - 1e6 * (printed[1] - printed[0])) > 0.1e6


@pytest.mark.parametrize('attention, pooling', [*product(TABLE_2, ['mean']), ('m_dgsa', 'class')])
def test_padding_changes_nothing(attention, pooling):
    torch.manual_seed(0)
    model = TextClassifier(30, 3, attention=attention, pooling=pooling, **SMALL).eval()
    short = torch.randint(2, 30, (1, 5))
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0, :5], batch[1] = short, torch.randint(2, 30, (9,))
    torch.testing.assert_close(model(batch)[:1], model(short), atol=1e-6, rtol=0)
    torch.testing.assert_close(model(data.trimmed(batch[:1])), model(short), atol=0, rtol=0)
    assert (model(batch)[0] - model(short.flip(1))[0]).abs().max() > 1e-4  # and the order of words counts


def test_models_are_equal_but_for_the_attention():
    options = dict(dim=64, layers=2, heads=4, length=40, dropout=0.1)
    models = compared(4000, 12, 3, **options)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert max(sizes.values()) - min(sizes.values()) < 1e-3 * max(sizes.values())
    bare = [count_parameters(4000, 12, attention=name, **options) for name in ATTENTIONS]
    assert max(sizes.values()) - min(sizes.values()) < max(bare) - min(bare)
    states = [model.state_dict() for model in models.values()]
    for key in ('words.weight', 'blocks.1.attention.in_proj_weight', 'blocks.0.attention.out_proj.weight'):
        assert all(torch.equal(state[key], states[0][key]) for state in states)


def test_models_of_table_2_are_as_wide_as_there():
    """The DGT has Table 6's counts, no network is widened, and the Transformer's is the usual one."""
    options = dict(dim=64, layers=2, heads=4, length=40, dropout=0.1, expansion=2)
    models = compared(4000, 12, 3, of_table_2=True, **options)
    assert list(models) == ['transformer', 'vanilla', 'differential', 'm_dgsa']
    for name, model in models.items():
        assert sum(p.numel() for p in model.parameters()) == count_parameters(4000, 12, attention=name, **options)
    first, second = models['transformer'].blocks[0].ffn.first, models['transformer'].blocks[0].ffn.second
    assert first.weight.shape == (256, 64) and second.weight.shape == (64, 256)
    states = {name: model.state_dict() for name, model in models.items()}
    for key in ('words.weight', 'blocks.1.attention.in_proj_weight', 'classify.weight'):
        assert all(torch.equal(state[key], states['transformer'][key]) for state in states.values())
    key = 'blocks.1.ffn.expand.weight'
    assert all(torch.equal(states[name][key], states['vanilla'][key]) for name in ('differential', 'm_dgsa'))


def test_a_study_trains_what_its_table_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, 'docstrings', lambda: (FEW, list('abc')))
    monkeypatch.setitem(study.SETTINGS, 'docstrings', BRIEF)
    path = tmp_path / 'work_dirs/runs.csv'
    call = ['run', '--csv', str(path), '--seeds', '0', '--train-noise', '0', '0.3']
    study.main(call)
    whole = path.read_text().splitlines()
    assert len(whole) == 1 + 2 * 3 * 2
    study.main(call)
    assert path.read_text().splitlines() == whole and 'Give another --csv' in capsys.readouterr().out
    path.write_text('\n'.join([*whole[:7], '']))  # the runs with noise are missing
    study.main(call)
    seconds = study.FIELDS.index('seconds')
    before, after = ([line.split(',')[:seconds] for line in lines] for lines in (whole, path.read_text().splitlines()))
    assert after == before


def test_commands_write_outside_of_the_project(tmp_path, monkeypatch, capsys):
    """Without ``--csv`` and ``--out``, a run and a figure go to work_dirs; a report reads the project's table."""
    pytest.importorskip('matplotlib', reason='the figure needs matplotlib, which is not installed')
    monkeypatch.setattr(study, 'docstrings', lambda: (FEW, list('abc')))
    monkeypatch.setitem(study.SETTINGS, 'docstrings', BRIEF)
    monkeypatch.chdir(tmp_path)
    folder = Path(study.__file__).parent
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    study.main(['run', '--seeds', '0', '--train-noise', '0', '--attention', 'vanilla'])
    figures.main([])
    study.main(['report'])
    assert '| 0 1 2 3 4 |' in capsys.readouterr().out
    assert sorted(path.name for path in Path('work_dirs/dgsa').iterdir()) == [
        'docstrings.csv', 'rollout.csv', 'rollout.png',
    ]  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path in before} == before


def test_files_of_a_folder_train_the_models_of_table_2(tmp_path, monkeypatch):
    for part in ('train', 'test'):
        lines = [json.dumps(dict(text=text, label=label)) for text, label in FEW]
        (tmp_path / f'imdb_{part}.jsonl.gz').write_bytes(gzip.compress('\n'.join(lines).encode()))
    monkeypatch.setitem(study.SETTINGS, 'imdb', BRIEF)
    call = ['run', '--csv', str(tmp_path / 'runs.csv'), '--data', str(tmp_path / 'imdb'), '--seeds', '0']
    study.main([*call, '--expansion', '2', '4'])
    rows = study.read(tmp_path / 'runs.csv')[::2]
    # the Transformer's network does not depend on the expansion: one row
    found = sorted((row['attention'], row['expansion']) for row in rows)
    assert found == sorted([('transformer', '4.0'), *product(ATTENTIONS, ('2.0', '4.0'))])
    assert {(row['data'], row['train_noise']) for row in rows} == {('imdb', '0.0')}
    with pytest.raises(ValueError, match="no setting is known for 'reviews'; the name is one of rotten_tomatoes"):
        study.main(['run', '--data', str(tmp_path / 'reviews')])


def test_rollout_of_a_text_is_that_of_its_signed_maps():
    torch.manual_seed(0)
    model = TextClassifier(30, 3, attention='m_dgsa', **SMALL).eval()
    words = torch.randint(2, 30, (7,))
    with record(model, ['attention']) as recording, torch.no_grad():
        model(words[None])
    maps = [recording[f'blocks.{n}.attention']['attention'].tensors[0][0] for n in range(2)]
    assert any(x.min() < 0 for x in maps)
    first, last = (0.5 * (torch.eye(7) + (x / x.abs().sum(-1, keepdim=True)).mean(0)) for x in maps)
    expected = (last @ first).mean(0)
    torch.testing.assert_close(figures.rollout(model, words), expected / expected.abs().sum())


def test_a_text_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib', reason='the figure needs matplotlib, which is not installed')
    monkeypatch.setattr(study, 'docstrings', lambda: (FEW, list('abc')))
    monkeypatch.setitem(study.SETTINGS, 'docstrings', BRIEF)
    figures.main(['--out', str(tmp_path / 'rollout.png')])
    assert (tmp_path / 'rollout.png').stat().st_size > 5_000
    rows = list(csv.DictReader((tmp_path / 'rollout.csv').open()))
    assert list(dict.fromkeys(row['attention'] for row in rows)) == list(ATTENTIONS)
    assert len(rows) % 3 == 0 and {row['word'] for row in rows} <= {'a', 'b', 'c', 'word'}
    for name in ATTENTIONS:
        assert sum(abs(float(row['relevance'])) for row in rows if row['attention'] == name) == pytest.approx(1, 1e-3)


def test_docstrings_of_this_python():
    examples, names = data.docstrings()
    assert len(names) == 12 and 'email' in names
    texts = [text for text, _ in examples]
    assert len(set(texts)) == len(texts) > 1500
    assert {label for _, label in examples} == set(range(12))
    import email.message

    module = ' '.join(email.message.Message.__doc__.split())
    assert dict(examples)[module] == names.index('email')


def test_split_keeps_shares():
    examples = [(f'{label} {number}', label) for label, count in ((0, 50), (1, 10)) for number in range(count)]
    first, second = data.split(examples, 0)
    assert sorted(first + second) == sorted(examples)
    assert [sum(label == n for _, label in first) for n in (0, 1)] == [40, 8]
    assert data.split(examples, 0) == (first, second) != data.split(examples, 1)


def test_words_are_numbered():
    examples = [('The cat, the dog', 0), ('a cat', 1), ('Dog!', 1)]
    vocabulary = data.vocabulary_of(examples)
    assert set(vocabulary) == {'the', 'cat', 'dog'}
    assert sorted(vocabulary.values()) == [2, 3, 4]
    assert len(data.vocabulary_of(examples, most=4)) == 2
    words, labels = data.encode([*examples, ('', 0)], vocabulary, 4)
    the, cat, dog = (vocabulary[word] for word in ('the', 'cat', 'dog'))
    assert words.tolist() == [[the, cat, 1, the], [1, cat, 0, 0], [dog, 1, 0, 0], [1, 0, 0, 0]]
    assert labels.tolist() == [0, 1, 1, 0]


def test_noise_replaces_words_and_no_padding():
    words = torch.full((100, 60), 5)
    words[:, 40:] = 0
    noisy = data.corrupt(words, 0.3, 1000, torch.Generator().manual_seed(0))
    assert (noisy[:, 40:] == 0).all() and (noisy[:, :40] >= 2).all() and (noisy < 1000).all()
    assert (noisy[:, :40] != 5).double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(data.corrupt(words, 0, 1000, torch.Generator()), words)


@pytest.mark.parametrize('attention', TABLE_2)
def test_training_learns(attention):
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(5, 40, (160, 12), generator=draw)
    labels = torch.arange(160) % 3
    words[torch.arange(160), torch.randint(12, (160,), generator=draw)] = labels + 2  # one word tells the class
    torch.manual_seed(0)
    model = TextClassifier(40, 3, attention=attention, **SMALL)
    setting = dict(epochs=12, batch=16, lr=1e-2, warmup=10, bfloat16=True)
    list(train_side_by_side([study.prepared(model, words[:120], labels[:120], setting, 0.0, 0)]))
    assert study.accuracy(model, words[120:], labels[120:], 0.0, 0) > 90
    assert study.accuracy(model, words[120:], labels[120:], 0.9, 0) < 75


def test_report_pairs_the_seeds(tmp_path, capsys):
    path = tmp_path / 'runs.csv'
    shares = [('vanilla', 4.0, (50, 60, 70)), ('m_dgsa', 4.0, (51, 62, 73)), ('differential', 4.0, (49,))]
    shares += [('transformer', 4.0, (49, 59, 69)), ('m_dgsa', 2.0, (54, 64, 74))]
    for name, e, found in shares:
        runs = (('imdb', e, 0.0, name, seed, 1000, 0.3, share, 1.0) for seed, share in enumerate(found))
        study.write(path, [dict(zip(study.FIELDS, run, strict=True)) for run in runs])
    study.main(['report', '--csv', str(path)])
    lines = [line.strip('| ').split(' | ') for line in capsys.readouterr().out.splitlines()]
    assert lines[0][7:9] == ['minus vanilla', 'minus transformer']
    rows = {(line[4], line[1]): line[6:] for line in lines[2:]}
    assert list(rows) == [('m_dgsa', '2.00'), *((name, '4.00') for name in TABLE_2)]
    assert rows['vanilla', '4.00'][0] == '60.00 ± 10.00'
    assert rows['differential', '4.00'][1] == 'too few seeds'
    # 2 ± 4.303 / sqrt(3), by Student's t of 2 degrees of freedom
    assert rows['m_dgsa', '4.00'][:2] == ['62.00 ± 11.00', '+2.00 [-0.48, +4.48]']
    assert rows['m_dgsa', '2.00'][2].startswith('+5.00')  # beside the Transformer, which has one expansion


def test_published_data_by_hugging_face(tmp_path):
    pytest.importorskip('datasets', reason="the paper's data sets come by datasets, which is not installed")
    for part in ('train', 'test'):
        (tmp_path / f'{part}.csv').write_text(f'text,label\nfrom {part},1\nmore,0\n')
    train, test = data.published(str(tmp_path))
    assert train == [('from train', 1), ('more', 0)] and test == [('from test', 1), ('more', 0)]


@pytest.mark.parametrize('layer, masked', [(0, False), (5, True)], ids=['whole', 'causal'])
def test_differential_attention_is_diffllamas(layer, masked):
    pytest.importorskip('transformers', reason='the second witness is DiffLlama of transformers, not installed')
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    torch.manual_seed(0)
    heads, width, dim, tokens = 4, 6, 48, 7  # theirs are 2 x 4 heads of 6, ours 4 of two streams of 6
    config = DiffLlamaConfig(
        hidden_size=dim, num_attention_heads=2 * heads, head_dim=width, attn_implementation='eager'
    )
    theirs = DiffLlamaAttention(config, layer).double()
    ours = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
    rule = dict(path='0', type='DifferentialMultiheadAttention', depth=layer + 1)
    swap_attention(nn.ModuleList([ours]), rule)
    ours.double()

    def paired(weight):  # their heads i and i + 4 are the streams of our head i
        return weight.view(2, heads, width, dim).transpose(0, 1).reshape(-1, dim)

    lambdas = ('lambda_q1', 'lambda_k1', 'lambda_q2', 'lambda_k2')
    state = {f'gate.{name}': getattr(theirs, name).detach() for name in lambdas}
    state['in_proj_weight'] = torch.cat([paired(getattr(theirs, f'{part}_proj').weight) for part in 'qkv']).detach()
    state['out_proj.weight'] = theirs.o_proj.weight.detach()
    state['gate.head_norm.weight'] = torch.ones(2 * width)
    ours.load_state_dict(state)

    x = torch.randn(2, tokens, dim, dtype=torch.float64)
    still = torch.ones(2, tokens, width).double(), torch.zeros(2, tokens, width).double()  # no rotation
    mask = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1) if masked else None
    expected = theirs(x, still, None if mask is None else mask.expand(2, 1, -1, -1))[0]
    actual = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)  # theirs rounds softmax and lambda to float32
    for output in (actual, expected):
        output.square().sum().backward()
    for name in ('lambda_q1', 'lambda_k2'):
        torch.testing.assert_close(getattr(ours.gate, name).grad, getattr(theirs, name).grad, atol=1e-5, rtol=1e-5)
