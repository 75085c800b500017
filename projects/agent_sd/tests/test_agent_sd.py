"""AgentSD against its formula written out, against tomesd, and in a pipeline."""

import copy

import pytest
import torch

pytest.importorskip('diffusers', reason='AgentSD is a processor for diffusers, which is not installed')
pytest.importorskip('tomesd', reason='AgentSD merges tokens with tomesd, which is not installed')

import tomesd
from diffusers import AutoencoderKL, DDIMScheduler, HeunDiscreteScheduler, PNDMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor

from projects.agent_sd import AgentSDProcessor, apply_agent_sd, benchmark, remove_agent_sd


@pytest.fixture(scope='module')
def pristine():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=('CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'),
        up_block_types=('CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'),
        cross_attention_dim=24,
        attention_head_dim=2,
    )
    return unet.double().eval()


@pytest.fixture
def unet(pristine):
    return copy.deepcopy(pristine)


def latents(batch=2, height=12, width=20, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 4, height, width, generator=draw, dtype=torch.float64),
        torch.randn(batch, 7, 24, generator=draw, dtype=torch.float64),
    )


def predict(unet, sample, text, step=10):
    with torch.no_grad():
        return unet(sample, step, encoder_hidden_states=text).sample


def self_attention(unet):
    return [module for name, module in unet.named_modules() if name.endswith('attn1')]


def merge_matrix(x, height, width, stride, number):
    """Return the (M, N) averages of the merging of one image's tokens (N, C), and the row of every token."""
    grid = torch.arange(height * width).view(height, width)
    kept = grid[: height // stride * stride : stride, : width // stride * stride : stride].flatten().tolist()
    sources = [token for token in range(height * width) if token not in kept]
    unit = x / x.norm(dim=-1, keepdim=True)
    best, target = (unit[sources] @ unit[kept].T).max(-1)
    order = best.argsort(descending=True).tolist()
    groups = {token: [token] for token in kept}
    for index in order[:number]:
        groups[kept[int(target[index])]].append(sources[index])
    for index in order[number:]:
        groups[sources[index]] = [sources[index]]
    average = torch.zeros(len(groups), height * width, dtype=x.dtype)
    row = torch.empty(height * width, dtype=torch.long)
    for number_of_row, members in enumerate(groups.values()):
        average[number_of_row, members] = 1 / len(members)
        row[members] = number_of_row
    return average, row


def written_out(attention, entering, normed, size, *, stride, ratio, agent_ratio, value_factor, power):
    """Return Eq. 9 of one image's tokens (N, C), head by head."""
    count = len(entering)
    average, row = merge_matrix(entering, *size, stride, int(count * ratio))
    agents = merge_matrix(entering, *size, stride, int(count * agent_ratio))[0] @ normed
    x = average @ normed
    q, k, v, a = attention.to_q(x), attention.to_k(x), attention.to_v(x), attention.to_q(agents)
    scale = (q.shape[-1] // attention.heads) ** -0.5
    heads = []
    for q1, k1, v1, a1 in zip(*(t.chunk(attention.heads, -1) for t in (q, k, v, a)), strict=True):
        if 2 * len(agents) < len(x):
            gathered = (a1 @ k1.T * scale).softmax(-1) @ v1
            heads.append((q1 @ a1.T * scale**power).softmax(-1) @ gathered + value_factor * v1)
        else:
            heads.append((q1 @ k1.T * scale).softmax(-1) @ v1)
    return attention.to_out[0](torch.cat(heads, -1))[row]


@pytest.mark.parametrize(
    ('size', 'options'),
    [
        ((12, 20), {}),
        ((18, 10), {}),  # no multiple of 4
        *(((16, 16), dict(value_factor=k)) for k in (0, 0.025, 0.15)),
        *(((12, 20), dict(power=power)) for power in (1, 0.5, 0.1)),
        *(((18, 10), dict(ratio=r)) for r in (0, 0.1, 0.5)),
        *((size, dict(early=0)) for size in ((12, 20), (18, 10))),
        ((16, 16), dict(early=0, ratio=0)),
        ((18, 10), dict(stride=(2, 2), agent_ratio=(0.8, 0.8))),
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
    used = dict(value_factor=0.075, power=0.3, ratio=0.4) | {
        name: value for name, value in options.items() if name in ('value_factor', 'power', 'ratio')
    }
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


def test_late_stage_is_tomesd(unet):
    sample, text = latents(2, 16, 24)
    apply_agent_sd(unet, early=0, random=False)
    ours = predict(unet, sample, text)
    remove_agent_sd(unet)
    tomesd.apply_patch(unet, ratio=0.4, use_rand=False)
    torch.testing.assert_close(ours, predict(unet, sample, text), atol=1e-12, rtol=0)


def test_removal_is_bit_for_bit(unet):
    sample, text = latents()
    before, processors = predict(unet, sample, text), dict(unet.attn_processors)
    keys = list(unet.state_dict())
    apply_agent_sd(unet)
    apply_agent_sd(unet, ratio=0.2)  # instead of the first
    assert list(unet.state_dict()) == keys
    assert not torch.equal(predict(unet, sample, text), before)
    remove_agent_sd(unet)
    assert torch.equal(predict(unet, sample, text), before)
    assert all(unet.attn_processors[name] is processor for name, processor in processors.items())
    assert not unet._forward_pre_hooks
    assert not any(module._forward_pre_hooks for module in unet.modules())
    remove_agent_sd(unet)  # of nothing


def test_removal_leaves_what_came_after(unet):
    apply_agent_sd(unet)
    later = AttnProcessor()
    unet.set_attn_processor(later)
    remove_agent_sd(unet)
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


def test_a_copy_is_cleaned_alone(unet):
    sample, text = latents()
    before = predict(unet, sample, text)
    apply_agent_sd(unet)
    with_agents = predict(unet, sample, text)
    apply_agent_sd(unet)
    twin = copy.deepcopy(unet)
    assert torch.equal(predict(twin, sample, text), with_agents)
    remove_agent_sd(twin)
    assert torch.equal(predict(twin, sample, text), before)
    assert not any(module._forward_pre_hooks for module in twin.modules())
    assert torch.equal(predict(unet, sample, text), with_agents)


@pytest.mark.parametrize('patched_first', [True, False])
def test_tomesd_beside_is_refused(unet, patched_first):
    sample, text = latents()
    if patched_first:
        tomesd.apply_patch(unet)
        with pytest.raises(ValueError, match=r'tomesd has patched this UNet.*tomesd\.remove_patch'):
            apply_agent_sd(unet)
        assert not any(isinstance(processor, AgentSDProcessor) for processor in unet.attn_processors.values())
    else:
        apply_agent_sd(unet)
        tomesd.apply_patch(unet)
        with pytest.raises(ValueError, match=r'tomesd has patched this UNet.*tomesd\.remove_patch'):
            predict(unet, sample, text)
    tomesd.remove_patch(unet)
    predict(apply_agent_sd(unet) and unet, sample, text)


def test_only_full_resolution_takes_part(unet):
    sample, text = latents(2, 10, 18)  # the coarser blocks have 5 x 9 tokens
    counts = {}
    for most in (1, 2):
        agent_sd = apply_agent_sd(unet, max_downsample=most)
        predict(unet, sample, text)
        counts[most] = {p.attention.to_q.in_features: p.counts and p.counts[0] for p in agent_sd.processors}
    assert counts == {1: {16: 180, 32: None}, 2: {16: 180, 32: 45}}


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


@pytest.fixture
def pipe(pristine):
    pytest.importorskip('transformers', reason="diffusers' Stable Diffusion pipeline needs transformers")
    from diffusers import StableDiffusionPipeline

    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    scheduler = DDIMScheduler(beta_schedule='scaled_linear')
    parts = dict(vae=vae, unet=copy.deepcopy(pristine), scheduler=scheduler)
    absent = dict.fromkeys(('text_encoder', 'tokenizer', 'safety_checker', 'feature_extractor'))
    pipe = StableDiffusionPipeline(**parts, **absent, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, agent_sd, steps, **kwargs):
    text = latents()[1]
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
        *((DDIMScheduler, share, 10, count) for share, count in ((0, 0), (0.4, 4), (0.04, 1), (1, 10))),
        *((PNDMScheduler, share, 10, count) for share, count in ((0.1, 1), (1, 11))),
        (PNDMScheduler, 0.4, 50, 21),  # the paper's, of 51 calls
        *((HeunDiscreteScheduler, share, 10, count) for share, count in ((0.1, 1), (0.4, 7), (1, 19))),
    ],
)
def test_schedule_in_a_pipeline(pipe, scheduler, early, steps, calls):
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
def test_options_out_of_range(unet, options):
    before = dict(unet.attn_processors)
    with pytest.raises(ValueError, match=next(iter(options))):
        apply_agent_sd(unet, **options)
    assert unet.attn_processors == before


def test_what_cannot_be_served_says_so(unet):
    with pytest.raises(ValueError, match='is no UNet'):
        apply_agent_sd('stable-diffusion')
    with pytest.raises(ValueError, match='no BasicTransformerBlock'):
        apply_agent_sd(torch.nn.Linear(2, 2))
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
