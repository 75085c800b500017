"""AgentSD against its formula written out, against tomesd, in a pipeline, and in the UNet that a script trains."""

import copy
import importlib
import sys
from functools import partial

import pytest
import torch

pytest.importorskip('diffusers', reason='AgentSD is a processor for diffusers, which is not installed')
pytest.importorskip('tomesd', reason='AgentSD merges tokens with tomesd, which is not installed')
pytest.importorskip('transformers', reason="diffusers' Stable Diffusion pipeline needs transformers")

import tomesd
from diffusers import DDIMScheduler, HeunDiscreteScheduler, PNDMScheduler, StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from tiny_model import CHANNELS, tiny_model
from tomesd.merge import bipartite_soft_matching_random2d

from projects.agent_sd import AgentSDProcessor, apply_agent_sd, benchmark, remove_agent_sd


@pytest.fixture(scope='module')
def pristine(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp('tiny'))


@pytest.fixture
def unet(pristine):
    return copy.deepcopy(pristine.unet).double().eval()


def latents(batch=2, height=12, width=20, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 4, height, width, generator=draw, dtype=torch.float64),
        torch.randn(batch, 7, CHANNELS, generator=draw, dtype=torch.float64),
    )


def predict(unet, sample, text, step=10):
    with torch.no_grad():
        return unet(sample, step, encoder_hidden_states=text).sample


def self_attention(unet):
    return [module for name, module in unet.named_modules() if name.endswith('attn1')]


def written_out(attention, entering, normed, size, *, stride, ratio, agent_ratio, value_factor, power):
    """Return Eq. 9 of one image's tokens (N, C), head by head; tomesd ranks and merges."""
    numbers = (int(len(entering) * share) for share in (ratio, agent_ratio))
    (merge, unmerge), (gather, _) = (
        bipartite_soft_matching_random2d(entering[None], size[1], size[0], stride, stride, number, no_rand=True)
        for number in numbers
    )
    x, agents = merge(normed[None])[0], gather(normed[None])[0]
    q, k, v, a = attention.to_q(x), attention.to_k(x), attention.to_v(x), attention.to_q(agents)
    scale = (q.shape[-1] // attention.heads) ** -0.5
    heads = []
    for q1, k1, v1, a1 in zip(*(t.chunk(attention.heads, -1) for t in (q, k, v, a)), strict=True):
        if 2 * len(agents) < len(x):
            gathered = (a1 @ k1.T * scale).softmax(-1) @ v1
            heads.append((q1 @ a1.T * scale**power).softmax(-1) @ gathered + value_factor * v1)
        else:
            heads.append((q1 @ k1.T * scale).softmax(-1) @ v1)
    return unmerge(attention.to_out[0](torch.cat(heads, -1))[None])[0]


@pytest.mark.parametrize(
    ('size', 'options'),
    [
        ((12, 20), {}),
        ((18, 10), dict(ratio=0.5)),  # no multiple of 4
        *(((16, 16), dict(value_factor=k, power=power)) for k, power in ((0, 1), (0.15, 0.1))),
        ((18, 10), dict(early=0)),
        ((16, 16), dict(early=0, ratio=0)),
        ((18, 10), dict(stride=(2, 2), agent_ratio=(0.8, 0.8), ratio=0)),
    ],
    ids=str,
)
def test_equals_the_formula(unet, size, options):
    block = next(m for m in unet.modules() if type(m).__name__ == 'BasicTransformerBlock')
    agent_sd = apply_agent_sd(unet, random=False, **options)
    seen = {}
    block.register_forward_pre_hook(lambda _, args: seen.update(entering=args[0]))
    block.attn1.register_forward_hook(lambda _, args, output: seen.update(normed=args[0], output=output))
    predict(unet, *latents(2, *size))  # the two halves of classifier-free guidance
    stage = agent_sd.stage
    used = {name: options.get(name, value) for name, value in dict(value_factor=0.075, power=0.3, ratio=0.4).items()}
    used |= dict(stride=agent_sd.stride[stage], agent_ratio=agent_sd.agent_ratio[stage])
    with torch.no_grad():
        for entering, normed, output in zip(seen['entering'], seen['normed'], seen['output'], strict=True):
            expected = written_out(block.attn1, entering, normed, size, **used)
            torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_counts_are_the_papers(unet):
    agent_sd = apply_agent_sd(unet)
    predict(unet, *latents(2, 64, 64))
    assert agent_sd.processors[0].counts == (4096, 2458, 256)
    agent_sd.stage = 1
    predict(unet, *latents(2, 64, 64))
    assert agent_sd.processors[0].counts == (4096, 2458, None)


def test_removal_is_bit_for_bit(unet):
    sample, text = latents()
    before, processors = predict(unet, sample, text), dict(unet.attn_processors)
    keys = list(unet.state_dict())
    apply_agent_sd(unet)
    apply_agent_sd(unet, ratio=0.2)  # instead of the first
    assert list(unet.state_dict()) == keys
    twin = copy.deepcopy(unet)
    remove_agent_sd(twin)
    assert torch.equal(predict(twin, sample, text), before)
    assert not torch.equal(predict(unet, sample, text), before)  # a copy is cleaned alone
    remove_agent_sd(unet)
    assert torch.equal(predict(unet, sample, text), before)
    assert all(unet.attn_processors[name] is processor for name, processor in processors.items())
    assert not unet._forward_pre_hooks
    assert not any(module._forward_pre_hooks for module in unet.modules())
    remove_agent_sd(unet)  # of nothing
    apply_agent_sd(unet)
    later = AttnProcessor()
    unet.set_attn_processor(later)
    remove_agent_sd(unet)  # which leaves what came after it
    assert all(processor is later for processor in unet.attn_processors.values())


@pytest.mark.parametrize('early', [0, 0.4])
def test_attention_slicing_before_and_after(unet, early, caplog):
    sample, text = latents(2, 16, 16)
    expected = predict(apply_agent_sd(unet, early=early) and unet, sample, text)
    agent_sd = apply_agent_sd(unet, early=early)
    unet.set_attention_slice(1)
    torch.testing.assert_close(predict(unet, sample, text), expected, atol=1e-12, rtol=0)
    assert 'AgentSD stays, although the attention was set to SlicedAttnProcessor' in caplog.text
    assert all(isinstance(processor.former, SlicedAttnProcessor) for processor in agent_sd.processors)
    caplog.clear()
    predict(unet, sample, text)
    assert not caplog.text
    remove_agent_sd(unet)
    assert {type(processor) for processor in unet.attn_processors.values()} == {SlicedAttnProcessor}
    apply_agent_sd(unet, early=early)  # slicing is on already
    torch.testing.assert_close(predict(unet, sample, text), expected, atol=1e-12, rtol=0)
    assert not caplog.text


def test_tomesd_beside_is_refused(unet):
    refused = partial(pytest.raises, ValueError, match=r'tomesd has patched this UNet.*tomesd\.remove_patch')
    tomesd.apply_patch(unet)
    with refused():
        apply_agent_sd(unet)
    assert not any(isinstance(processor, AgentSDProcessor) for processor in unet.attn_processors.values())
    tomesd.remove_patch(unet)
    apply_agent_sd(unet)
    tomesd.apply_patch(unet)
    with refused():
        predict(unet, *latents())


def test_only_full_resolution_takes_part(unet):
    sample, text = latents(2, 10, 18)  # the coarser blocks have 5 x 9 tokens
    counts = {}
    for most in (1, 2):
        agent_sd = apply_agent_sd(unet, max_downsample=most)
        predict(unet, sample, text)
        counts[most] = {p.attention.to_q.in_features: p.counts and p.counts[0] for p in agent_sd.processors}
    assert counts == {1: {8: 180, 16: None}, 2: {8: 180, 16: 45}}


def test_both_halves_of_guidance_share_destinations(unet):
    sample, text = latents(1)
    sample, text = sample.repeat(2, 1, 1, 1), text.repeat(2, 1, 1)
    apply_agent_sd(unet)
    state = torch.get_rng_state()
    first = predict(unet, sample, text)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first[0], first[1], atol=1e-12, rtol=0)
    assert (predict(unet, sample, text) - first).abs().max() > 1e-6  # the next step draws anew
    apply_agent_sd(unet, seed=1)
    assert (predict(unet, sample, text) - first).abs().max() > 1e-6
    apply_agent_sd(unet)
    assert torch.equal(predict(unet, sample, text), first)
    odd = [predict(apply_agent_sd(unet, random=random) and unet, sample[:1], text[:1]) for random in (True, False)]
    assert torch.equal(*odd)  # which has no two halves


def test_gradients_with_checkpointing(unet):
    sample, text = latents(2, 8, 12)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            unet.enable_gradient_checkpointing()
        apply_agent_sd(unet.train())
        unet.zero_grad()
        unet(sample, 10, encoder_hidden_states=text).sample.square().mean().backward()
        gradients.append([p.grad.clone() for m in self_attention(unet) for p in m.parameters()])
    assert all(g.abs().max() > 0 for g in gradients[0])
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


def generate(pipe, agent_sd, steps, **kwargs):
    text = latents()[1].float()
    return pipe(
        prompt_embeds=text[:1],
        negative_prompt_embeds=text[1:],
        height=16,
        width=24,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type='latent',
        callback_on_step_end=agent_sd.on_step_end,
        **kwargs,
    ).images


@pytest.mark.parametrize(
    ('scheduler', 'early', 'steps', 'calls'),
    [
        *((DDIMScheduler, share, 10, count) for share, count in ((0, 0), (0.04, 1), (1, 10))),
        (PNDMScheduler, 0.1, 10, 1),
        (PNDMScheduler, 0.4, 50, 21),  # the paper's, of 51 calls
        *((HeunDiscreteScheduler, share, 10, count) for share, count in ((0.1, 1), (0.4, 7))),
    ],
)
def test_schedule_in_a_pipeline(pristine, scheduler, early, steps, calls):
    pipe = copy.deepcopy(pristine)
    plms = dict(skip_prk_steps=True) if scheduler is PNDMScheduler else {}
    pipe.scheduler = scheduler(beta_schedule='scaled_linear', **plms)
    agent_sd = apply_agent_sd(pipe, early=early)
    stages = []
    pipe.unet.register_forward_pre_hook(lambda *_: stages.append(agent_sd.stage))
    first = generate(pipe, agent_sd, steps)
    assert stages == [0] * calls + [1] * (pipe.num_timesteps - calls)
    assert torch.equal(generate(pipe, agent_sd, steps), first)  # the second image begins like the first


@pytest.mark.parametrize(
    'options',
    [dict(ratio=1), dict(ratio=-0.1), dict(agent_ratio=(0.9, 1)), dict(stride=(1, 2)), dict(early=20)],
    ids=str,
)
def test_what_cannot_be_served_says_so(unet, options):
    before = dict(unet.attn_processors)
    with pytest.raises(ValueError, match=next(iter(options))):
        apply_agent_sd(unet, **options)
    assert unet.attn_processors == before
    for other, message in (('a name', 'is no UNet'), (torch.nn.Linear(2, 2), 'no BasicTransformerBlock')):
        with pytest.raises(ValueError, match=message):
            apply_agent_sd(other)
    apply_agent_sd(unet, stride=(16, 2))
    with pytest.raises(ValueError, match='stride=16'):
        predict(unet, *latents())
    apply_agent_sd(unet)
    sample, text = latents(2, 16, 16)
    with pytest.raises(ValueError, match='masked'):
        unet(sample, 10, encoder_hidden_states=text, attention_mask=torch.ones(2, 256))


def test_benchmark_prints_its_table(capsys):
    benchmark.main(['--size', '16', '--batch', '2', '--rounds', '1', '--small'])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')][2:]
    assert [row[0] for row in rows] == list(benchmark.ATTENTIONS)
    assert all(0 < float(row[2]) <= float(row[1]) and float(row[3]) >= 0 for row in rows)


@pytest.fixture
def dreambooth():
    pytest.importorskip('accelerate', reason="diffusers' scripts train by accelerate")
    return importlib.import_module('projects.agent_sd.dreambooth')


# Makes images of the class by a pipeline, then trains a UNet for a step and saves it in a pipeline.
SCRIPT = """
import sys, torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

def agents(unet):
    return [type(p).__name__ for name, p in unet.attn_processors.items() if 'attn1' in name].count('AgentSDProcessor')

assert __name__ == '__main__'
model, out = sys.argv[1:]
accelerator = Accelerator(cpu=True)
prior = StableDiffusionPipeline.from_pretrained(model)
unet = UNet2DConditionModel.from_pretrained(model, subfolder='unet')
before = unet.conv_in.weight.clone()
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
unet, optimizer = accelerator.prepare(unet, optimizer)
assert agents(prior.unet) == 0 and agents(unet) == 4
loss = unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 500]), torch.randn(2, 7, 16)).sample.square().mean()
accelerator.backward(loss)
optimizer.step()
assert not torch.equal(unet.conv_in.weight, before)
agent_sd = unet._agent_sd
print('counts', agent_sd.processors[0].counts, agent_sd.ratio, agent_sd.value_factor, agent_sd.power)
StableDiffusionPipeline.from_pretrained(model, unet=accelerator.unwrap_model(unet)).save_pretrained(out)
"""


def test_the_unet_that_a_script_trains_has_agents_in_all_steps(tmp_path, capsys, dreambooth):
    from accelerate import Accelerator

    tiny_model(tmp_path)
    (tmp_path / 'train.py').write_text(SCRIPT)
    prepare, arguments = Accelerator.prepare, list(sys.argv)
    files = [str(tmp_path / name) for name in ('train.py', 'model', 'out')]
    dreambooth.main(['--ratio', '0.25', '--power', '0.1', *files])
    assert 'counts (64, 48, 4) 0.25 0.075 0.1' in capsys.readouterr().out
    assert Accelerator.prepare is prepare and sys.argv == arguments
    StableDiffusionPipeline.from_pretrained(tmp_path / 'out')


def test_a_script_without_a_unet_says_so(tmp_path, dreambooth):
    (tmp_path / 'train.py').write_text(
        'import torch; from accelerate import Accelerator; Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))'
    )
    with pytest.raises(SystemExit, match='gave accelerate no UNet2DConditionModel'):
        dreambooth.main([str(tmp_path / 'train.py')])
