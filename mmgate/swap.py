"""Gate attention modules of any model, chosen by path patterns.

Rules are parsed, then all gates are planned and made, then put in. Only the last step changes the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from mmgate._environment import log
from mmgate.adapter import Record
from mmgate.former import was_in_vit
from mmgate.frozen import frozen_attention
from mmgate.gates.plug import GatingModulation
from mmgate.gating import gate_module
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.plan import Planned, plan_gates
from mmgate.rules import Rules, parse_rules
from mmgate.start import wrap_init_weights
from mmgate.wrappers import model_to_gate


def swap_attention(model: nn.Module, rules: Rules) -> list[str]:
    """Put gates into attention modules of a model in place; modules keep their parameters, hooks and names.

    Args:
        model: A module. It stays as it is if there is any error. Inside of a model of PEFT's, names are those of the
            model that it holds.
        rules: One rule or a list. A rule is a dict of ``path``, ``type`` and the gate's options. ``path`` is a pattern
            or a list of patterns over dotted names: ``*`` matches anything within one name, ``**`` any number of whole
            names, none included, and ``**`` at the end every attention there that the gate fits. ``type`` is a
            registered name or a class.

    Returns:
        The names of the modules that the rules chose.

    The global random numbers stay where they were. From here on the model's ``init_weights`` gives parameters of the
    host the numbers that they have in the vanilla model, see :func:`.start.wrap_init_weights`. Gates of an
    attention that is frozen in training (``requires_grad=False``, ``frozen_stages``), while other parts train, are
    frozen, too, and a warning names them.

    Raises:
        OptionError: A rule is malformed, its type has no gate, or the gate lacks an option, such as
            ``image_size`` where the model does not tell the map in pre-training.
        ConfigError: The type is not registered, a pattern matches no module, a gate does not fit a module, a module is
            gated already, two rules choose one module, or a module and another inside it, or rules differ for a module
            of several names, or for a part of the model and its frozen copy. A method of a module was replaced, so that
            the gate would not be called. The model is sharded, or in DistributedDataParallel.
    """
    model = model_to_gate(model)
    planned = plan_gates(model, parse_rules(rules))
    once: dict[int, Planned] = {}
    for one in planned.values():
        once.setdefault(id(one.host), one)  # several layers may share it
    frozen = frozen_attention(model, {one.name: (one.host, one.rule.gate_and_options) for one in once.values()})
    _warn_of_start(model, once.values())
    # From here on nothing is refused.
    for one in once.values():
        gate_module(one.host, one.adapter, one.gate, Record(one.adapter, one.name, one.rule.given, one.inner))
        # A tensor that is to train and gets no gradient, as in a teacher, ends a training by DDP.
        if one.name in frozen:
            one.gate.requires_grad_(False)
    switch_nested_tensors(model)
    wrap_init_weights(model)
    return list(planned)


def _warn_of_start(model: nn.Module, planned: Iterable[Planned]) -> None:
    """Warn, once for each rule, of gates in vision transformers that 0.2 started otherwise; to be removed in 0.4."""
    first: dict[int, Planned] = {}
    for one in planned:
        if any(isinstance(part, GatingModulation) and part.init == 'paper' for part in one.gate.modules()):
            names = one.chosen.split('.')
            around = (type(model.get_submodule('.'.join(names[:count]))) for count in range(len(names) + 1))
            if was_in_vit(around):
                first.setdefault(id(one.rule), one)
    for one in first.values():
        log(
            f"mmgate: {one.rule.where}: since 0.3 init='paper' starts gates as in detectors, in {one.chosen}, too, "
            "which is part of a vision transformer. Write init='vit' for their start of 0.2.0.",
            logging.WARNING,
        )
