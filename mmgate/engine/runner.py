"""The Runner of a config, with all that can be found wrong before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.config import Config
from mmengine.registry import RUNNERS, init_default_scope
from mmengine.runner import FlexibleRunner, Runner

from .backends import check_backends
from .choices_hook import BackendChoicesHook
from .classes import check_classes, predicted_classes
from .config_checks import check_optimizer
from .data_checks import check_metrics
from .data_errors import try_first_map, watch_data
from .distributed import prepare_processes
from .gate_hooks import own_model
from .interrupt_hook import SaveOnInterruptHook, shield_loaders
from .preflight import ConfigError
from .run_errors import cannot_be_built
from .whole_checkpoints import keep_quiet_when_full, remove_after_saving, write_whole_files


def build_runner(cfg: Config, *, trains: bool) -> Runner | FlexibleRunner:
    """Return the config's Runner, or the default one, with the loops of training or of testing built.

    Args:
        cfg: The config; ``runner_type`` names a registered runner, such as mmengine's FlexibleRunner.
        trains: Whether the runner trains or tests.

    Raises:
        ConfigError: A component does not know an argument, or is not registered; a backend cannot run here; the heads
            do not go with the data set's classes.
    """
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.utils import setup_cache_size_limit_of_dynamo

        setup_cache_size_limit_of_dynamo()
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    prepare_processes(cfg)
    write_whole_files()
    with _buildable():
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
        if trains:
            check_optimizer(cfg)
        watch_data(runner)
        remove_after_saving(runner)
        keep_quiet_when_full(runner.logger)
        if trains and any(isinstance(hook, SaveOnInterruptHook) for hook in runner.hooks):
            shield_loaders(runner)  # an iteration-based loop may start its workers when it is built
        # The runners build these when the loop starts, too late for a typo in a component's arguments.
        if isinstance(runner, FlexibleRunner):
            runner.model = runner.strategy.build_model(runner.model)
        elif trains:
            runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        loops = [runner.train_loop, runner.val_loop] if trains else [runner.test_loop]
        for loop in loops:
            if hasattr(loop, 'evaluator'):
                data = loop.dataloader.dataset
                predicted = predicted_classes(own_model(runner.model), data)
                check_metrics(loop.evaluator, data, predicted, 'the data to evaluate on')
                if trains:
                    try_first_map(loop)
    if not any(isinstance(hook, BackendChoicesHook) for hook in runner.hooks):
        runner.register_hook(BackendChoicesHook())
    check_backends(runner.model)
    data = runner.train_dataloader if trains else runner.test_dataloader
    check_classes(own_model(runner.model), data.dataset, trains=trains)
    return runner


@contextmanager
def _buildable() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise cannot_be_built(error) from error
