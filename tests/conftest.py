"""Shared helpers: one place that compares values and gradients."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# Triton reads this when it is imported, which torch may do for any test.
if not torch.cuda.is_available():
    os.environ['TRITON_INTERPRET'] = '1'

# Threads of the processes that tests start. Those of this one are set below.
os.environ.setdefault('OMP_NUM_THREADS', '1')

from mmgate._environment import MM, available, without_mmengine
from mmgate.ops.native import why_not_native as no_native

# A core for each process: threads that wait for a core of another process can make a test a hundred times as long.
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))

if available('mmengine'):
    # mmengine reads all metafiles of a package for each config that another inherits from it: a third of a second.
    from mmengine.config import utils

    utils._get_cfg_metainfo = functools.cache(utils._get_cfg_metainfo)

ROOT = Path(__file__).parents[1]
# Those of projects have theirs beside them, and are in no wheel.
CONFIG_FILES = sorted(path for root in (ROOT, *ROOT.glob('projects/*')) for path in (root / 'configs').rglob('*.py'))
CONFIGS = [path for path in CONFIG_FILES if not {'_base_', 'studies'} & set(path.parts)]

TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])
half_on_cpu = pytest.mark.skipif(TORCH < (2, 2), reason='torch 2.1 has no matrix product of float16 on the CPU')
one_graph = pytest.mark.skipif(TORCH < (2, 5), reason='torch.compile breaks the graph at our operators below torch 2.5')
noted_graph = pytest.mark.skipif(TORCH < (2, 7), reason='torch.compile breaks the graph at notes below torch 2.7')
needs_native = pytest.mark.skipif(no_native(torch.empty(0)) is not None, reason=f'native: {no_native(torch.empty(0))}')
needs_mmpretrain = pytest.mark.skipif(not available('mmpretrain'), reason='needs mmpretrain: the extra "pretrain"')


def family(path: str | Path) -> str:
    """Return what configs share that differ in options, size or schedule: the folder, the gate and what it is in."""
    path = Path(path)
    words = re.split(r'-[tsmlb](?=[-_])|_', path.stem)[0].split('-')
    return '/'.join([*(part for part in path.parent.parts if part != 'ablations'), *words[:2]])


def one_of_each(values: Iterable[Any], *kinds: Callable[[Any], Any]) -> list[Any]:
    """Return parameters for tests of which all but one of each kind, the plainest by its name, are slow.

    Of several sorts of kinds, such as gates and hosts, each kind of each sort has its one: sorts are not multiplied.
    """
    seen: set[str] = set()
    params = []
    for value in sorted(reversed([*values]), key=lambda value: len(str(value))):
        found = {f'{number} {kind(value)}' for number, kind in enumerate(kinds or (family,))}
        params.append(pytest.param(value, marks=[pytest.mark.slow] * (found <= seen)))
        seen |= found
    return params


def skip_unless_readable(path: str | Path) -> None:
    """Skip a test of a config that needs mmpretrain where it is missing."""
    if needs_host(path) and not available('mmpretrain'):
        pytest.skip('needs mmpretrain: the extra "pretrain"')


def needs_host(path: str | Path) -> bool:
    """Return whether a config inherits mmpretrain's, as projects' do, or has a backbone of timm's, which is with it."""
    path = Path(path)
    inside = path.relative_to(ROOT) if path.is_absolute() else path
    return bool({'classification', 'real', 'projects'} & set(inside.parts)) or 'dinov2' in path.name


def tool(name: str, folder: str = 'analysis_tools') -> ModuleType:
    """Return a tool of a folder of ``tools`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f'tools/{folder}/{name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(
    *arguments: str | Path, cwd: Path | None = None, fails: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, without its warnings, and return what it printed."""
    command = [sys.executable, '-W', 'ignore', *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done


def over_shapes(config: str | Path, folder: Path) -> str:
    """Return the text of a config of this repository that reads its shapes from ``folder``."""
    from mmengine.config import Config

    return Config.fromfile(str(ROOT / config)).pretty_text.replace('data/shapes/', f'{folder}/')


def filled(module: Any, std: float) -> Any:
    """Draw every parameter of a module anew, so that what is lost, added or left out shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def values_and_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], differentiable: Sequence[int]
) -> dict[str, Tensor]:
    """Return the output and the gradient of every differentiable input of ``sum(output * fixed noise)``."""
    copies = [x.detach().clone().requires_grad_(i in differentiable) for i, x in enumerate(inputs)]
    output = function(*copies)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output.double() * noise.to(output.device)).sum().backward()
    grads = {f'grad of input {i}': copies[i].grad for i in differentiable}
    return {'output': output.detach(), **{name: g if g is not None else torch.zeros(()) for name, g in grads.items()}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    """Compare what :func:`values_and_gradients` returned, naming what differs."""
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(), value.double(), rtol=rtol, atol=atol, msg=lambda m, n=name: f'{n}: {m}'
        )


DEVICES = [pytest.param('cpu', id='interpreter'), pytest.param('cuda', id='gpu', marks=pytest.mark.gpu)]


@pytest.fixture
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip a test of Triton's kernels where they do not run: on a GPU, or without that mark in the interpreter."""
    from mmgate.ops.triton_backend import interpreted

    on_gpu = request.node.get_closest_marker('gpu') is not None
    if on_gpu and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    if not on_gpu and not interpreted():
        pytest.skip('the kernels are compiled in this process, not interpreted')
    if not on_gpu:
        look_through_language_once(monkeypatch)


def look_through_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter replaces its language's functions once in a launch, not in each call between kernels.

    In what is called, they are replaced already; looking for them takes a third of the time of a test.
    """
    from triton.runtime import interpreter

    run, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[frozenset[str]] = set()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        run(self, *args, **kwargs)
        replaced.clear()

    def replace_once(function: Any) -> Any:
        modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
        language = frozenset(module.__name__ for module in modules if module.__name__.startswith('triton.language'))
        if language in replaced:
            return None
        replaced.add(language)
        return replace(function)

    monkeypatch.setattr(interpreter.GridExecutor, '__call__', launch)
    monkeypatch.setattr(interpreter, '_patch_lang', replace_once)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN, so that what a kernel leaves out shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(float('nan')) if x.is_floating_point() else x

        return call

    monkeypatch.setattr(torch, 'empty_like', poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, 'new_empty', poisoned(Tensor.new_empty))


@pytest.fixture
def within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter lets kernels read and write the memory of their arguments alone."""
    import numpy as np
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    owned: list[tuple[int, int]] = []
    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        storages = [x.untyped_storage() for x in args if isinstance(x, Tensor)]
        owned[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        run(self, *args, **kwargs)

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # the pointers come first, but for atomics
            pointers = next(x for x in args if hasattr(x, 'data') and x.data.dtype == np.uint64)
            used = pointers.data[args[mask_at].data]
            inside = np.zeros(used.shape, bool)
            for first, end in owned:
                inside |= (used >= first) & (used < end)
            assert inside.all(), 'memory of no argument is touched'
            return access(self, *args, **kwargs)

        return call

    monkeypatch.setattr(GridExecutor, '__call__', launch)
    for name, mask_at in (('create_masked_load', 1), ('create_masked_store', 2), ('create_atomic_rmw', 3)):
        monkeypatch.setattr(InterpreterBuilder, name, checked(getattr(InterpreterBuilder, name), mask_at))


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """Skip the test files that import an mm package if there is none, as in ``make test-torch``."""
    report = (yield).get_result()
    cause = report.call.excinfo.value.__cause__ if report.failed else None
    if isinstance(cause, ModuleNotFoundError) and without_mmengine():
        package = str(cause.name).partition('.')[0]
        if package in MM:
            report.outcome = 'skipped'
            report.longrepr = (str(collector.path), None, f'Skipped: needs {package}')


def pytest_configure() -> None:
    """Have yapf write the grammar that it caches before workers start: of two that write it, one reads half of it."""
    if importlib.util.find_spec('yapf'):
        importlib.import_module('yapf.yapflib.yapf_api')


def pytest_collection_finish() -> None:
    """Leave what is imported out of the collection of garbage, which mmengine asks for with each data set."""
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Remove the large files of a test, which would be gigabytes at the end."""
    folder = getattr(item, 'funcargs', {}).get('tmp_path')
    for path in folder.rglob('*') if folder else ():
        if path.is_file() and path.stat().st_size > 2**20:
            path.unlink()


@pytest.fixture(autouse=True, scope='session')
def _configs_are_written_without_layout() -> Generator[None, None, None]:
    """Have mmengine leave out the layout of configs: in a run it makes five, which takes longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec('yapf'):
            patch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **style: (text, True))
        yield


@pytest.fixture
def process_group() -> Generator[None, None, None]:
    """Start a group of this process, without threads: gloo's can wait for Python while Python waits for them to end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
