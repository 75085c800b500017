"""Run diffusers' own Dreambooth script with agents in the UNet that it trains (appendix B.4).

``accelerate launch -m projects.agent_sd.dreambooth train_dreambooth.py ...``; the script's arguments follow its name.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from diffusers import UNet2DConditionModel

from projects.agent_sd.processor import apply_agent_sd


@contextmanager
def agents_in_training(**options: Any) -> Iterator[list[UNet2DConditionModel]]:
    """Apply AgentSD to every UNet that accelerate prepares for training, and to no other one; yield those.

    A UNet that makes the images of the class before the training is not prepared, and has no agents.

    Args:
        **options: Of :class:`projects.agent_sd.AgentSD`. All steps are early ones, as no pipeline tells which it is.
    """
    prepare = Accelerator.prepare
    prepared: list[UNet2DConditionModel] = []

    def with_agents(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        for part in args:
            if isinstance(part, UNet2DConditionModel):
                apply_agent_sd(part, **options)
                prepared.append(part)
        return prepare(self, *args, **kwargs)

    Accelerator.prepare = with_agents
    try:
        yield prepared
    finally:
        Accelerator.prepare = prepare


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments and run the script.

    Raises:
        SystemExit: The script has trained no UNet.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--ratio', type=float, default=0.4, help='share of the tokens that are merged (default 0.4)')
    parser.add_argument('--value-factor', type=float, default=0.075, help='k of Eq. 9 (default 0.075)')
    parser.add_argument(
        '--power', type=float, default=0.3, help='the second scale is d ** (-0.5 * power) (default 0.3)'
    )
    parser.add_argument(
        'script', help="diffusers' examples/dreambooth/train_dreambooth.py, or another that trains a UNet"
    )
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args(argv)
    own = sys.argv
    sys.argv = [args.script, *args.arguments]
    try:
        with agents_in_training(ratio=args.ratio, value_factor=args.value_factor, power=args.power) as prepared:
            runpy.run_path(args.script, run_name='__main__')
    finally:
        sys.argv = own
    if not prepared:
        raise SystemExit(f'{args.script} gave accelerate no UNet2DConditionModel, so it has trained without agents.')


if __name__ == '__main__':
    main()
