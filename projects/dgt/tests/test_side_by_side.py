"""Training side by side: on a CPU each step runs as it is, on a GPU as a graph of the same code."""

import pytest
import torch

pytest.importorskip('scipy', reason='the study takes Student intervals from scipy, which is not installed')

from projects.dgt import study
from projects.dgt.model import TABLE_2, TextClassifier
from projects.dgt.side_by_side import batches_of, train_side_by_side

SETTING = dict(epochs=1, batch=8, lr=1e-2, warmup=2, bfloat16=False)
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'))]


def job(attention='vanilla', dropout=0.0, epochs=1):
    torch.manual_seed(0)
    model = TextClassifier(40, 3, attention=attention, dim=16, layers=2, heads=2, length=12, dropout=dropout)
    words, labels = torch.randint(2, 40, (21, 12)), torch.arange(21) % 3
    words[::2, 7:] = 0
    key = dict(data='few', expansion=4.0, train_noise=0.0, attention=attention, seed=0)
    return study.Job(key, model, words, labels, words, labels, SETTING | dict(epochs=epochs))


def parameters(model):
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


@pytest.mark.parametrize('attention', TABLE_2)
def test_a_step_is_that_of_the_other_way(attention):
    """21 texts are two batches of 8 and one of 5, which counts as much as a whole one."""
    one, other = job(attention), job(attention)
    study.train(one.model, one.words, one.labels, one.setting, 0.0, one.seed)
    training = study.prepared(other, 'cpu')
    assert [done is training for done in train_side_by_side([training])] == [True]
    # the keys' biases, whose gradients are 0 but for rounding, differ; they do not matter
    torch.testing.assert_close(other.model(other.words), one.model(one.words), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('device', DEVICES)
def test_models_side_by_side_learn(device):
    jobs = [job(attention, epochs=60) for attention in TABLE_2]
    trainings = [study.prepared(one, device) for one in jobs]
    assert set(train_side_by_side(trainings)) == set(trainings)
    for one in jobs:
        assert study.accuracy(one.model, one.words, one.labels, 0.0, 0) > 90


@pytest.mark.parametrize('device', DEVICES)
def test_a_restart_forgets_the_steps(device):
    training, fresh = (study.prepared(job(epochs=4), device) for _ in range(2))
    rates = study.rates_of(SETTING, 6)
    training.advance(7)
    assert (parameters(training.model) != parameters(fresh.model)).any()
    for each in (training, fresh):
        each.restart(rates)
        assert each.advance(2) is False and each.advance() is True
    torch.testing.assert_close(parameters(training.model), parameters(fresh.model), atol=2e-3, rtol=1e-3)


def test_time_that_is_over_ends_it():
    training = study.prepared(job(), 'cpu')
    assert list(train_side_by_side([training], until=0.0)) == [] and training.done == 0


def test_batches_have_each_example_once_an_epoch():
    batches = batches_of(21, 8, 3, seed=0)
    assert batches.shape == (9, 8)
    for epoch in batches.view(3, 24):
        assert sorted(epoch[:21].tolist()) == list(range(21)) and (epoch[21:] == -1).all()
    assert not torch.equal(batches[:3], batches[3:6])
