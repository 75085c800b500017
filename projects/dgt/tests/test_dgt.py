"""The paper's parameter counts, the task made from docstrings, training, and DiffLlama as a second witness."""

import csv
import gzip
import json
import math

import pytest
import torch

pytest.importorskip('scipy', reason='the report takes Student intervals from scipy, which is not installed')

from mmgate.ops.differential import differential_map
from projects.dgt import data, figures, study
from projects.dgt.model import ATTENTIONS, TABLE_2, Block, TextClassifier, compared, count_parameters

EXPANSIONS = (2, 4, 16 / 3)
TABLE6 = {  # millions, by expansion; layers and classes
    'rotten_tomatoes': ((3.8, 4.6, 5.1), 2),
    'imdb': ((25.7, 26.9, 27.7), 2),
    'ag_news': ((13.2, 14.4, 15.2), 4),
    '20_newsgroups': ((12.0, 12.8, 13.4), 20),
}
SMALL = dict(dim=16, layers=2, heads=2, length=12, dropout=0.0)


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


@pytest.mark.parametrize(
    ('expansion', 'classes', 'printed'), [(2, 10, 3.77), (4, 10, 5.35), (2, 100, 3.78), (4, 100, 5.36)]
)
def test_table_5_comes_from_the_same_blocks(expansion, classes, printed):
    blocks = 8 * sum(p.numel() for p in Block('m_dgsa', 256, 8, 128 * expansion, 1, 0.0).parameters())
    patches = 256 * 3 * 4 * 4 + 256
    tokens = 256 + 65 * 256  # class token and positions
    head = 256 + (256 * 128 + 128) + (128 * classes + classes)  # norm, hidden layer, classes
    assert round((blocks + patches + tokens + head) / 1e6, 2) == printed


@pytest.mark.parametrize('pooling', ['mean', 'class'])
@pytest.mark.parametrize('attention', TABLE_2)
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


def test_the_papers_data_train_the_models_of_table_2(tmp_path, monkeypatch):
    few = [(f'{name} {text} {name}', label) for label, name in enumerate('abc') for text in range(12)]
    monkeypatch.setattr(study, 'published', lambda name: (few, few[::3]))
    monkeypatch.setitem(study.SETTINGS, 'imdb', dict(SMALL, epochs=1, batch=8, lr=1e-3, warmup=2, bfloat16=False))
    study.main(['run', '--csv', str(tmp_path / 'runs.csv'), '--data', 'imdb', '--seeds', '0', '--expansion', '2'])
    rows = study.read(tmp_path / 'runs.csv')
    assert [row['attention'] for row in rows[::2]] == ['transformer', 'vanilla', 'differential', 'm_dgsa']
    assert {row['train_noise'] for row in rows} == {'0.0'} and len(rows) == 8


def test_files_of_a_folder_train_the_rows_that_are_asked_for(tmp_path, monkeypatch):
    for part in ('train', 'test'):
        lines = [
            json.dumps(dict(text=f'{name} {n} {name}', label=i)) for i, name in enumerate('abc') for n in range(12)
        ]
        (tmp_path / f'imdb_{part}.jsonl.gz').write_bytes(gzip.compress('\n'.join(lines).encode()))
    assert [len(part) for part in data.published(str(tmp_path / 'imdb'))] == [36, 36]
    monkeypatch.setitem(study.SETTINGS, 'imdb', dict(SMALL, epochs=1, batch=8, lr=1e-3, warmup=2, bfloat16=False))
    call = ['run', '--csv', str(tmp_path / 'runs.csv'), '--data', str(tmp_path / 'imdb'), '--seeds', '0']
    study.main([*call, '--attention', 'transformer', 'm_dgsa', '--expansion', '2', '4'])
    rows = study.read(tmp_path / 'runs.csv')[::2]
    # the Transformer's network does not depend on the expansion: one row
    found = [(row['data'], row['attention'], row['expansion']) for row in rows]
    assert found == [('imdb', 'transformer', '4.0'), ('imdb', 'm_dgsa', '2.0'), ('imdb', 'm_dgsa', '4.0')]
    with pytest.raises(ValueError, match="no setting is known for 'reviews'; the name is one of rotten_tomatoes"):
        study.main(['run', '--data', str(tmp_path / 'reviews')])


def test_rollout_of_a_text_is_that_of_its_signed_maps():
    torch.manual_seed(0)
    model = TextClassifier(30, 3, attention='m_dgsa', **SMALL).eval()
    words = torch.randint(2, 30, (7,))
    maps = []

    def keep(module, args, kwargs):
        query, key, _ = module.project(args)
        maps.append(differential_map(query, key, module.gate._gate(args[0])).detach()[0])

    for block in model.blocks:
        block.attention.register_forward_pre_hook(keep, with_kwargs=True)
    model(words[None])
    assert any(x.min() < 0 for x in maps)
    first, last = (0.5 * (torch.eye(7) + (x / x.abs().sum(-1, keepdim=True)).mean(0)) for x in maps)
    expected = (last @ first).mean(0)
    torch.testing.assert_close(figures.rollout(model, words), expected / expected.abs().sum())


def test_a_text_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib', reason='the figure needs matplotlib, which is not installed')
    few = [(f'{name} {"word " * text}{name}', label) for label, name in enumerate('abc') for text in range(5, 25)]
    monkeypatch.setattr(study, 'docstrings', lambda: (few, list('abc')))
    monkeypatch.setitem(study.SETTINGS, 'docstrings', dict(SMALL, epochs=1, batch=8, lr=1e-3, warmup=2, bfloat16=False))
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
    study.train(model, words[:120], labels[:120], setting, 0.0, 0)
    assert study.accuracy(model, words[120:], labels[120:], 0.0, 0) > 90
    assert study.accuracy(model, words[120:], labels[120:], 0.9, 0) < 75


def test_study_resumes_and_repeats(tmp_path, monkeypatch, capsys):
    few = [(f'{name} {text} {name}', label) for label, name in enumerate('abc') for text in range(12)]
    monkeypatch.setattr(study, 'docstrings', lambda: (few, list('abc')))
    monkeypatch.setitem(study.SETTINGS, 'docstrings', dict(SMALL, epochs=1, batch=8, lr=1e-3, warmup=2, bfloat16=False))
    path = tmp_path / 'work_dirs/runs.csv'
    call = ['run', '--csv', str(path), '--seeds', '0', '--train-noise', '0', '0.3']
    study.main(call)
    whole = path.read_text().splitlines(keepends=True)
    assert len(whole) == 1 + 2 * 3 * 2
    study.main(call)
    assert path.read_text() == ''.join(whole) and 'Give another --csv' in capsys.readouterr().out
    path.write_text(''.join(whole[:7]))  # the runs with noise are missing
    study.main(call)

    def results(lines):
        return [{k: v for k, v in row.items() if k != 'seconds'} for row in csv.DictReader(lines)]

    assert results(path.read_text().splitlines()) == results(whole)


def test_a_run_goes_on_after_its_last_epoch(tmp_path, monkeypatch):
    """A run that is ended in its third epoch goes on from the second, and ends as if it had not been."""
    few = [(f'{name} {text} {name}', label) for label, name in enumerate('abc') for text in range(12)]
    monkeypatch.setattr(study, 'docstrings', lambda: (few, list('abc')))
    setting = dict(SMALL, dropout=0.2, epochs=4, batch=8, lr=1e-3, warmup=2, bfloat16=True)
    monkeypatch.setitem(study.SETTINGS, 'docstrings', setting)
    call = ['run', '--seeds', '0', '--train-noise', '0.3', '--attention', 'm_dgsa', '--csv']
    study.main([*call, str(tmp_path / 'whole.csv')])
    corrupt, calls = study.corrupt, []

    def ended(*args):
        calls.append(args)
        if len(calls) == 10:  # 4 steps an epoch
            raise KeyboardInterrupt
        return corrupt(*args)

    monkeypatch.setattr(study, 'corrupt', ended)
    with pytest.raises(KeyboardInterrupt):
        study.main([*call, str(tmp_path / 'parts.csv')])
    assert len(list(tmp_path.glob('*.pt'))) == 1
    study.main([*call, str(tmp_path / 'parts.csv')])
    whole, parts = (study.read(tmp_path / f'{name}.csv') for name in ('whole', 'parts'))
    assert [row['accuracy'] for row in parts] == [row['accuracy'] for row in whole] and len(whole) == 2
    assert len(calls) == 10 + 2 * 4 + 2 and not list(tmp_path.glob('*.p*t'))


def test_report_pairs_the_seeds(tmp_path, capsys):
    path = tmp_path / 'runs.csv'
    rows = [
        dict(
            zip(
                study.FIELDS,
                ('docstrings', 4.0, 0.0, name, seed, 1000, 0.3, accuracy, 1.0),
                strict=True,
            )
        )
        for name, shares in (('vanilla', (50, 60, 70)), ('m_dgsa', (51, 62, 73)), ('differential', (49,)))
        for seed, accuracy in enumerate(shares)
    ]
    study.write(path, rows)
    study.main(['report', '--csv', str(path)])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(' | ')[4] for line in lines] == ['vanilla', 'differential', 'm_dgsa']
    assert '60.00 ± 10.00' in lines[0]
    assert 'too few seeds' in lines[1]
    # 2 ± 4.303 / sqrt(3), by Student's t of 2 degrees of freedom
    assert '62.00 ± 11.00 | +2.00 [-0.48, +4.48] | 0 1 2 |' in lines[2]


def test_report_has_the_transformer_beside_each_expansion(tmp_path, capsys):
    path = tmp_path / 'runs.csv'
    shares = (('transformer', 4.0, 50), ('vanilla', 4.0, 52), ('vanilla', 2.0, 51), ('m_dgsa', 2.0, 54))
    rows = [
        dict(zip(study.FIELDS, ('imdb', e, 0.0, name, seed, 1000, 0.0, share + seed, 1.0), strict=True))
        for name, e, share in shares
        for seed in range(3)
    ]
    study.write(path, rows)
    study.main(['report', '--csv', str(path)])
    lines = [line.split(' | ') for line in capsys.readouterr().out.splitlines()]
    assert lines[0][7:9] == ['minus vanilla', 'minus transformer']
    found = [(line[1], line[4], line[7][:5], line[8][:5]) for line in lines[2:]]
    assert found == [
        ('2.00', 'vanilla', '', '+1.00'),
        ('2.00', 'm_dgsa', '+3.00', '+4.00'),
        ('4.00', 'transformer', '-2.00', ''),
        ('4.00', 'vanilla', '', '+2.00'),
    ]


def test_published_data_by_hugging_face(tmp_path):
    pytest.importorskip('datasets', reason="the paper's data sets come by datasets, which is not installed")
    for part in ('train', 'test'):
        (tmp_path / f'{part}.csv').write_text(f'text,label\nfrom {part},1\nmore,0\n')
    train, test = data.published(str(tmp_path))
    assert train == [('from train', 1), ('more', 0)] and test == [('from test', 1), ('more', 0)]


@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'causal'])
@pytest.mark.parametrize('layer', [0, 5])
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
    ours = ATTENTIONS['differential'](dim, heads, bias=False, batch_first=True, depth=layer + 1).double()

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
