"""Training side by side: on a CPU each step runs as it is, on a GPU as a graph of the same code."""

import pytest
import torch
import torch.nn.functional as F

from projects.dgsa import study, texts
from projects.dgsa.model import TABLE_2, TextClassifier
from projects.dgsa.side_by_side import train_side_by_side

SETTING = dict(epochs=2, batch=8, lr=1e-2, warmup=2, bfloat16=False)
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'))]
LABELS = torch.arange(21) % 3  # two batches of 8 and one of 5 an epoch


def sentences():
    words = torch.randint(2, 40, (21, 12), generator=torch.Generator().manual_seed(0))
    words[::2, 7:] = 0
    return words


def classifier(attention='vanilla'):
    torch.manual_seed(0)
    return TextClassifier(40, 3, attention=attention, dim=16, layers=2, heads=2, length=12, dropout=0.0)


def prepared(attention='vanilla', device='cpu', noise=0.0, **setting):
    return study.prepared(classifier(attention).to(device), sentences(), LABELS, SETTING | setting, noise, 0)


@pytest.mark.parametrize('noise', [0.0, 0.3])
@pytest.mark.parametrize('attention', TABLE_2)
def test_a_training_is_a_plain_loop(attention, noise):
    model = classifier(attention)
    narrow = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [dict(params=[p for p in model.parameters() if p.ndim > 1]), dict(params=narrow, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-8)
    order, draw = (torch.Generator().manual_seed(0) for _ in range(2))
    rates = iter([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])  # two steps of warm-up, then down to 0
    for _ in range(2):
        words = texts.corrupt(sentences(), noise, 40, draw)
        for chosen in torch.randperm(21, generator=order).split(8):
            optimizer.param_groups[0]['lr'] = optimizer.param_groups[1]['lr'] = next(rates)
            optimizer.zero_grad()
            F.cross_entropy(model(words[chosen]), LABELS[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    training = prepared(attention, noise=noise)
    assert list(train_side_by_side([training])) == [training]
    # the keys' biases, whose gradients are 0 but for rounding, differ; they do not matter
    torch.testing.assert_close(training.model(sentences()), model(sentences()), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('device', DEVICES)
def test_models_side_by_side_learn(device):
    trainings = [prepared(attention, device, epochs=30) for attention in TABLE_2]
    assert set(train_side_by_side(trainings)) == set(trainings)
    for training in trainings:
        assert study.accuracy(training.model, sentences(), LABELS, 0.0, 0) > 90


@pytest.mark.parametrize('device', DEVICES)
def test_a_training_that_was_stopped_goes_on(device):
    whole, first, second = (prepared(device=device) for _ in range(3))
    assert whole.advance()
    assert list(train_side_by_side([first], until=0.0)) == [] and first.done == 0
    assert not first.advance(2)
    second.load(first.state())
    assert second.done == 2 and second.advance()
    torch.testing.assert_close(second.state(), whole.state(), atol=2e-3, rtol=1e-3)
