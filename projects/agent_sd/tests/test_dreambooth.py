"""Agents in the UNet that a script trains by accelerate, as diffusers' Dreambooth script does."""

import sys

import pytest

pytest.importorskip('diffusers', reason='AgentSD is a processor for diffusers, which is not installed')
pytest.importorskip('tomesd', reason='AgentSD merges tokens with tomesd, which is not installed')
pytest.importorskip('transformers', reason="diffusers' Stable Diffusion pipeline needs transformers")
pytest.importorskip('accelerate', reason="diffusers' scripts train by accelerate")

from accelerate import Accelerator
from diffusers import StableDiffusionPipeline
from tiny_model import save_tiny_model

from projects.agent_sd.dreambooth import main

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


def test_the_trained_unet_has_agents_in_all_steps(tmp_path, capsys):
    model = save_tiny_model(tmp_path)
    (tmp_path / 'train.py').write_text(SCRIPT)
    prepare, arguments = Accelerator.prepare, list(sys.argv)
    main(['--ratio', '0.25', str(tmp_path / 'train.py'), str(model), str(tmp_path / 'out')])
    assert 'counts (64, 48, 4) 0.25 0.075 0.3' in capsys.readouterr().out
    assert Accelerator.prepare is prepare and sys.argv == arguments
    StableDiffusionPipeline.from_pretrained(tmp_path / 'out')


def test_a_script_without_a_unet_says_so(tmp_path):
    (tmp_path / 'train.py').write_text(
        'import torch; from accelerate import Accelerator; Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))'
    )
    with pytest.raises(SystemExit, match='gave accelerate no UNet2DConditionModel'):
        main([str(tmp_path / 'train.py')])
