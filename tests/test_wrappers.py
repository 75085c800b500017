"""Models inside of wrappers: found, saved and loaded by the names that they have by themselves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TORCH, values_and_gradients
from helpers.finetuned import PLUG, layers
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmengine.model import BaseTTAModel, ExponentialMovingAverage
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import mmgate
from mmgate.checkpoints.gates_file import read_gates
from mmgate.errors import ConfigError
from mmgate.wrappers import unwrap_model


class Augmented(BaseTTAModel):
    merge_preds = test_step = None


WRAPS = {
    'average': AveragedModel,
    "mmengine's average": ExponentialMovingAverage,
    'several': lambda model: nn.DataParallel(Augmented(torch.compile(model))),
}


@pytest.mark.parametrize('wrap', WRAPS)
def test_the_model_in_its_wrappers(wrap: str, tmp_path: Path) -> None:
    model, file = layers(), tmp_path / 'g.safetensors'
    model.test_step = None
    wrapped = WRAPS[wrap](model)
    own = unwrap_model(wrapped)  # averages copy it
    assert type(own) is type(model) and own.state_dict().keys() == model.state_dict().keys()
    mmgate.save_gates(wrapped, file)
    assert set(mmgate.load_gates(layers(()), file)) == mmgate.gate_parameters(model).keys()


@pytest.mark.usefixtures('process_group')
def test_a_model_in_ddp_takes_no_gates_but_fills_those_it_has(tmp_path: Path) -> None:
    """It would not average their gradients."""
    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(layers(), file)
    vanilla, gated = (nn.parallel.DistributedDataParallel(model) for model in (layers(()), layers()))
    for model in (vanilla, nn.ModuleList([vanilla])):
        with pytest.raises(ConfigError, match='Gate the model first, then wrap it'):
            mmgate.swap_attention(model, dict(PLUG, path='**'))
    with pytest.raises(ConfigError, match='Gate the model first, then wrap it'):
        mmgate.load_gates(vanilla, file)
    assert not mmgate.gate_parameters(vanilla)
    assert mmgate.load_gates(gated, file)


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


def test_a_file_of_gates_names_a_wrapped_host_as_the_rule_does(tmp_path: Path) -> None:
    """mmcv's attention, inside of which is what is gated; the wrapper was there when it was."""
    file = tmp_path / 'g.safetensors'
    wrapped, plain = (nn.Sequential(wrap(MultiheadAttention(16, 4))) for wrap in (checkpoint_wrapper, nn.Identity()))
    mmgate.swap_attention(wrapped, dict(PLUG, path='0'))
    mmgate.save_gates(wrapped, file)
    mmgate.load_gates(plain, file)
    assert mmgate.restore_attention(plain) == ['0']


@pytest.mark.parametrize('wrap', ['recomputed', 'recomputed, reentrant'])
def test_what_is_computed_again_is_what_was_computed(wrap: str) -> None:
    """The backward pass may run in another thread, as CUDA's does, and in a context in which gates are off."""
    model, x = in_parts(wrap, layers()), torch.randn(2, 5, 16, requires_grad=True)

    def backward(out: Tensor) -> list[Tensor]:
        model.zero_grad()
        with ThreadPoolExecutor(1) as other:
            other.submit(out.square().sum().backward).result()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, out = backward(model(x)), model(x)
    with mmgate.gates_disabled(model):
        torch.testing.assert_close(backward(out), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x.detach()), layers(())(x))
        with refused():
            model(x)
    out = model(x)
    with mmgate.gates_disabled(model), refused():
        out.sum().backward()


def in_fsdp(model: nn.Module) -> nn.Module:
    return nn.ModuleDict(dict(_fsdp_wrapped_module=model))


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in (*(layer.attn for layer in model), model):
        fully_shard(part)
    return model


@pytest.mark.usefixtures('process_group')
@pytest.mark.parametrize(
    'rules, act, message',
    [
        (PLUG, mmgate.save_gates, 'a sharded model .* has no whole gates to be saved'),
        (PLUG, mmgate.load_gates, 'a sharded model .* load them first, then shard'),
        ((), lambda model, _: mmgate.swap_attention(model, PLUG), 'a sharded model .* gate the model first'),
    ],
    ids=['save', 'load', 'swap'],
)
@pytest.mark.parametrize(
    'shard',
    [in_fsdp, pytest.param(fully_sharded, marks=pytest.mark.skipif(TORCH < (2, 6), reason='torch has no fully_shard'))],
)
def test_sharded_models_are_refused(
    rules: object, act: Callable[[nn.Module, Path], object], message: str, shard: Callable[..., Any], tmp_path: Path
) -> None:
    """Gates would lie outside of flat parameters, or are cut."""
    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(layers(), file)
    model = shard(layers(rules))
    with pytest.raises(ConfigError, match=message):
        act(model, file)
    if shard is fully_sharded and rules:
        with pytest.raises(ConfigError, match='FSDP.* was derived .* after gating'):
            mmgate.restore_attention(model)
