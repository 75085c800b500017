"""Gated modules: what they keep, copies of them, what runs while a gate is off, and what is left without it."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import TORCH, filled
from helpers.gated import anatomy, assert_same_anatomy
from helpers.host_blocks import BLOCKS, called, randomised
from helpers.replicas import replicated
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from mmgate import adapts, gate_parameters, gates_disabled, removal, restore_attention, swap_attention
from mmgate import gating as mechanism
from mmgate.adapter import Adapter, gated_modules, host_class, unused_tensors
from mmgate.errors import ConfigError
from mmgate.gates.base.dense import DenseGate
from mmgate.hosts.table import _ADAPTERS

C, H = 16, 4
PLUG = dict(type='PLuGMultiheadAttention', init='paper')
AGENT = dict(type='AgentAttention', agent_num=4, map_size=(8, 8))


@dataclass
class Case:
    """A host in its block, with its gate."""

    block: str
    rule: dict[str, Any]
    inner: str = ''  # path of the gated module from the one that the rule chooses
    plain: bool = False  # the host has a plain attribute of the gate's name, None, as timm's attention has it

    @property
    def at(self) -> str:
        return BLOCKS[self.block].path + self.inner

    def model(self) -> Any:
        """Return a vanilla block, the same one each time."""
        torch.manual_seed(0)
        model: Any = randomised(BLOCKS[self.block].make())
        if self.plain:
            model.get_submodule(self.at).gate = None
        return model

    def gate(self, model: nn.Module) -> Any:
        """Gate a block, the same way each time."""
        assert swap_attention(model, dict(self.rule, path=BLOCKS[self.block].path))
        for name, parameter in gate_parameters(model).items():
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        return model

    def out(self, model: nn.Module) -> Tensor:
        return called(model, BLOCKS[self.block])


CASES = {
    'dense': Case('torch.nn.modules.activation.MultiheadAttention', PLUG),
    'dense with an attribute': Case('torch.nn.modules.activation.MultiheadAttention', PLUG, plain=True),
    'dense of mmcv': Case('mmcv.cnn.bricks.transformer.MultiheadAttention', PLUG, '.attn'),
    'deformable': Case(
        'mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention',
        dict(type='PLuGMultiScaleDeformableAttention', init='paper'),
    ),
    'windows': Case('mmdet.models.backbones.swin.WindowMSA', PLUG),
    'over the map': Case('mmdet.models.backbones.swin.ShiftWindowMSA', AGENT),
    'over the reduced map': Case('mmdet.models.backbones.pvt.SpatialReductionAttention', AGENT),
    'both ways': Case('mmdet.models.utils.vlfuse_helper.BiMultiHeadAttention', PLUG),
}
every_case = pytest.mark.parametrize('case', CASES.values(), ids=CASES)
some_cases = pytest.mark.parametrize('name', ['dense', 'over the map', 'both ways'])


class Doubled(nn.Module):
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


@every_case
def test_what_is_not_used_follows_the_model(case: Case) -> None:
    """To another dtype, out of the device ``meta``; and a weight that others share stays shared."""
    model = case.gate(case.model())
    model.tied = nn.Module()
    model.tied.weight = next(iter(model.get_submodule(case.at).parameters()))
    model.double()
    restore_attention(model)
    assert model.tied.weight is next(iter(model.get_submodule(case.at).parameters()))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with torch.device('meta'):
        model = BLOCKS[case.block].make()
        swap_attention(model, dict(case.rule, path=BLOCKS[case.block].path))
    model.to_empty(device='cpu')
    restore_attention(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@every_case
def test_nothing_is_left_of_a_gate_that_was_removed(case: Case) -> None:
    """The very objects and classes, in their order, with hooks and parametrizations of before and since."""
    model = case.model()
    gated = model.get_submodule(case.at)
    kind = type(gated)
    handles = dressed(gated)
    projection = next(part for part in gated.modules() if isinstance(part, nn.Linear))
    parametrize.register_parametrization(projection, 'weight', Doubled())
    expected, before, keys = case.out(model), anatomy(model), list(model.state_dict())
    case.gate(model)
    assert model.get_submodule(case.at) is gated
    assert isinstance(gated, Adapter) and isinstance(gated, kind) and type(gated) is not kind
    on = case.out(model)
    assert not torch.allclose(on, expected)
    inside = anatomy(model)
    with pytest.raises(KeyError), gates_disabled(model):
        with gates_disabled(model):
            pass
        torch.testing.assert_close(case.out(model), expected, rtol=0, atol=0)
        assert_same_anatomy(anatomy(model), inside)
        raise KeyError
    torch.testing.assert_close(case.out(model), on, rtol=0, atol=0)  # again, after an error, too
    since = dressed(gated)
    assert restore_attention(model) == [BLOCKS[case.block].path]
    assert type(gated) is kind and hasattr(gated, 'gate') == case.plain and not hasattr(gated, 'gating')
    for handle in since:
        handle.remove()
    assert_same_anatomy(anatomy(model), before)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(case.out(model), expected, rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    hooks = [value for key, value in vars(gated).items() if key.endswith('_hooks')]
    assert hooks and not any(hooks)


@every_case
def test_a_gated_module_has_its_hosts_tensors_and_its_gates_alone(case: Case) -> None:
    """And its signature. What the gated forward does not use is frozen: each that trains gets a gradient."""
    vanilla = case.model()
    model = case.gate(case.model())
    gated: Any = model.get_submodule(case.at)
    assert inspect.signature(type(gated).forward) == inspect.signature(host_class(gated).forward)
    own = [key for key in model.state_dict() if not key.startswith(f'{case.at}.gate.')]
    assert own == list(vanilla.state_dict())
    added = [key for key in model.state_dict() if key not in own]
    assert added and set(added) == set(gate_parameters(model))
    unused = {f'{case.at}.{name}' for name, tensor in unused_tensors(gated).items() if tensor.is_floating_point()}
    assert bool(unused) == (case.rule is AGENT)
    case.out(model).square().sum().backward()
    for key, parameter in gated.named_parameters(prefix=case.at):
        assert parameter.requires_grad == (parameter.grad is not None) == (key not in unused), key


@pytest.mark.parametrize('name', ['over the map', 'over the reduced map'])
@pytest.mark.parametrize('loads', [[True], [False], [False, True]], ids=['whole', 'lacking', 'lacking, then whole'])
def test_a_checkpoint_may_lack_what_a_gated_module_does_not_use(
    name: str, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strictly loaded, as those of versions that left it out; whoever removes the gates then, is told."""
    case = CASES[name]
    source, model = (case.gate(case.model()) for _ in range(2))
    state = filled(source, 0.2).state_dict()
    unused = {f'{case.at}.{key}' for key in unused_tensors(source.get_submodule(case.at))}
    for whole in loads:
        kept = {key: model.state_dict()[key].clone() for key in unused}
        given = {key: tensor for key, tensor in state.items() if whole or key not in unused}
        model.load_state_dict(given)
        assert all(torch.equal(tensor, given.get(key, kept.get(key))) for key, tensor in model.state_dict().items())
        model.load_state_dict({key: tensor for key, tensor in state.items() if '.gate.' in key}, strict=False)
    said: list[str] = []
    monkeypatch.setattr(removal, 'log', lambda text, level: said.append(text))
    restore_attention(model)
    assert all(tensor.requires_grad for tensor in model.parameters())
    assert ['no checkpoint has filled' in text for text in said] == [True] * (not loads[-1])


@pytest.mark.parametrize('name, tensor', [('dense', 'in_proj_weight'), ('windows', 'relative_position_bias_table')])
def test_a_parametrization_of_a_gated_module_comes_off_before_the_gate(name: str, tensor: str) -> None:
    """It is computed with and without the gate meanwhile, in copies, too."""
    case = CASES[name]
    model = case.model()
    module, expected = model.get_submodule(case.at), case.out(model)
    case.gate(model)
    kind, gated = type(module), case.out(model)
    parametrize.register_parametrization(module, tensor, Doubled())
    assert case.at in dict(gated_modules(model))
    torch.testing.assert_close(case.out(copy.deepcopy(model)), gated)
    check_switches(case, model, expected, gated)
    with pytest.raises(ConfigError, match=r'Parametrized.* was derived .* after gating.* undo that first'):
        restore_attention(model)
    torch.testing.assert_close(case.out(model), gated)
    parametrize.remove_parametrizations(module, tensor)
    assert type(module) is kind
    restore_attention(model)
    torch.testing.assert_close(case.out(model), expected)


def read_by_another_process(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Save a model and load it as where no class of a gated module has been made yet."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    monkeypatch.setattr(mechanism, '_CLASSES', {})
    return torch.load(file, weights_only=False)


@every_case
@pytest.mark.parametrize('how', [lambda model, _: copy.deepcopy(model), read_by_another_process], ids=['copy', 'file'])
@pytest.mark.parametrize('on', [True, False], ids=['on', 'off'])
def test_copies_of_a_gated_module_are_independent(
    case: Case, how: Callable[..., Any], on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated as their original, also where that is off, and of tensors of their own."""
    vanilla, model = case.out(case.model()), case.gate(case.model())
    expected = case.out(model)
    with gates_disabled(model) if not on else nullcontext():
        twin = how(model, monkeypatch)
        torch.testing.assert_close(case.out(twin), expected, rtol=0, atol=0)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    restore_attention(twin)
    assert type(twin.get_submodule(case.at)) is type(case.model().get_submodule(case.at))
    torch.testing.assert_close(case.out(twin), vanilla, rtol=0, atol=0)
    assert list(twin.state_dict()) == list(case.model().state_dict())
    torch.testing.assert_close(case.out(model), expected, rtol=0, atol=0)


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
    assert isinstance(twin, Careful) and isinstance(twin, Adapter) and not hasattr(twin, 'notes')


def with_call_replaced(module: Any) -> None:
    """As profilers do: torch looks ``_call_impl`` up on the module, and ``__call__`` on its class."""
    for name in ('_call_impl', '__call__'):
        setattr(module, name, functools.partial(getattr(module, name)))


def compiled_in_place(module: Any) -> None:
    module.compile(backend='eager')


def with_partial(module: Any) -> None:
    """As accelerate's hooks and packages of quantisation do."""
    module.forward = functools.partial(module.forward)


def with_closure(module: Any) -> None:
    """As mmengine's ``turn_on_activation_checkpointing`` and most profilers do."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def with_own_class(module: Any) -> None:
    """As profilers that replace ``__call__`` of one module do."""

    class Profiled(type(module)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    module.__class__ = Profiled


REACHED = (with_call_replaced, *(compiled_in_place for _ in range(TORCH >= (2, 7))))
# By what replaces a method, why a gate may not go into the module, and why one may not come off.
REPLACED = {
    with_partial: ('its method forward was replaced .*, by partial; gate the model before', 'after it is undone'),
    with_closure: (
        r'replaced on this very module, by <lambda> of .*test_gating.py; .*del module',
        'after it is undone',
    ),
    with_own_class: (r'which \w+ does not replace', 'undo that first'),
}


def check_switches(case: Case, model: Any, vanilla: Tensor, expected: Tensor) -> None:
    """Compare what a gated model computes, with its gates on, off, and on again."""
    assert not torch.allclose(vanilla, expected)
    torch.testing.assert_close(case.out(model), expected)
    with gates_disabled(model):
        torch.testing.assert_close(case.out(model), vanilla)
    torch.testing.assert_close(case.out(model), expected)


@some_cases
@pytest.mark.parametrize('change', [*REACHED, *REPLACED])
@pytest.mark.parametrize('first', [True, False])
def test_a_module_whose_call_or_method_was_replaced_calls_its_gate_or_refuses_it(
    name: str, change: Callable[[Any], None], first: bool
) -> None:
    """A call: before or after the gating, the gated forward is called by its name.

    A method: only after the gating, and that has to be undone before the gate is removed. Before it the gate would not
    be called: that is refused, also where a path takes all that fits, as the module would stay vanilla. Whatever is
    refused leaves the model as it was.
    """
    case = CASES[name]
    why_not_in, why_not_off = REPLACED.get(change, (None, None))
    model = case.model()
    if first:
        change(model.get_submodule(case.at))
    if first and why_not_in:
        before = anatomy(model)
        for path in (BLOCKS[case.block].path, *['**'] * (change is not with_own_class)):
            with pytest.raises(ConfigError, match=why_not_in):
                swap_attention(model, dict(case.rule, path=path))
        assert_same_anatomy(anatomy(model), before)
        return
    case.gate(model)
    if not first:
        change(model.get_submodule(case.at))
    check_switches(case, model, case.out(case.model()), case.out(case.gate(case.model())))
    before = anatomy(model)
    if why_not_off:
        with pytest.raises(ConfigError, match=why_not_off):
            restore_attention(model)
        assert_same_anatomy(anatomy(model), before)
    else:
        restore_attention(model)
        torch.testing.assert_close(case.out(model), case.out(case.model()))


@some_cases
def test_gates_are_off_in_one_thread_and_in_replicas_that_it_makes(name: str) -> None:
    """Those of DataParallel each run in another thread."""
    case = CASES[name]
    vanilla, model = case.out(case.model()), case.gate(case.model())
    expected = case.out(model)
    with ThreadPoolExecutor(1) as other:
        with gates_disabled(model):
            torch.testing.assert_close(case.out(model), vanilla, rtol=0, atol=0)
            torch.testing.assert_close(other.submit(case.out, model).result(), expected, rtol=0, atol=0)
            replica = replicated(model)
        torch.testing.assert_close(other.submit(case.out, replica).result(), vanilla, rtol=0, atol=0)
        torch.testing.assert_close(other.submit(case.out, replicated(model)).result(), expected, rtol=0, atol=0)


@pytest.mark.skipif(TORCH < (2, 7), reason='older Dynamo does not trace the operators')
@pytest.mark.parametrize('name', ['dense', 'dense of mmcv', 'over the map'])
def test_on_and_off_are_a_graph_each(name: str) -> None:
    """Each is compiled once; another thread runs the graph with gates meanwhile."""
    torch._dynamo.reset()
    case = CASES[name]
    vanilla, model = case.out(case.model()), case.gate(case.model())
    expected = case.out(model)
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    whole: Any = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), ThreadPoolExecutor(1) as threads:
        for number in range(2):
            torch.testing.assert_close(case.out(whole), expected)
            with gates_disabled(model):
                torch.testing.assert_close(case.out(whole), vanilla)
                if number:
                    torch.testing.assert_close(threads.submit(case.out, whole).result(), expected)
    assert len(graphs) <= 3  # a thread has its own modes, such as no_grad


@pytest.mark.skipif(TORCH < (2, 7), reason='older Dynamo compiles each layer anew, vanilla ones, too')
def test_layers_that_are_compiled_one_by_one_share_their_graphs() -> None:
    torch._dynamo.reset()
    model = nn.ModuleList([nn.MultiheadAttention(C, H) for _ in range(12)])
    x = torch.randn(5, 2, C)
    swap_attention(model, dict(PLUG, path='*'))
    layers = [torch.compile(layer, backend='eager', fullgraph=True) for layer in model]
    for _ in range(2):
        for layer in layers:
            layer(x, x, x, need_weights=False)
        with gates_disabled(model):
            for layer in layers:
                layer(x, x, x, need_weights=False)


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(C, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize('traced', [None, 'before', 'after'])
def test_gates_are_called_in_graphs_of_torch_fx_and_by_torch_func(traced: str | None) -> None:
    x, model = torch.randn(5, 2, C), Called()
    vanilla = model(x)
    called: Any = fx.symbolic_trace(model) if traced == 'before' else model
    swap_attention(called, dict(PLUG, path='attn'))
    if traced == 'after':
        called = fx.symbolic_trace(model)
    gated = called(x)
    assert not torch.allclose(gated, vanilla)
    given = {name: parameter.detach() for name, parameter in called.named_parameters()}
    torch.testing.assert_close(functional_call(called, given, (x,)), gated)
    given.update({name: given[name] + 1 for name in gate_parameters(called)})
    assert not torch.allclose(functional_call(called, given, (x,)), gated)
    with gates_disabled(called):
        torch.testing.assert_close(called(x), vanilla)
    restore_attention(called)
    torch.testing.assert_close(called(x), vanilla)


def test_attention_that_torch_fx_has_traced_is_refused() -> None:
    """Its code is part of the graph."""
    model = CASES['windows'].model()
    model.attn.w_msa = fx.symbolic_trace(model.attn.w_msa)
    with pytest.raises(ConfigError, match='attn.w_msa .* torch.fx has traced it.* gate the model before it is traced'):
        swap_attention(model, dict(PLUG, path='attn.w_msa'))
