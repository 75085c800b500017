"""A Stable Diffusion that is small enough for a test, in a folder as diffusers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

CHANNELS = 16  # of its texts


def tiny_model(folder: Path) -> StableDiffusionPipeline:
    """Return one of random weights, 2 pixels a latent, words spelled by letters; it is in ``folder / 'model'``."""
    torch.manual_seed(0)
    letters = 'abcdefghijklmnopqrstuvwxyz.,'
    words = [*letters, *(f'{letter}</w>' for letter in letters), '<|startoftext|>', '<|endoftext|>']
    spelling = folder / 'spelling'
    spelling.mkdir(parents=True)
    (spelling / 'vocab.json').write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (spelling / 'merges.txt').write_text('#version: 0.2\n')
    tokenizer = CLIPTokenizer.from_pretrained(spelling, model_max_length=77)
    text = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=CHANNELS,
        intermediate_size=CHANNELS,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    pipe = StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(4, 4),
            norm_num_groups=2,
            latent_channels=4,
            down_block_types=('DownEncoderBlock2D',) * 2,
            up_block_types=('UpDecoderBlock2D',) * 2,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'),
            up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D'),
            cross_attention_dim=CHANNELS,
            attention_head_dim=2,
            sample_size=16,
        ),
        scheduler=PNDMScheduler(beta_schedule='scaled_linear', skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / 'model')
    return pipe
