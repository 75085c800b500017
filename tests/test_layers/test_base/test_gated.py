"""The switch of a module's class: what a gated module keeps, copies of it, and what is left when its gate is off."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
import torch
from conftest import filled
from helpers.gated import anatomy, assert_same_anatomy
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoderLayer
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmseg.models.backbones.vit import VisionTransformer
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from mmgate import adapts, gate_parameters, gates_disabled, restore_attention, swap_attention
from mmgate.errors import ConfigError
from mmgate.hosts.table import _ADAPTERS
from mmgate.layers.base import gated as mechanism
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.gated import GatedModule, gated_modules, is_on

C, H = 16, 4
PLUG = dict(type='PLuGMultiheadAttention', init='paper')
AGENT = dict(type='AgentAttention', agent_num=4, map_size=(8, 8))
TOKENS, QUERY = torch.Size([2, 64, C]), torch.Size([5, 2, C])


@dataclass
class Host:
    """A host of a family with its gate.

    Attributes:
        make: What makes the host, ``attn`` in a model.
        rule: Of the gate.
        call: What the host is called with; sizes stand for random numbers.
        at: The module that is gated.
        projection: A linear layer that the gated module uses.
        named: What the host is called with by name.
    """

    make: Callable[[], nn.Module]
    rule: dict[str, Any]
    call: list[Any]
    at: str
    projection: str
    named: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """Return a vanilla model, the same one each time."""
        torch.manual_seed(0)
        return filled(nn.ModuleDict(dict(first=nn.Linear(C, C), attn=self.make(), last=nn.Linear(C, C))), 0.3).eval()

    def gate(self, model: nn.Module) -> Any:
        """Gate a model, the same way each time."""
        assert swap_attention(model, dict(self.rule, path=self.at))
        for name, parameter in gate_parameters(model).items():
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        return model

    def out(self, model: Any) -> Tensor:
        """Return what the host computes."""
        generator, like = torch.Generator().manual_seed(0), next(model.parameters())
        given = [torch.randn(x, generator=generator).to(like) if isinstance(x, torch.Size) else x for x in self.call]
        out = model['attn'](*given, **self.named)
        return torch.cat([one.flatten() for one in out if one is not None]) if isinstance(out, tuple) else out


LEVELS = dict(
    reference_points=torch.linspace(0.1, 0.9, 40).view(2, 5, 2, 2),
    spatial_shapes=torch.tensor([[4, 6], [2, 3]]),
    level_start_index=torch.tensor([0, 24]),
)
HOSTS = {
    'dense': Host(
        lambda: nn.MultiheadAttention(C, H), PLUG, [QUERY] * 3, 'attn', 'attn.out_proj', dict(need_weights=False)
    ),
    'dense of mmcv': Host(lambda: MultiheadAttention(C, H), PLUG, [QUERY], 'attn.attn', 'attn.attn.out_proj'),
    'deformable': Host(
        lambda: MultiScaleDeformableAttention(C, H, 2, 3, dropout=0.0),
        dict(type='PLuGMultiScaleDeformableAttention', init='paper'),
        [QUERY, None, torch.Size([30, 2, C])],
        'attn',
        'attn.value_proj',
        LEVELS,
    ),
    'windows': Host(lambda: ShiftWindowMSA(C, H, 4, 2), PLUG, [TOKENS, (8, 8)], 'attn.w_msa', 'attn.w_msa.qkv'),
    'over the map': Host(lambda: ShiftWindowMSA(C, H, 4, 2), AGENT, [TOKENS, (8, 8)], 'attn', 'attn.w_msa.qkv'),
    'over the reduced map': Host(
        lambda: SpatialReductionAttention(C, H, sr_ratio=2), AGENT, [TOKENS, (8, 8)], 'attn', 'attn.attn.out_proj'
    ),
    'both ways': Host(
        lambda: BiMultiHeadAttention(C, 24, 32, H), PLUG, [TOKENS, torch.Size([2, 5, 24])], 'attn', 'attn.l_proj'
    ),
}
LEAVES_OUT = ('over the map', 'over the reduced map')
every_host = pytest.mark.parametrize('name', HOSTS)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def dressed(module: nn.Module) -> list[Any]:
    """Put a hook of each kind on a module and return their handles; none changes anything."""
    return [
        module.register_forward_pre_hook(lambda module, args: None),
        module.register_forward_hook(lambda module, args, out: None),
        module.register_full_backward_hook(lambda module, grads, back: None),
        module._register_state_dict_hook(lambda module, state, prefix, local: None),
        module._register_load_state_dict_pre_hook(lambda *_: None),
        module.register_load_state_dict_post_hook(lambda module, keys: None),
    ]


@every_host
def test_nothing_is_left_of_a_gate_that_is_off(name: str) -> None:
    """The very objects and classes, in their order, with hooks and parametrizations of before and since."""
    host = HOSTS[name]
    model = host.model()
    gated = model.get_submodule(host.at)
    kind = type(gated)
    handles = dressed(gated)
    parametrize.register_parametrization(model.get_submodule(host.projection), 'weight', Doubled())
    expected, before, keys = host.out(model), anatomy(model), list(model.state_dict())
    host.gate(model)
    assert model.get_submodule(host.at) is gated
    assert isinstance(gated, GatedModule) and isinstance(gated, kind) and type(gated) is not kind
    assert bool(gated.gating.left_out) == (name in LEAVES_OUT)
    assert not torch.allclose(host.out(model), expected)
    with gates_disabled(model):
        torch.testing.assert_close(host.out(model), expected, rtol=0, atol=0)
        assert list(model.state_dict()) == keys
    since = dressed(gated)
    assert restore_attention(model) == [host.at]
    assert type(gated) is kind and not hasattr(gated, 'gate') and not hasattr(gated, 'gating')
    for handle in since:
        handle.remove()
    assert_same_anatomy(anatomy(model), before)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(host.out(model), expected, rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    hooks = [value for key, value in vars(gated).items() if key.endswith('_hooks')]
    assert hooks and not any(hooks)


@every_host
def test_a_gated_module_has_its_hosts_names_and_its_gates_alone(name: str) -> None:
    host = HOSTS[name]
    vanilla = host.model()
    model = host.gate(host.model())
    expected = [key for key in vanilla.state_dict() if not key.startswith(left_out(model, host))]
    own = [key for key in model.state_dict() if not key.startswith(f'{host.at}.gate.')]
    assert own == expected
    added = [key for key in model.state_dict() if key not in expected]
    assert added and set(added) == set(gate_parameters(model))


def left_out(model: nn.Module, host: Host) -> tuple[str, ...]:
    module: Any = model.get_submodule(host.at)
    return tuple(f'{host.at}.{left}' for left in module.leaves_out)


OWN_TENSORS = {'dense': 'in_proj_weight', 'dense of mmcv': 'in_proj_weight', 'windows': 'relative_position_bias_table'}


@pytest.mark.parametrize('name', HOSTS)
def test_a_gated_class_has_a_full_name_of_its_own_and_its_adapters_signature(name: str) -> None:
    host = HOSTS[name]
    module = host.gate(host.model()).get_submodule(host.at)
    kind, adapter = type(module), module.gating.adapter
    assert kind.__module__ == mechanism.__name__ and not hasattr(mechanism, kind.__qualname__)
    assert inspect.signature(kind.forward) == inspect.signature(adapter.forward)


@pytest.mark.parametrize(
    'name, place, tensor',
    [
        *((name, host.projection, 'weight') for name, host in HOSTS.items()),
        *((name, HOSTS[name].at, tensor) for name, tensor in OWN_TENSORS.items()),
    ],
)
def test_a_parametrization_of_a_gated_model_outlives_the_gate(name: str, place: str, tensor: str) -> None:
    """Of a projection or of the gated module; it comes off afterwards, from the host's class."""
    host = HOSTS[name]
    model = host.model()
    module = model.get_submodule(place)
    kind, expected = type(module), host.out(model)
    host.gate(model)
    gated = host.out(model)
    parametrize.register_parametrization(module, tensor, Doubled())
    torch.testing.assert_close(host.out(model), gated)
    assert host.at in dict(gated_modules(model))
    with gates_disabled(model):
        torch.testing.assert_close(host.out(model), expected)
    torch.testing.assert_close(host.out(model), gated)
    torch.testing.assert_close(host.out(copy.deepcopy(model)), gated)
    restore_attention(model)
    assert parametrize.is_parametrized(module, tensor) and not hasattr(model.get_submodule(host.at), 'gate')
    assert not isinstance(module, GatedModule) and isinstance(module, kind)
    torch.testing.assert_close(host.out(model), expected)
    parametrize.remove_parametrizations(module, tensor)
    assert type(module) is kind
    torch.testing.assert_close(host.out(model), expected)


COPIES: dict[str, Callable[[Any], Any]] = {
    'deepcopy': copy.deepcopy,
    'copy of a copy': lambda model: copy.deepcopy(copy.deepcopy(model)),
    'pickle': lambda model: pickle.loads(pickle.dumps(model)),
    'torch': lambda model: saved_and_loaded(model),
}


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_host
@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize('on', [True, False], ids=['on', 'off'])
def test_copies_of_a_gated_module_are_independent(name: str, how: str, on: bool) -> None:
    """Gated as their original, of tensors of their own, and vanilla when their gates are off."""
    host = HOSTS[name]
    vanilla, model = host.out(host.model()), host.gate(host.model())
    expected = host.out(model)
    if on:
        twin = COPIES[how](model)
    else:
        with gates_disabled(model):
            twin = COPIES[how](model)
        torch.testing.assert_close(host.out(twin), vanilla, rtol=0, atol=0)
        assert not is_on(twin.get_submodule(host.at))
        mechanism.switch_on(twin.get_submodule(host.at))
    assert type(twin.get_submodule(host.at)) is type(model.get_submodule(host.at))
    torch.testing.assert_close(host.out(twin), expected, rtol=0, atol=0)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    assert restore_attention(twin) == [host.at]
    torch.testing.assert_close(host.out(twin), vanilla, rtol=0, atol=0)
    assert list(twin.state_dict()) == list(host.model().state_dict())
    torch.testing.assert_close(host.out(model), expected, rtol=0, atol=0)
    filled(twin, 0.1)
    restore_attention(model)
    torch.testing.assert_close(host.out(model), vanilla, rtol=0, atol=0)


@every_host
def test_a_pickle_is_read_by_another_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which no class of a gated module has been made yet."""
    host = HOSTS[name]
    model = host.gate(host.model())
    written = pickle.dumps(model)
    monkeypatch.setattr(mechanism, '_CLASSES', {})
    twin = pickle.loads(written)
    torch.testing.assert_close(host.out(twin), host.out(model), rtol=0, atol=0)
    assert type(twin.get_submodule(host.at)) is not type(model.get_submodule(host.at))
    restore_attention(twin)
    assert type(twin.get_submodule(host.at)) is type(host.model().get_submodule(host.at))


class Careful(nn.MultiheadAttention):
    """A host that says what of it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != 'notes'}


def test_what_a_host_leaves_out_of_a_pickle_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))
    adapts(DenseGate, Careful, like=nn.MultiheadAttention)
    model: Any = nn.ModuleDict(dict(attn=Careful(C, H)))
    model['attn'].notes = lambda: None  # cannot be pickled
    swap_attention(model, dict(PLUG, path='attn'))
    twin = pickle.loads(pickle.dumps(model))['attn']
    assert isinstance(twin, Careful) and is_on(twin) and not hasattr(twin, 'notes')


@every_host
def test_what_is_left_out_follows_the_model(name: str) -> None:
    """To another dtype, and out of the device ``meta``."""
    host = HOSTS[name]
    model = host.gate(host.model()).double()
    restore_attention(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(host.out(model), host.out(host.model().double()), rtol=1e-6, atol=1e-6)
    with torch.device('meta'):
        model = nn.ModuleDict(dict(attn=host.make()))
        swap_attention(model, dict(host.rule, path=host.at))
    model.to_empty(device='cpu')
    restore_attention(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@every_host
def test_tensors_that_others_share_stay_shared(name: str) -> None:
    host = HOSTS[name]
    model = host.model()
    model['tied'] = nn.Module()
    model['tied'].weight = model.get_submodule(host.projection).weight
    host.gate(model)
    for _ in range(2):
        assert model['tied'].weight is model.get_submodule(host.projection).weight
        restore_attention(model)


@every_host
def test_gates_go_on_and_off_again(name: str) -> None:
    host = HOSTS[name]
    model = host.model()
    before = anatomy(model)
    for _ in range(3):
        host.gate(model)
        with gates_disabled(model), gates_disabled(model):
            pass
        assert is_on(model.get_submodule(host.at))
        restore_attention(model)
        assert_same_anatomy(anatomy(model), before)


def as_accelerate(module: Any) -> None:
    """Set what ``accelerate.hooks.add_hook_to_module`` sets on a module; the hook itself changes nothing."""
    module._old_forward = module.forward
    module._hf_hook = object()

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def as_accelerate_removed(module: Any) -> None:
    """Leave what ``accelerate.hooks.remove_hook_from_module`` leaves: the method as an attribute."""
    as_accelerate(module)
    module.forward = module._old_forward
    del module._old_forward, module._hf_hook


def as_auto_round(module: Any) -> None:
    def block_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module.orig_forward(*args, **kwargs)

    module.orig_forward = module.forward
    module.forward = functools.partial(block_forward, module)


def with_own_method(module: Any) -> None:
    module.forward = module.forward


def with_call_replaced(module: Any) -> None:
    """As profilers do: torch looks ``_call_impl`` up on the module, and ``__call__`` on its class."""
    for name in ('_call_impl', '__call__'):
        setattr(module, name, functools.partial(getattr(module, name)))


def with_closure(module: Any) -> None:
    """As mmengine's ``turn_on_activation_checkpointing`` and most profilers do."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def with_compiled_forward(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend='eager')


def compiled_in_place(module: Any) -> None:
    module.compile(backend='eager')


def with_own_class(module: Any) -> None:
    """As profilers that replace ``__call__`` of one module do."""

    class Profiled(type(module)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    module.__class__ = Profiled


def with_another_function(module: Any) -> None:
    """Keep the method, as for later, and compute something else."""
    module.orig_forward = module.forward
    module.forward = MethodType(lambda module, *args, **kwargs: args[0], module)


def offloaded(module: Any) -> None:
    as_accelerate(module)
    module.to('meta')


REACHED = (with_own_method, as_accelerate, as_accelerate_removed, as_auto_round, with_call_replaced)
WRAPPED = (*REACHED, with_closure, with_own_class)
COMPILED = (compiled_in_place, with_compiled_forward)
REFUSED = {
    with_closure: r'method forward was replaced on this very module, by <lambda> of .*test_gated.py, .* gate the',
    with_compiled_forward: 'its method forward was replaced .* gate the model before',
    with_another_function: r'its method forward was replaced .* undo it first \(del module.forward\)',
    offloaded: 'accelerate has offloaded its weights.* gate the model before',
    with_own_class: 'which PLuGMultiheadAttention does not replace',
}


def check_switches(host: Host, model: Any, vanilla: Tensor, expected: Tensor) -> None:
    """Compare what a gated model computes, with its gates on, off, on again, and removed."""
    assert not torch.allclose(vanilla, expected)
    torch.testing.assert_close(host.out(model), expected)
    with gates_disabled(model):
        torch.testing.assert_close(host.out(model), vanilla)
    torch.testing.assert_close(host.out(model), expected)
    with torch.no_grad():
        torch.testing.assert_close(host.out(copy.deepcopy(model)), expected)
    assert restore_attention(model) == [host.at]
    torch.testing.assert_close(host.out(model), vanilla)


@every_host
@pytest.mark.parametrize('change', REACHED)
def test_a_method_set_on_a_module_before_the_swap_calls_the_gate(name: str, change: Callable[[Any], None]) -> None:
    host = HOSTS[name]
    model = host.model()
    change(model.get_submodule(host.at))
    check_switches(host, host.gate(model), host.out(host.model()), host.out(host.gate(host.model())))


@every_host
@pytest.mark.parametrize('change', WRAPPED)
def test_a_method_set_on_a_gated_module_survives_the_switches(name: str, change: Callable[[Any], None]) -> None:
    host = HOSTS[name]
    model = host.gate(host.model())
    expected = host.out(model)
    change(model.get_submodule(host.at))
    check_switches(host, model, host.out(host.model()), expected)


@pytest.mark.parametrize(
    'change, first',
    [(change, first) for change in COMPILED for first in (True, False) if not (first and change in REFUSED)],
)
def test_a_compiled_module_calls_its_gate(change: Callable[[Any], None], first: bool) -> None:
    host = HOSTS['dense']
    model = host.model()
    if first:
        change(model['attn'])
    host.gate(model)
    if not first:
        change(model['attn'])
    check_switches(host, model, host.out(host.model()), host.out(host.gate(host.model())))


@pytest.mark.parametrize(
    'change, path',
    [(change, path) for change in REFUSED for path in ('attn', '**') if (change, path) != (with_own_class, '**')],
)
def test_a_module_whose_gate_would_not_be_called_is_refused(change: Callable[[Any], None], path: str) -> None:
    """Also where a path takes all that fits, because the module would then stay vanilla; the model is as it was."""
    model = HOSTS['dense'].model()
    change(model['attn'])
    before = anatomy(model)
    with pytest.raises(ConfigError, match=REFUSED[change]):
        swap_attention(model, dict(PLUG, path=path))
    assert_same_anatomy(anatomy(model), before)


class Called(nn.Module):
    """A model that calls torch's attention."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.attn = host

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


def test_torch_func_calls_the_gate() -> None:
    host = HOSTS['dense']
    model, x = host.model(), torch.randn(QUERY)
    vanilla = Called(model['attn'])(x)
    called = Called(host.gate(model)['attn'])
    given = {name: p.detach() for name, p in called.named_parameters()}
    torch.testing.assert_close(functional_call(called, given, (x,)), called(x))
    assert not torch.allclose(functional_call(called, given, (x,)), vanilla)
    given = {name: p + 1 if '.gate.' in name else p for name, p in given.items()}
    assert not torch.allclose(functional_call(called, given, (x,)), called(x))
    restore_attention(called)
    torch.testing.assert_close(called(x), vanilla)


def test_a_graph_of_torch_fx_calls_the_gates_of_the_modules_in_it() -> None:
    """An attention whose code became part of the graph is refused, by its name."""
    model = Called(HOSTS['dense'].model()['attn'])
    graph: Any = fx.symbolic_trace(model)
    x = torch.randn(QUERY)
    vanilla = graph(x)
    swap_attention(graph, dict(PLUG, path='attn', init='identity'))
    for parameter in gate_parameters(graph).values():
        parameter.data.normal_(std=0.3)
    assert not torch.allclose(graph(x), vanilla)
    with gates_disabled(graph):
        torch.testing.assert_close(graph(x), vanilla)
    restore_attention(graph)
    torch.testing.assert_close(graph(x), vanilla)
    host = HOSTS['windows']
    model = host.model()
    model['attn'].w_msa = fx.symbolic_trace(model['attn'].w_msa)
    with pytest.raises(ConfigError, match='attn.w_msa .* torch.fx has traced it.* gate the model before it is traced'):
        swap_attention(model, dict(PLUG, path='attn.w_msa'))


class EncoderBlock(nn.Module):
    """As torchvision has it, around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(C, H)


EncoderBlock.__module__ = 'torchvision.models.vision_transformer'
# By the name of a case, what makes a host or a module around it, the host's path, and whether it is in a ViT.
VITS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    'torch': (lambda: nn.MultiheadAttention(C, H), '', False),
    'mmcv': (lambda: MultiheadAttention(C, H), '', False),
    'detr': (lambda: DetrTransformerEncoderLayer(dict(embed_dims=C, num_heads=H)), 'self_attn', False),
    'swin': (lambda: WindowMSA(C, H, (4, 4)), '', True),
    'mmseg_vit': (lambda: VisionTransformer(32, 16, embed_dims=C, num_layers=1, num_heads=H), 'layers.0.attn', True),
    'torchvision': (EncoderBlock, 'self_attention', True),
}


@pytest.mark.parametrize('name', VITS)
def test_a_gate_in_a_vision_transformer_starts_as_its_authors_layers(name: str) -> None:
    make, path, narrow = VITS[name]
    # What a model calls it says nothing: DETR's encoder could be called so.
    model = nn.ModuleDict(dict(backbone=make()))
    swap_attention(model, dict(path=f'backbone.{path}'.rstrip('.'), type='PLuGMultiheadAttention', init='paper'))
    gate: Any = next(module for module in model.modules() if hasattr(module, 'gate_q_proj'))
    assert gate.in_vit == (gate.gml.weight.abs().max() < 0.1) == (not gate.gate_q_proj.bias.any()) == narrow
