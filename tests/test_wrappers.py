"""Models inside of wrappers: found, saved and loaded by the names that they have by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TORCH, values_and_gradients
from helpers.finetuned import PLUG, layers
from mmengine.model import BaseTTAModel, ExponentialMovingAverage
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import mmgate
from mmgate.checkpoints.gates_file import read_gates
from mmgate.errors import ConfigError
from mmgate.wrappers import unwrap_model


class Augmented(BaseTTAModel):
    merge_preds = test_step = None


WRAPS = {
    'data parallel': nn.DataParallel,
    'average': AveragedModel,
    "mmengine's average": ExponentialMovingAverage,
    'compiled': torch.compile,
    'augmented': Augmented,
    'several': lambda model: nn.DataParallel(Augmented(torch.compile(model))),
    'sharded': lambda model: nn.ModuleDict(dict(_fsdp_wrapped_module=model)),
}


@pytest.mark.parametrize('wrap', WRAPS)
def test_the_model_in_its_wrappers(wrap: str, tmp_path: Path) -> None:
    model, file = layers(), tmp_path / 'g.safetensors'
    model.test_step = None
    wrapped = WRAPS[wrap](model)
    own = unwrap_model(wrapped)  # averages copy it
    assert type(own) is type(model) and own.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ConfigError, match='a sharded model') if wrap == 'sharded' else nullcontext():
        mmgate.save_gates(wrapped, file)
        assert set(mmgate.load_gates(layers(()), file)) == mmgate.gate_parameters(model).keys()


def test_a_model_in_ddp_takes_no_gates_but_fills_those_it_has(tmp_path: Path) -> None:
    """It would not average their gradients."""
    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(layers(), file)
    distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)
    try:
        vanilla, gated = (nn.parallel.DistributedDataParallel(model) for model in (layers(()), layers()))
        for model in (vanilla, nn.ModuleList([vanilla])):
            with pytest.raises(ConfigError, match='Gate the model first, then wrap it'):
                mmgate.swap_attention(model, dict(PLUG, path='**'))
        with pytest.raises(ConfigError, match='Gate the model first, then wrap it'):
            mmgate.load_gates(vanilla, file)
        assert not mmgate.gate_parameters(vanilla)
        assert mmgate.load_gates(gated, file)
    finally:
        distributed.destroy_process_group()


PARTS = {
    'recomputed': checkpoint_wrapper,
    'recomputed, reentrant': partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    'compiled': partial(torch.compile, backend='eager'),
    'both': lambda part: torch.compile(checkpoint_wrapper(part), backend='eager'),
}


def in_parts(wrap: str, model: nn.Module) -> nn.Module:
    """Wrap the first layer, and the attention in the second one."""
    model[0] = PARTS[wrap](model[0])
    model[1].attn = PARTS[wrap](model[1].attn)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the output, and gradients of the input and of each parameter that has one, by their order."""
    model.zero_grad()
    found = values_and_gradients(model, [torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))], [0])
    with_gradient = [x.grad for x in model.parameters() if x.grad is not None]
    return found | {str(i): gradient.clone() for i, gradient in enumerate(with_gradient)}


def refused() -> Any:
    """Return a context in which activation checkpointing meets a gate that is off."""
    return pytest.raises(RuntimeError, match='gates_disabled does not reach activation checkpointing')


# gated or not
no_both = pytest.mark.skipif(TORCH < (2, 2), reason="Dynamo of torch 2.1 does not read torch's own checkpoint wrapper")


@pytest.mark.parametrize('wrap', [pytest.param(name, marks=[no_both] * (name == 'both')) for name in PARTS])
def test_gates_beside_wrapped_parts(wrap: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    plain, model = layers(), layers()
    gated, vanilla = gradients(plain), gradients(layers(()))
    mmgate.train_only_gates(model)
    in_parts(wrap, model)
    mmgate.train_only_gates(model, 'all')
    torch.testing.assert_close(gradients(model), gated)
    if TORCH < (2, 7) and wrap in ('compiled', 'both'):
        with pytest.raises(ConfigError, match='run with gates in gates_disabled; run the model that is not compiled'):
            mmgate.gates_disabled(model)
    else:
        # A graph has its recomputation in it.
        with mmgate.gates_disabled(model), refused() if wrap.startswith('recomputed') else nullcontext():
            torch.testing.assert_close(gradients(model), vanilla)
    files = [tmp_path / name for name in ('plain.safetensors', 'wrapped.safetensors')]
    for one, file in zip((plain, model), files, strict=True):
        mmgate.save_gates(one, file)
    one, other = map(read_gates, files)
    assert vars(one) | dict(tensors=None) == vars(other) | dict(tensors=None)
    torch.testing.assert_close(one.tensors, other.tensors)
    filled = in_parts(wrap, layers(()))
    assert set(mmgate.load_gates(filled, files[0])) == mmgate.gate_parameters(plain).keys()
    torch.testing.assert_close(gradients(filled), gated)
    assert [part.path for part in mmgate.list_attention(filled)] == ['0.attn', '1.attn']
    for wrapped in (model, filled):
        assert mmgate.restore_attention(wrapped) == ['0.attn', '1.attn']
        torch.testing.assert_close(gradients(wrapped), vanilla)


def test_a_model_that_fsdp_wraps_takes_no_gates() -> None:
    """They would lie outside of its flat parameters."""
    with pytest.raises(ConfigError, match='a sharded model .* gate the model first'):
        mmgate.swap_attention(WRAPS['sharded'](layers(())), PLUG)


@pytest.mark.skipif(TORCH < (2, 6), reason='torch.distributed.fsdp has no fully_shard')
@pytest.mark.parametrize(
    'rules, act, message',
    [
        (PLUG, mmgate.save_gates, 'a sharded model .* has no whole gates to be saved'),
        (PLUG, mmgate.load_gates, 'a sharded model .* load them first, then shard'),
        ((), lambda model, _: mmgate.swap_attention(model, PLUG), 'a sharded model .* gate the model first'),
    ],
    ids=['save', 'load', 'swap'],
)
def test_sharded_models_are_refused(
    rules: object, act: Callable[[nn.Module, Path], object], message: str, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import fully_shard

    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(layers(), file)
    model = layers(rules)
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for part in (*(layer.attn for layer in model), model):
            fully_shard(part)
        with pytest.raises(ConfigError, match=message):
            act(model, file)
        with pytest.raises(ConfigError, match='FSDP.* was derived .* after gating') if rules else nullcontext():
            assert mmgate.restore_attention(model) == []
    finally:
        torch.distributed.destroy_process_group()
