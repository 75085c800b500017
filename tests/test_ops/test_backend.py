"""``auto``: what agrees and is fastest is taken, what is wrong or slow is not, and the answer is kept."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, one_graph
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmgate.layers import GatingModulation
from mmgate.ops import choices, library, measure, ms_deform_attn, plug_attention
from mmgate.ops.dispatch import Backend, Problems, select
from mmgate.ops.ms_deform_attn import BACKENDS
from mmgate.ops.ms_deform_attn import problems as sampler_problems
from mmgate.ops.plug_attention import BACKENDS as PLUG_BACKENDS
from mmgate.ops.plug_attention import problems as plug_problems


class Square(torch.autograd.Function):
    """x^2 with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2.2 * ctx.saved_tensors[0] * grad


def slowly(x: Tensor) -> Tensor:
    time.sleep(0.02)
    return x * x


def raises(x: Tensor) -> Tensor:
    raise RuntimeError('no such kernel\nfor this device')


def noisy(x: Tensor) -> Tensor:
    return x * x + 0 * torch.rand_like(x)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    'torch': slowly,
    'fast': lambda x: x * x,
    'noisy': noisy,
    'wrong': lambda x: x * x + (x > 0.4).to(x.dtype),
    'not_a_number': lambda x: x * x / (x != x).logical_not() * torch.nan,
    'wrong_gradient': Square.apply,
    'raises': raises,
}
PROBLEMS = Problems(
    shape_class=lambda x: (x.dim(),),
    small=lambda x: (torch.rand(7, generator=torch.Generator().manual_seed(0)).requires_grad_(x.requires_grad),),
    elements=lambda x: x.numel(),
)


def backends(*names: str) -> tuple[Backend, ...]:
    kinds = [Backend(n, lambda x: None, KINDS[n], in_order=n == 'torch', plain=n == 'torch') for n in names]
    return (*kinds, *(Backend('torch', lambda x: None, slowly, plain=True) for _ in range('torch' not in names)))


def auto(x: Tensor, *names: str) -> str:
    return select('square', backends(*names), x, None, PROBLEMS, (x,)).name


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setenv('MMGATE_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setenv('MMGATE_DISPATCH', 'measure')
    monkeypatch.setattr(choices, '_carried', {})
    monkeypatch.setattr(choices, '_made', {})
    caplog.set_level(logging.INFO, 'mmgate')
    measure.forget()
    yield
    measure.forget()


@pytest.mark.parametrize(
    'name, chosen, reason',
    [
        ('fast', 'fast', 'torch'),
        ('wrong', 'torch', 'the output is off by'),
        ('not_a_number', 'torch', 'the output is off by nan'),
        ('wrong_gradient', 'torch', 'the gradient of argument 0 is off by'),
        ('raises', 'torch', 'RuntimeError: no such kernel'),
    ],
)
def test_what_is_wrong_is_refused_and_what_is_slow_loses(
    name: str, chosen: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.rand(1000, requires_grad=True)
    assert auto(x, name) == chosen
    assert reason in caplog.text and 'ms' in caplog.text
    assert auto(x, name) == chosen
    (entry,) = json.loads(choices.path().read_text())['choices'].values()
    assert entry['backend'] == chosen and (name in entry['out']) is (chosen == 'torch')
    assert list(choices.made().values()) == [chosen]


def test_a_class_is_measured_once_and_forward_apart_from_backward(caplog: pytest.LogCaptureFixture) -> None:
    for x in (torch.rand(5), torch.rand(5), torch.rand(5, requires_grad=True), torch.rand(2, 2)):
        auto(x, 'fast')
    assert caplog.text.count('square runs on') == 3
    with torch.no_grad():
        auto(torch.rand(9, requires_grad=True), 'fast')
    assert caplog.text.count('square runs on') == 3


def test_the_file_answers_later_processes(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.rand(5)
    assert auto(x, 'fast') == 'fast'
    measure.forget()
    assert auto(x, 'fast') == 'fast' and 'as measured before' in caplog.text
    measure.forget()
    assert auto(x, 'noisy') == 'noisy', 'an answer that is no candidate is measured anew'


@pytest.mark.parametrize(
    'content', ['', '{', '[]', '{"format": 99}', '{"format": 1, "choices": {"k": 3}}', '{"format": 1, "choices": []}']
)
def test_a_broken_file_is_replaced(content: str, caplog: pytest.LogCaptureFixture) -> None:
    choices.path().parent.mkdir(parents=True)
    choices.path().write_text(content)
    assert auto(torch.rand(5), 'fast') == 'fast'
    assert 'is broken and will be replaced' in caplog.text
    assert len(json.loads(choices.path().read_text())['choices']) == 1


@pytest.mark.parametrize('traced, name', [(False, 'first'), (True, 'torch')])
def test_tracers_get_what_they_can_see_through(traced: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = [Backend('first', lambda x: None, slowly, traceable=False), Backend('torch', lambda x: None, slowly)]
    monkeypatch.setattr('mmgate.ops.dispatch.is_traced', lambda: traced)
    assert select('square', ordered, torch.rand(5)).name == name


def test_a_file_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    (tmp_path / 'file').touch()
    monkeypatch.setenv('MMGATE_CACHE', str(tmp_path / 'file'))
    assert auto(torch.rand(5), 'fast') == 'fast'
    assert 'is not kept' in caplog.text


def test_two_processes_do_not_lose_each_others_answers(tmp_path: Path) -> None:
    """The module alone, without the package, so that both start quickly and meet."""
    code = (
        'import importlib.util, sys\n'
        "spec = importlib.util.spec_from_file_location('choices', sys.argv[1])\n"
        'module = importlib.util.module_from_spec(spec)\n'
        'spec.loader.exec_module(module)\n'
        "for i in range(40): module.store(f'{sys.argv[2]}{i}', dict(backend='x', filler='y' * 500))\n"
    )
    arguments = [sys.executable, '-c', code, str(ROOT / 'mmgate/ops/choices.py')]
    processes = [subprocess.Popen([*arguments, name]) for name in 'ab']
    assert [process.wait() for process in processes] == [0, 0]
    assert set(json.loads(choices.path().read_text())['choices']) == {f'{n}{i}' for n in 'ab' for i in range(40)}
    assert not list(choices.path().parent.glob('*.tmp'))


@pytest.mark.parametrize('policy, chosen', [('static', 'torch'), ('fast', 'fast'), ('mmcv', 'fast'), ('', 'fast')])
def test_policies(policy: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only other operators have leaves this one to be measured."""
    monkeypatch.setenv('MMGATE_DISPATCH', policy)
    assert auto(torch.rand(5), 'fast') == chosen


def test_an_unknown_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MMGATE_DISPATCH', 'statik')
    with pytest.raises(ValueError, match="MMGATE_DISPATCH='statik' is not known; set one of measure, static,"):
        auto(torch.rand(5), 'fast')
    assert select('square', backends('fast'), torch.rand(5), 'fast').name == 'fast'


def test_deterministic_runs_and_traces_take_what_is_known_or_the_order() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.rand(5)

    def deterministic() -> str:
        torch.use_deterministic_algorithms(True)
        try:
            return auto(x, 'fast')
        finally:
            torch.use_deterministic_algorithms(False)

    assert deterministic() == 'torch'
    with FakeTensorMode():
        assert auto(torch.rand(5), 'fast') == 'torch'
    assert not choices.path().exists()
    assert auto(x, 'fast') == 'fast'
    assert deterministic() == 'fast'


def test_measuring_leaves_random_numbers_and_checkpoints_alone() -> None:
    def run(x: Tensor) -> Tensor:
        chosen = select('square', backends('noisy'), x, None, PROBLEMS, (x,))
        return chosen.run(x)

    x = torch.rand(5, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    output = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    (grad,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(grad, 2 * x)
    measure.forget()
    choices.path().unlink()
    torch.manual_seed(3)
    auto(torch.rand(5, 5)[:0], 'noisy')
    torch.manual_seed(3)
    auto(x, 'noisy')
    assert torch.equal(torch.rand(5), expected)


def test_the_first_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank = torch.distributed.HashStore(), 1
    monkeypatch.setattr(choices, '_store', lambda: store)
    monkeypatch.setattr(torch.distributed, 'get_rank', lambda: rank)
    x = torch.rand(5)
    assert auto(x, 'fast') == 'torch', 'nothing was told yet'
    assert not choices.path().exists()
    rank = 0
    assert auto(x, 'fast') == 'fast'
    rank = 1
    measure._answers.clear()
    assert [auto(x, 'fast') for _ in range(3)] == ['fast'] * 3


def test_an_earlier_run_is_carried_on() -> None:
    x = torch.rand(5)
    auto(x, 'fast')
    (key,) = choices.made()
    measure.forget()
    choices.carry({key: 'torch'})
    assert auto(x, 'fast') == 'torch'


def sampler(
    gate: tuple[int, ...] | None, columns: int, dtype: torch.dtype = torch.float32, batch: int = 2
) -> tuple[Any, ...]:
    levels = torch.tensor([(6, 8), (3, 4)])
    leaf = dict(dtype=dtype, requires_grad=True)
    return (
        torch.randn(batch, 60, 4, 16, **leaf),
        levels,
        torch.tensor([0, 48]),
        torch.rand(batch, 9, 4, 2, 3, 2, **leaf),
        torch.randn(batch, 9, 4, 2, 3, **leaf),
        None if gate is None else torch.randn(batch, 9, *gate, **leaf),
        True,
        'pre_softmax',
        torch.rand(batch, 9, 2, columns) if columns else None,
    )


def plug(bias: tuple[int, ...] | None = None, batch: int = 2) -> tuple[Any, ...]:
    shapes = (4, 30, 16), (4, 40, 16), (4, 40, 16), (1, 30, 8), (1, 40, 8)
    tensors = [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]
    gml = GatingModulation('product', activation='tanh', init='paper')
    return (*tensors, gml, None if bias is None else torch.randn(bias), True, 'pre_softmax', 0.1)


@pytest.mark.parametrize('arguments', [sampler((4, 2, 1), 2, batch=1), plug(batch=1)], ids=['sampler', 'plug'])
def test_a_small_problem_of_one_image_has_one_image(arguments: tuple[Any, ...]) -> None:
    problems = (plug_problems if isinstance(arguments[5], nn.Module) else sampler_problems).PROBLEMS
    batched = [x for x in problems.small(*arguments) if torch.is_tensor(x) and x.dim() > 2]
    assert len(batched) >= 5 and all(len(x) == 1 for x in batched)


@pytest.mark.parametrize(
    'one, other',
    [
        (sampler(None, 0), sampler(None, 2)),
        (sampler(None, 2), sampler(None, 4)),
        (sampler(None, 2), sampler((4, 2, 1), 2)),
        (sampler((4, 2, 1), 2), sampler((4, 2, 3), 2)),
        (sampler(None, 2, batch=1), sampler(None, 2)),
        (plug(), plug((2, 1, 1, 40))),
        (plug((2, 1, 1, 40)), plug((1, 4, 30, 40))),
        (plug(batch=1), plug()),
    ],
    ids=['points', 'boxes', 'gated', 'gate', 'batch', 'biased', 'bias', 'plug-batch'],
)
def test_a_choice_holds_for_calls_of_one_class(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    problems = (plug_problems if isinstance(one[5], nn.Module) else sampler_problems).PROBLEMS
    assert problems.shape_class(*one) != problems.shape_class(*other)


@pytest.mark.parametrize(
    'gate, columns, dtype',
    [(None, 0, torch.float32), ((4, 2, 1), 2, torch.bfloat16), ((1, 2, 3), 4, torch.float32)],
    ids=['plain', 'points', 'boxes'],
)
@pytest.mark.parametrize('backend', ['cpu', 'grid_sample', 'torch', 'triton'])
def test_samplers_agree_on_their_small_problem(
    backend: str, gate: tuple[int, ...] | None, columns: int, dtype: torch.dtype
) -> None:
    arguments = sampler(gate, columns, dtype)
    by_name = {b.name: b for b in BACKENDS}
    if by_name[backend].why_not(arguments[0]) is not None:
        pytest.skip('cannot run here')
    small = sampler_problems.PROBLEMS.small(*arguments)
    assert measure.disagreement(by_name[backend], by_name['torch'], small, torch.device('cpu'), True) is None


@pytest.mark.parametrize('bias', [None, (2, 1, 1, 40), (1, 4, 30, 40)], ids=['plain', 'padding', 'full'])
@pytest.mark.parametrize('backend', ['chunked', 'torch', 'triton'])
def test_plug_attentions_agree_on_their_small_problem(
    backend: str, bias: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plug_problems, 'ROWS', 19)
    monkeypatch.setattr(plug_problems, 'COLUMNS', 21)
    arguments = plug(bias)
    by_name = {b.name: b for b in PLUG_BACKENDS}
    if by_name[backend].why_not(arguments[0]) is not None:
        pytest.skip('cannot run here')
    small = plug_problems.PROBLEMS.small(*arguments)
    assert measure.disagreement(by_name[backend], by_name['torch'], small, torch.device('cpu'), True) is None


def test_operators_are_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for op in ('ms_deform_attn', 'plug_attention'):
        module = sys.modules[f'mmgate.ops.{op}']
        monkeypatch.setattr(module, 'BACKENDS', tuple(b for b in module.BACKENDS if b.name != 'triton'))
    value, shapes, starts, points, logits, gate, *_ = sampler((4, 2, 1), 0, torch.float32)
    output = ms_deform_attn(value, shapes, starts, points, logits, gate)
    torch.testing.assert_close(output, ms_deform_attn(value, shapes, starts, points, logits, gate, backend='torch'))
    assert 'ms_deform_attn runs on' in caplog.text and 'grid_sample' in caplog.text
    tensors = [torch.randn(1, heads, 6, 8) for heads in (2, 2, 2, 1, 1)]
    plug_attention(*tensors, GatingModulation('product', activation='tanh', init='paper'))
    assert 'plug_attention runs on' in caplog.text and len(choices.made()) == 2


class Sampler(torch.nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return ms_deform_attn(*x)


def test_exports_hold_plain_operators_only() -> None:
    with torch.no_grad():
        inputs = [x.detach() for x in sampler((4, 2, 1), 0, torch.float32)[:6]]
        traced = torch.jit.trace(Sampler(), inputs, check_trace=False)
        assert not any(node.kind().startswith('mmgate') for node in traced.inlined_graph.nodes())
        torch.testing.assert_close(traced(*inputs), ms_deform_attn(*inputs, backend='torch'))


@one_graph
@pytest.mark.parametrize('own_check', [False, True], ids=['torch_says', 'the_callers_say'])
def test_torch_export_holds_plain_operators_only(own_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own_check:
        monkeypatch.setattr(library, '_is_exporting', torch.compiler.assume_constant_result(library.called_by_export))
    inputs = [x.detach() for x in sampler((4, 2, 1), 0, torch.float32)[:6]]
    program = torch.export.export(Sampler(), tuple(inputs))
    assert not any('mmgate' in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), ms_deform_attn(*inputs, backend='torch'))
