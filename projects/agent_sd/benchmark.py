"""Time and memory of Stable Diffusion 1.5's UNet with softmax attention, with tomesd, and with AgentSD.

``python -m projects.agent_sd.benchmark``; the weights are random, so this says nothing about images.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import tomesd
import torch
from diffusers import UNet2DConditionModel

from projects.agent_sd.processor import apply_agent_sd, remove_agent_sd

SD15 = dict(cross_attention_dim=768, attention_head_dim=8)  # the rest are diffusers' defaults
SMALL = dict(cross_attention_dim=16, attention_head_dim=2, block_out_channels=(8,) * 4, norm_num_groups=4)
RATIO = 0.4
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
ATTENTIONS: dict[str, Callable[[Any], Any] | None] = {
    'softmax attention': None,
    f'tomesd, r = {RATIO}': lambda unet: tomesd.apply_patch(unet, ratio=RATIO),
    'AgentSD, r = 0, steps 1 to 20': lambda unet: apply_agent_sd(unet, ratio=0),
    f'AgentSD, r = {RATIO}, steps 1 to 20': lambda unet: apply_agent_sd(unet, ratio=RATIO),
    f'AgentSD, r = {RATIO}, from step 21 on': lambda unet: apply_agent_sd(unet, ratio=RATIO, early=0),
}


def resident(field: str) -> float:
    """Return ``VmRSS``, the resident set, or ``VmHWM``, the most that it was, in MiB (Linux)."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(field))


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return seconds of ``run``, the CPU's own on a CPU that others use too, and the most MiB that it took."""
    cuda = device.type == 'cuda'
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize()
    else:
        Path('/proc/self/clear_refs').write_text('5')  # the kernel's mark of the highest resident set
    before = torch.cuda.memory_allocated() / 2**20 if cuda else resident('VmRSS')
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    run()
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    return seconds, (torch.cuda.max_memory_allocated() / 2**20 if cuda else resident('VmHWM')) - before


def measure(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and MiB by round and attention, which take turns; the first round is for memory."""
    torch.manual_seed(0)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    unet = UNet2DConditionModel(**(SMALL if arguments.small else SD15)).to(device, dtype).eval()
    sample = torch.randn(arguments.batch, 4, arguments.size, arguments.size, device=device, dtype=dtype)
    text = torch.randn(arguments.batch, 77, unet.config.cross_attention_dim, device=device, dtype=dtype)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ATTENTIONS}
    with torch.inference_mode():
        unet(sample, 500, text)  # a warm-up
        for number in range(arguments.rounds + 1):
            if device.type == 'cpu':  # glibc hands freed memory back above this size, at a price in time
                ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25 if number else 2**16)
            for name, apply in ATTENTIONS.items():
                if apply is not None:
                    apply(unet)
                found[name].append(timed(lambda: unet(sample, 500, text), device))
                print(name, found[name][-1], file=sys.stderr)  # as they come: a round takes minutes on a CPU
                remove_agent_sd(unet)
                tomesd.remove_patch(unet)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--size', type=int, default=64, help='side of the latents')
    parser.add_argument('--batch', type=int, default=2, help='2 is one image with classifier-free guidance')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--small', action='store_true', help='a toy, to try the script')
    arguments = parser.parse_args(argv)
    found = measure(arguments)
    versions = f'torch {torch.__version__}, diffusers {diffusers.__version__}, {torch.get_num_threads()} threads'
    device = torch.cuda.get_device_name() if arguments.device == 'cuda' else platform.machine()
    print(f'{device}, {versions}, {arguments.dtype}, batch {arguments.batch}, latents {arguments.size}\n')
    print('| attention | seconds a call, median | least | most MiB beyond the weights |\n|---|---|---|---|')
    for name, rounds in found.items():
        seconds = [timing for timing, _ in rounds[1:]]
        print(f'| {name} | {median(seconds):.3f} | {min(seconds):.3f} | {rounds[0][1]:.1f} |')


if __name__ == '__main__':
    main()
