"""Importing mmgate changes nothing in a process but what docs/process.md lists."""

from __future__ import annotations

from conftest import ROOT, run_python

# Imports the hosts, takes down what they and the process are, imports mmgate and prints what is another thing since.
SCRIPT = """
import atexit, importlib, logging, os, pkgutil, random, signal, sys, threading, types, warnings
import numpy, torch, mmengine.runner, mmengine.hub, mmcv.ops
import torch.onnx, torch.export
for name in ('mmdet', 'mmseg'):
    for part in ('apis', 'datasets', 'engine', 'evaluation', 'models', 'structures', 'visualization'):
        importlib.import_module(f'{name}.{part}')
HOSTS = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'torch')
KINDS = (type, types.FunctionType, types.BuiltinFunctionType, property, classmethod, staticmethod)


def facts():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition('.')[0] in HOSTS and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if isinstance(value, KINDS):
                    found[f'{name}.{key}'] = value
                if isinstance(value, type) and value.__module__ == name:
                    inner = {f'{name}.{key}.{k}': v for k, v in vars(value).items() if isinstance(v, KINDS)}
                    found.update(inner)
    for scheme, loader in mmengine.runner.CheckpointLoader._schemes.items():
        found[f'loader of {scheme}'] = loader
    return found


def process():
    backends = torch.backends
    return dict(
        environment=dict(os.environ), path=list(sys.path), filters=list(warnings.filters), hook=sys.excepthook,
        signals={s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        threads=threading.active_count(), handlers=list(logging.getLogger().handlers), exits=atexit._ncallbacks(),
        level=logging.getLogger().level, grad=torch.is_grad_enabled(), dtype=torch.get_default_dtype(),
        tf32=(backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32), benchmark=backends.cudnn.benchmark,
        fused=hasattr(backends, 'mha') and backends.mha.get_fastpath_enabled(), torch_threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(), seed=torch.initial_seed(),
        random=(random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
        scope=mmengine.registry.DefaultScope.get_current_instance())


before = facts()
was = process()
import mmgate
now = process()
changed = [key for key in was if was[key] != now[key]]
for module in pkgutil.walk_packages(mmgate.__path__, 'mmgate.'):
    try:
        importlib.import_module(module.name)
    except ImportError:  # of an extra
        pass
after = facts()
changed += [key for key, value in before.items() if after.get(key, value) is not value]
owners = {key: getattr(getattr(value, '__func__', value), '__module__', None) for key, value in after.items()}
changed += [key for key, owner in owners.items() if str(owner).partition('.')[0] == 'mmgate']
print('facts', len(before), 'changed', *changed)
"""


def test_nothing_is_patched() -> None:
    """Functions, classes, methods and loaders of the hosts and of torch are the same, and so is what a process has."""
    last = run_python('-c', SCRIPT, PYTHONPATH=str(ROOT)).stdout.splitlines()[-1].split()
    assert last[0] == 'facts' and int(last[1]) > 10000 and last[3:] == []
