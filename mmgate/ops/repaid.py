"""A function that torch compiles once that has become due to pay.

Compiling takes about ten seconds, which one image does not repay. So the time that a function takes as it is, is added
up over all calls of the process; once compiling at the start would have saved more than it takes, it is compiled, as it
may well save as much again. (Whatever the number of calls turns out to be, this takes at most twice the time of the
better choice.) The compiled form then has to give the same numbers in less time, else the function stays as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger('mmgate')
WAIT = 10.0  # seconds that compiling takes, measured on two cores
SAVED = 0.75  # of the time that compiling saves, measured: 0.75 to 0.83
TOLERANCE = 1e-4  # of the largest number


class Repaid:
    """A function of tensors that returns a tuple of them.

    Args:
        function: To call and, later, to compile for any sizes.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.spent = 0.0
        self._compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self._decided = False

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Call it as it is, or compiled where that has paid."""
        if self._decided:
            return self.function(*args) if self._compiled is None else self._compiled(*args)
        start = time.perf_counter()
        results = self.function(*args)
        seconds = time.perf_counter() - start
        self.spent += seconds
        if self.spent * SAVED > WAIT:
            self._decided = True
            self._decide(args, results, seconds)
        return results

    def compiled(self, *args: Any) -> tuple[Tensor, ...]:
        """Call it compiled, whatever it costs."""
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True)
        return self._compiled(*args)

    def _decide(self, args: tuple[Any, ...], expected: tuple[Tensor, ...], seconds: float) -> None:
        name = self.function.__name__.strip('_')
        logger.info(
            'The CPU sampler has spent %.0f s in %s, compiled about %.0f s less: compiling it now, which takes about '
            '%.0f s (MMGATE_CPU_COMPILE=0 never does).',
            self.spent, name, self.spent * SAVED, WAIT,
        )  # fmt: skip
        compiled = torch.compile(self.function, dynamic=True)
        try:
            for actual, exact in zip(compiled(*args), expected, strict=True):
                scale = exact.abs().max().item() if exact.numel() else 0.0
                torch.testing.assert_close(actual, exact, rtol=0, atol=TOLERANCE * scale)
            start = time.perf_counter()
            compiled(*args)
            faster = time.perf_counter() - start
        except Exception as error:  # no C++ compiler, most often
            reason = str(error).split('\n')[0]
            logger.warning('Compiling %s failed, the CPU sampler goes on without it: %s', name, reason)
            return
        if faster < seconds:
            self._compiled = compiled
        logger.info(
            '%s took %.3g ms, compiled %.3g ms: %s.',
            name, 1e3 * seconds, 1e3 * faster, 'kept' if faster < seconds else 'left as it was',
        )  # fmt: skip
