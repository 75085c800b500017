"""The measured choices of backends as a part of a run: in its log and its checkpoints, kept when it is resumed."""

from __future__ import annotations

import logging
from typing import Any

from mmengine.hooks import Hook

from mmgate.ops import choices
from mmgate.registry import HOOKS

KEY = 'mmgate_backends'


@HOOKS.register_module()
class BackendChoicesHook(Hook):
    """Write what ``backend='auto'`` chose by measurement into the log and into ``meta`` of every checkpoint.

    A resumed run goes by its checkpoint's choices, though a measurement would now say otherwise; what the checkpoint
    does not answer (another machine, another shape) is measured. ``mmgate.tools`` register the hook by themselves.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Any) -> None:
        """Send what mmgate logs to the run's logger."""
        self.after_run(runner)
        relay = _Relay(runner.logger)
        relay.level_before = choices.logger.level
        choices.logger.addHandler(relay)
        if choices.logger.level == logging.NOTSET:
            # mmengine's logger has a level at each handler and none of its own
            levels = (handler.level for handler in runner.logger.handlers)
            choices.logger.setLevel(min(levels, default=logging.INFO))

    def after_run(self, runner: Any) -> None:
        """Send it there no more."""
        for handler in [one for one in choices.logger.handlers if isinstance(one, _Relay)]:
            choices.logger.removeHandler(handler)
            choices.logger.setLevel(handler.level_before)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take the checkpoint's choices over if the run is resumed."""
        made = checkpoint.get('meta', {}).get(KEY) or {}
        if made and getattr(runner, '_resume', False):
            choices.carry(made)
            runner.logger.info(f'{len(made)} measured choices of backends are taken over from the checkpoint.')

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the choices made so far."""
        checkpoint.setdefault('meta', {})[KEY] = choices.made()


class _Relay(logging.Handler):
    """Hands records to another logger, whose handlers have levels of their own."""

    level_before = logging.NOTSET

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        self.target.handle(record)
