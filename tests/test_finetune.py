"""Gates as adapters: trained alone, saved, loaded, taken off, in hosts of every kind."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from mmengine.model import BaseTTAModel, ExponentialMovingAverage
from mmengine.registry import MODELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from zoo import ZOO

import mmgate
from mmgate.errors import ConfigError
from mmgate.wrappers import unwrap_model

RULES: dict[str, list[dict[str, Any]]] = {
    'deformable_detr': [
        dict(path='encoder.layers.*.self_attn', type='mmgate.PLuGMultiScaleDeformableAttention'),
        dict(path='decoder.layers.*.self_attn', type='mmgate.SDPAGatedMultiheadAttention'),
    ],
    'retinanet_pvt': [dict(path='backbone.**', type='mmgate.PLuGMultiheadAttention')],
    'retinanet_pvtv2': [dict(path='backbone.**', type='mmgate.SAGAAttention')],  # parts of the host are left out
    'segformer': [dict(path='backbone.**', type='mmgate.DifferentialGatedMultiheadAttention')],
    'swin': [dict(path='backbone.**', type='mmgate.PLuGMultiheadAttention')],
}
HOSTS = tuple(RULES)
ROUNDING = dict(rtol=1e-5, atol=1e-5)  # products round by where in memory their factors lie


def config(host: str) -> Any:
    return zoo.reduced(ZOO[host][0]).model


def gated(host: str, seed: int = 0, **options: Any) -> nn.Module:
    cfg = copy.deepcopy(config(host))
    name = f'{ZOO[host][0].partition("::")[0]}.{cfg.pop("type")}'
    torch.manual_seed(seed)
    model = MODELS.build(dict(type='mmgate.Gated', host=name, **{'attention': RULES[host], **options}, **cfg))
    model.init_weights()
    return model


def vanilla(host: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(copy.deepcopy(config(host)))
    model.init_weights()
    return model


def train(model: nn.Module, host: str, steps: int = 2) -> None:
    data = zoo.batch(zoo.reduced(ZOO[host][0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model.train()
    for _ in range(steps):
        losses = zoo.tensors(model(**copy.deepcopy(data), mode='loss'))
        optimizer.zero_grad()
        sum(loss.sum() for loss in losses if loss.requires_grad).backward()
        optimizer.step()
    kept = {id(p) for group in optimizer.param_groups for p in group['params'] if optimizer.state.get(p)}
    assert kept <= {id(p) for p in model.parameters() if p.requires_grad}


def outputs(model: nn.Module, host: str) -> list[Tensor]:
    cfg = zoo.reduced(ZOO[host][0])
    torch.manual_seed(0)
    with torch.no_grad():
        return zoo.tensors(zoo.forward(model.eval(), zoo.batch(cfg), 'tensor'))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr('mmgate.checkpoints.gates_file.log', lambda text, level: said.append(text))
    return said


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize('trained', ['gates', 'attention'])
@pytest.mark.parametrize('host', HOSTS)
def test_a_file_holds_what_was_trained(host: str, trained: str, tmp_path: Path, warned: list[str]) -> None:
    """The rest is equal bit for bit, weight decay and batch norms included; the file gates a vanilla model."""
    model = gated(host, train=trained)
    plain, before = vanilla(host), snapshot(model)
    gates = set(mmgate.gate_parameters(model))
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert chosen == gates if trained == 'gates' else chosen > gates
    train(model, host)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved <= chosen and moved & gates
    expected, file = outputs(model, host), tmp_path / 'gates.safetensors'
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == chosen
    from_file = gated(host, attention=None, gates=str(file))
    with mmgate.gates_disabled(from_file):
        kept = from_file.state_dict()
    kept.update(from_file.state_dict())
    assert all(torch.equal(kept[name], tensor) for name, tensor in load_file(file).items())  # no initialisation drew it
    from_file.load_state_dict(plain.state_dict(), strict=False)  # a vanilla checkpoint, after the gates
    other = gated(host, seed=1)
    other.load_state_dict(plain.state_dict(), strict=False)
    mmgate.load_gates(other, file)
    for loaded in (from_file, other):
        torch.testing.assert_close(outputs(loaded, host), expected, rtol=0, atol=0)
    assert not warned
    with mmgate.gates_disabled(model):
        without = outputs(model, host)
    torch.testing.assert_close(outputs(model, host), expected, rtol=0, atol=0)
    removed = mmgate.restore_attention(model)
    assert removed and not mmgate.gate_parameters(model)
    torch.testing.assert_close(outputs(model, host), without, **ROUNDING)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    if trained == 'gates':
        torch.testing.assert_close(without, outputs(plain, host), **ROUNDING)
        assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize('host, head', [('retinanet_pvtv2', 'bbox_head'), ('swin', 'decode_head')])
def test_training_modes(host: str, head: str) -> None:
    """Frozen batch norms and dropouts rest while the gates train; the model itself knows that it trains."""
    model = gated(host, train='gates')
    for one in (model, copy.deepcopy(model)):
        one.train()
        assert one.training and one.get_submodule(head).training
        working = [n for n, m in one.named_modules() if isinstance(m, (nn.BatchNorm2d, nn.Dropout)) and m.training]
        assert working and all('.attn.' in name for name in working)
    mmgate.train_only_gates(model, 'all')
    model.train()
    assert all(p.requires_grad for p in model.parameters()) and all(module.training for module in model.modules())


def test_what_lies_before_the_gates_rests_and_what_was_frozen_stays_so() -> None:
    model = gated('deformable_detr')
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen  # the first stage of the ResNet
    mmgate.train_only_gates(model)
    levels: list[Tensor] = []
    model.neck.register_forward_hook(lambda module, args, out: levels.extend(out))
    train(model, 'deformable_detr', steps=1)
    assert levels and not any(level.requires_grad for level in levels)
    mmgate.restore_attention(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


def test_another_host_is_told_by_its_first_differences(tmp_path: Path) -> None:
    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(gated('segformer'), file)
    cfg = copy.deepcopy(config('segformer'))
    cfg.decode_head.num_classes = 7
    with pytest.raises(ConfigError, match=r'decode_head\.conv_seg\.weight is \(7, 256, 1, 1\) instead of (?!.*more)'):
        mmgate.load_gates(MODELS.build(cfg), file)
    cfg.decode_head.channels = 64
    with pytest.raises(ConfigError, match=r'; .*; .* and \d+ more\. Give the config'):
        mmgate.load_gates(MODELS.build(cfg), file)
    other = vanilla('segformer')
    mmgate.swap_attention(other, dict(path='backbone.**', type='PLuGMultiheadAttention'))
    with pytest.raises(ConfigError, match='Leave `attention` away'):
        mmgate.load_gates(other, file)


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x)[0]


PLUG = dict(path='*.attn', type='mmgate.PLuGMultiheadAttention')


def layers(rules: Any = PLUG, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(dropout), Layer(dropout))
    for rule in [rules] if isinstance(rules, dict) else rules:
        mmgate.swap_attention(model, rule)
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.3)
    return model


def _described(path: Path, **changes: Any) -> None:
    with safe_open(path, framework='pt') as opened:
        meta = {**json.loads(opened.metadata()['mmgate.gates']), **changes}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    described = {key: value for key, value in meta.items() if value is not None}
    save_file(tensors, path, metadata={'mmgate.gates': json.dumps(described)})


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (Path.unlink, 'no such file'),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), 'cannot be read as a file of gates'),
        (lambda path: save_file({'a': torch.zeros(1)}, path), 'no file of gates'),
        (
            lambda path: torch.save({}, path),
            r'whole checkpoint.*gates\.py extract CONFIG .*bad\.safetensors gates\.saf',
        ),
        (
            lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
            'whole checkpoint, no file of gates',
        ),
        (lambda path: _described(path, version=7, more=1), 'of version 7, not 1'),
        (lambda path: _described(path, rules='x', more=1), 'damaged'),
        (lambda path: _described(path, gates=['x.gml.weight']), 'tensors are missing'),
        (lambda path: _described(path, rules={'': [dict(PLUG, path='*.mlp')]}), 'do not fit'),
        (lambda path: _described(path, rules={'': [dict(PLUG, ratio=0.5)]}), 'do not fit'),
    ],
    ids=[
        'missing',
        'cut',
        'foreign',
        'checkpoint',
        'old checkpoint',
        'version',
        'description',
        'tensors',
        'path',
        'option',
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, spoil: Any, message: str) -> None:
    """And the model is as it was."""
    file, model = tmp_path / 'bad.safetensors', layers(())
    mmgate.save_gates(layers(), file)
    spoil(file)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        mmgate.load_gates(model, file)
    assert not mmgate.gate_parameters(model) and type(model[0].attn) is nn.MultiheadAttention
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ('ask', 'words'),
    [
        (lambda folder: mmgate.train_only_gates(layers(())), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(()), folder / 'x'), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(), folder / 'no/such/folder/x'), 'cannot be written'),
        (lambda folder: mmgate.train_only_gates(layers(), 'gate'), "'gates', 'attention', 'all'"),
        (lambda folder: MODELS.build(dict(type='mmgate.Gated', host='mmdet.DETR')), 'attention .* or gates'),
    ],
    ids=['train', 'save', 'folder', 'mode', 'config'],
)
def test_what_cannot_be_done_is_refused(ask: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(tmp_path)
    assert not list(tmp_path.iterdir())


def test_equal_rules_are_told_as_equal(tmp_path: Path) -> None:
    """Tuples are lists in JSON, one path is a list of one, a gate's name may lack its scope, a backend says nothing."""
    model, file = layers(dict(PLUG, backend='chunked')), tmp_path / 'g.safetensors'
    mmgate.save_gates(model, file)
    other = layers(dict(path=('*.attn',), type='PLuGMultiheadAttention'))
    assert mmgate.load_gates(other, file)
    plain = layers(())
    mmgate.load_gates(plain, file)
    assert plain[0].attn.gate.backend == 'auto'
    backbone = dict(type='mmgate.AgentPVT', num_layers=(1, 1, 1, 1), embed_dims=8, num_heads=(1, 1, 1, 1))
    preset = MODELS.build(backbone)
    preset.init_weights()
    mmgate.save_gates(preset, file)
    again = MODELS.build(backbone)
    assert mmgate.load_gates(again, file)
    added = mmgate.gate_parameters(preset)
    assert all(torch.equal(p, added[name]) for name, p in mmgate.gate_parameters(again).items())


def test_calls_are_replayed_one_after_the_other(tmp_path: Path) -> None:
    rules = [dict(PLUG, path='0.attn'), dict(path='**', type='mmgate.SDPAGatedMultiheadAttention')]
    model, file, x = layers(rules), tmp_path / 'g.safetensors', torch.randn(1, 3, 16)
    for saved, other in ((model, layers(())), (nn.Sequential(model), nn.Sequential(layers(())))):
        mmgate.save_gates(saved, file)  # the second is a model that was swapped in a part
        mmgate.load_gates(other, file)
        torch.testing.assert_close(other(x), saved(x))


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        """As mm backbones freeze their stages."""
        return super().train(mode).requires_grad_(False)


def test_gates_in_frozen_stages_train() -> None:
    model = nn.Sequential(Frozen(Layer(), Layer()))
    mmgate.swap_attention(model, dict(PLUG, path='0.*.attn'))
    names = mmgate.train_only_gates(model)
    assert names == list(mmgate.gate_parameters(model))
    model.eval().train()
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    mmgate.train_only_gates(model, 'all')
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dropout_works_in_a_gate_inside_an_attention() -> None:
    from mmcv.cnn.bricks.transformer import MultiheadAttention

    model = nn.Sequential(MultiheadAttention(16, 2, 0.5, 0.5, dropout_layer=dict(type='Dropout', drop_prob=0.5)))
    mmgate.swap_attention(model, dict(path='0.attn', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model)
    assert model[0].attn.training and not (model[0].proj_drop.training or model[0].dropout_layer.training)


def test_a_mode_that_is_set_while_gates_are_disabled_stays() -> None:
    model, x = layers(dropout=0.5).train(), torch.randn(1, 3, 16)
    with mmgate.gates_disabled(model):
        model.eval()
    assert torch.equal(model(x), model(x)) and not any(module.training for module in model.modules())


def test_trained_tensors_are_forgotten_with_the_gates(tmp_path: Path) -> None:
    """No hook of an earlier file, nor one of gates that were taken off, has a say in what is loaded."""
    model, plain = layers(), layers(())
    trained, gates = tmp_path / 'trained.safetensors', tmp_path / 'gates.safetensors'
    mmgate.save_gates(model, gates)
    mmgate.train_only_gates(model, 'attention')
    for parameter in model.parameters():
        parameter.data += 1
    mmgate.save_gates(model, trained)
    for then in (lambda other: mmgate.load_gates(other, gates), mmgate.restore_attention):
        other = layers(())
        mmgate.load_gates(other, trained)
        then(other)
        other.load_state_dict(plain.state_dict(), strict=False)
        state = other.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize('wrap', [nn.DataParallel, lambda model: model], ids=['wrapped', 'part'])
def test_what_trains_is_saved_wherever_it_was_said(wrap: Any, tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(2, 2), layers()), tmp_path / 'g.safetensors'
    mmgate.train_only_gates(wrap(model[1]), 'attention')
    model[0].requires_grad_(False)
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == {name for name, p in model.named_parameters() if p.requires_grad}


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


def test_other_vanilla_values_are_warned_of(tmp_path: Path, warned: list[str]) -> None:
    """Of the model and of a checkpoint that comes later; not of another dtype, nor by files that hold no checksums."""
    plain, other, file = layers(()), layers(()), tmp_path / 'g.safetensors'
    nn.init.zeros_(other[1].attn.out_proj.weight)
    mmgate.save_gates(layers(), file)
    mmgate.load_gates(layers(()), file)
    mmgate.load_gates(copy.deepcopy(other).half(), file)
    assert not warned
    model = copy.deepcopy(other)
    mmgate.load_gates(model, file)
    assert '1 of 8 tensors that were compared differ (1.attn.out_proj.weight)' in warned.pop()
    model = copy.deepcopy(model)
    for state, warnings in ((plain, 0), (other, 1), (model, 0)):  # the last has the gates
        model.load_state_dict(state.state_dict(), strict=False)
        assert len(warned) == warnings
        warned.clear()
    _described(file, values=None)
    mmgate.load_gates(other, file)
    assert not warned


@pytest.mark.parametrize('norm', [nn.utils.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_projections(norm: Any, tmp_path: Path) -> None:
    """The gates go into a file for models that are parametrized alike, and come off."""
    model, other, x, file = layers(), layers(()), torch.randn(1, 3, 16), tmp_path / 'g.safetensors'
    names = list(mmgate.gate_parameters(model))
    for one in (model, other):
        norm(one[0].attn.out_proj)
    assert list(mmgate.gate_parameters(model)) == names
    vanilla = other(x)
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == set(names)
    mmgate.load_gates(other, file)
    torch.testing.assert_close(other(x), model(x))
    with pytest.raises(ConfigError, match=r'0\.attn\.out_proj\..* is missing instead of'):
        mmgate.load_gates(layers(()), file)
    for one in (model, other):
        mmgate.restore_attention(one)
        torch.testing.assert_close(one(x), vanilla)


def test_shared_projections_are_no_gates() -> None:
    model = layers(())
    model[0].attn.out_proj.weight = model[1].attn.out_proj.weight
    model[0].attn.out_proj.bias = model[1].attn.out_proj.bias
    vanilla_names = dict(model.named_parameters())
    mmgate.swap_attention(model, PLUG)
    assert not set(mmgate.gate_parameters(model)) & set(vanilla_names)


@pytest.mark.parametrize('inside', [True, False], ids=['inside', 'beside'])
def test_norms_of_gated_attention_keep_their_statistics(inside: bool) -> None:
    from mmseg.models.backbones.mit import EfficientMultiheadAttention

    model = nn.Sequential(EfficientMultiheadAttention(16, 2, sr_ratio=2, norm_cfg=dict(type='BN')))
    if inside:
        model[0].attn.norm = nn.BatchNorm2d(16)
    mmgate.swap_attention(model, dict(path='0', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model)
    model.train()
    gated = model[0].attn
    assert gated.training and gated.gate.training and gated.gate.gml.training
    assert not model[0].norm.training and not (inside and gated.norm.training)
    mmgate.restore_attention(model)
    assert all(module.training for module in model.modules())
