"""The paper's parameter counts, the task made from docstrings, and training."""

import csv
import gzip
import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip('scipy', reason='the report takes Student intervals from scipy, which is not installed')

from mmgate import record
from projects.dgsa import figures, study, texts
from projects.dgsa.model import ATTENTIONS, TABLE_2, TextClassifier, compared, count_parameters

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
    """But not with Table 4's 6 layers on 20 Newsgroups, nor with a network twice as wide."""
    layers = study.SETTINGS[name]['layers']
    fewest, most = implied_vocabulary(name, layers)
    assert fewest <= words <= most < fewest + 300
    if name == '20_newsgroups':
        fewest, most = implied_vocabulary(name, 6)
        assert most < fewest
    printed, classes = TABLE6[name]
    twice = [count_parameters(9, classes, layers=layers, expansion=e) for e in (4, 8)]  # for e = 2 and 4
    assert abs(twice[1] - twice[0] - 1e6 * (printed[1] - printed[0])) > 0.1e6


@pytest.mark.parametrize('attention', TABLE_2)
def test_padding_changes_nothing(attention):
    torch.manual_seed(0)
    model = TextClassifier(30, 3, attention=attention, **SMALL).eval()
    short = torch.randint(2, 30, (1, 5))
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0, :5], batch[1] = short, torch.randint(2, 30, (9,))
    torch.testing.assert_close(model(batch)[:1], model(short), atol=1e-6, rtol=0)
    torch.testing.assert_close(model(texts.trimmed(batch[:1])), model(short), atol=0, rtol=0)
    assert (model(batch)[0] - model(short.flip(1))[0]).abs().max() > 1e-4  # and the order of words counts


@pytest.mark.parametrize('of_table_2', [False, True])
def test_models_are_equal_but_for_what_is_compared(of_table_2):
    """The attention, at equal parameters; or as in Table 2, none widened, and the Transformer's usual network."""
    options = dict(dim=64, layers=2, heads=4, length=40, dropout=0.1, expansion=2)
    models = compared(4000, 12, 3, of_table_2=of_table_2, **options)
    bare = {name: count_parameters(4000, 12, attention=name, **options) for name in models}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    keys = ['words.weight', 'blocks.1.attention.in_proj_weight', 'blocks.0.attention.out_proj.weight']
    if of_table_2:
        assert tuple(models) == TABLE_2 and sizes == bare
        network = models['transformer'].blocks[0].ffn
        assert network.first.weight.shape == (256, 64) and network.second.weight.shape == (64, 256)
        keys.append('classify.weight')
    else:
        spread = max(sizes.values()) - min(sizes.values())
        assert spread < min(1e-3 * max(sizes.values()), max(bare.values()) - min(bare.values()))
    first, *others = (model.state_dict() for model in models.values())
    assert all(torch.equal(state[key], first[key]) for state in others for key in keys)


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(study, 'docstrings', lambda: (FEW, list('abc')))
    for name in ('docstrings', 'imdb'):
        monkeypatch.setitem(study.SETTINGS, name, BRIEF)


def test_commands_draw_and_write_outside_of_the_project(brief, tmp_path, monkeypatch, capsys):
    """Without ``--csv`` and ``--out``, a run and a figure go to work_dirs; a report reads the project's table."""
    pytest.importorskip('matplotlib', reason='the figure needs matplotlib, which is not installed')
    monkeypatch.chdir(tmp_path)
    folder = Path(study.__file__).parent
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    study.main(['run', '--seeds', '0', '--train-noise', '0', '--attention', 'vanilla'])
    figures.main([])
    study.main(['report'])
    assert '| 0 1 2 3 4 |' in capsys.readouterr().out
    out = Path('work_dirs/dgsa')
    assert sorted(path.name for path in out.iterdir()) == ['docstrings.csv', 'rollout.csv', 'rollout.png']
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path in before} == before
    assert (out / 'rollout.png').stat().st_size > 5_000
    rows = list(csv.DictReader((out / 'rollout.csv').open()))
    assert {row['word'] for row in rows} <= {'a', 'b', 'c', 'word'}
    for name in ATTENTIONS:
        assert sum(abs(float(row['relevance'])) for row in rows if row['attention'] == name) == pytest.approx(1, 1e-3)


def test_a_folders_texts_train_what_the_table_of_all_models_lacks(brief, tmp_path, capsys):
    for part in ('train', 'test'):
        lines = [json.dumps(dict(text=text, label=label)) for text, label in FEW]
        (tmp_path / f'imdb_{part}.jsonl.gz').write_bytes(gzip.compress('\n'.join(lines).encode()))
    path = tmp_path / 'runs.csv'
    call = ['run', '--csv', str(path), '--data', str(tmp_path / 'imdb'), '--seeds', '0']
    call += ['--expansion', '2', '4', '--train-noise', '0', '0.3']
    study.main(call)
    rows = study.read(path)[::2]
    # the Transformer's network does not depend on the expansion: one row
    found = sorted((row['attention'], row['expansion'], row['train_noise']) for row in rows)
    models = [('transformer', '4.0'), *product(ATTENTIONS, ('2.0', '4.0'))]
    assert found == sorted((*model, noise) for model in models for noise in ('0.0', '0.3'))
    whole = path.read_text().splitlines()
    study.main(call)
    assert path.read_text().splitlines() == whole and 'Give another --csv' in capsys.readouterr().out
    path.write_text('\n'.join([*whole[:15], '']))  # the runs with noise are missing
    study.main(call)
    seconds = study.FIELDS.index('seconds')
    before, after = ([line.split(',')[:seconds] for line in lines] for lines in (whole, path.read_text().splitlines()))
    assert after == before
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


def test_docstrings_of_this_python():
    examples, names = texts.docstrings()
    assert len(names) == 12 and 'email' in names
    found = [text for text, _ in examples]
    assert len(set(found)) == len(found) > 1500
    assert {label for _, label in examples} == set(range(12))
    import email.message

    module = ' '.join(email.message.Message.__doc__.split())
    assert dict(examples)[module] == names.index('email')


def test_texts_are_split_by_class_and_words_are_numbered():
    examples = [(f'{label} {number}', label) for label, count in ((0, 50), (1, 10)) for number in range(count)]
    first, second = texts.split(examples, 0)
    assert sorted(first + second) == sorted(examples)
    assert [sum(label == n for _, label in first) for n in (0, 1)] == [40, 8]
    assert texts.split(examples, 0) == (first, second) != texts.split(examples, 1)
    examples = [('The cat, the dog', 0), ('a cat', 1), ('Dog!', 1), ('', 0)]
    vocabulary = texts.vocabulary_of(examples)
    assert set(vocabulary) == {'the', 'cat', 'dog'} and sorted(vocabulary.values()) == [2, 3, 4]
    assert len(texts.vocabulary_of(examples, most=4)) == 2
    words, labels = texts.encode(examples, vocabulary, 4)
    the, cat, dog = (vocabulary[word] for word in ('the', 'cat', 'dog'))
    assert words.tolist() == [[the, cat, 1, the], [1, cat, 0, 0], [dog, 1, 0, 0], [1, 0, 0, 0]]
    assert labels.tolist() == [0, 1, 1, 0]


def test_noise_replaces_words_and_no_padding():
    words = torch.full((100, 60), 5)
    words[:, 40:] = 0
    noisy = texts.corrupt(words, 0.3, 1000, torch.Generator().manual_seed(0))
    assert (noisy[:, 40:] == 0).all() and (noisy[:, :40] >= 2).all() and (noisy < 1000).all()
    assert (noisy[:, :40] != 5).double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(texts.corrupt(words, 0, 1000, torch.Generator()), words)


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
    train, test = texts.published(str(tmp_path))
    assert train == [('from train', 1), ('more', 0)] and test == [('from test', 1), ('more', 0)]
