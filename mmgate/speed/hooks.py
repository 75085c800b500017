"""Hooks for faster training: compile, match once a step, sample by our operator, channels last, float32 or TF32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from mmgate.errors import ConfigError
from mmgate.ops.autocast import autocast_dtype, without_autocast
from mmgate.registry import HOOKS
from mmgate.rules import path_regex
from mmgate.wrappers import unwrap_model

from .derived import derived_class


class _PathsHook(Hook):
    """Base class of hooks that act on some modules of the model, which path patterns name.

    Args:
        paths: Patterns like those of ``mmgate.Gated``, each of which has to match. None takes ``usual``, of which at
            least one has to match.

    Attributes:
        usual: Patterns to use without ``paths``.
    """

    usual: tuple[str, ...] = ()

    def __init__(self, paths: str | Sequence[str] | None = None) -> None:
        self.paths = (paths,) if isinstance(paths, str) else paths
        if self.paths is not None and (not self.paths or not all(isinstance(one, str) for one in self.paths)):
            raise ConfigError(f'{type(self).__name__}: paths must be a pattern or a list of some, got {paths!r}.')

    def modules(self, runner: Runner) -> dict[str, nn.Module]:
        """Return the modules whose names match the patterns, without those that lie inside of another match.

        Raises:
            ConfigError: A pattern matches nothing; the message lists the model's parts.
        """
        model = unwrap_model(runner.model)
        names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        found: dict[str, nn.Module] = {}
        idle = []
        for pattern in self.usual if self.paths is None else self.paths:
            matched = {name: module for name, module in names.items() if path_regex(pattern).fullmatch(name)}
            found.update(matched)
            if not matched:
                idle.append(repr(pattern))
        if idle and (self.paths is not None or not found):
            parts = ', '.join(name for name, _ in model.named_children())
            raise ConfigError(
                f'{type(self).__name__}: no module of {type(model).__name__} matches {", ".join(idle)}; its parts are '
                f'{parts}.'
            )
        inside = {name for name in found for other in found if name.startswith(f'{other}.')}
        return {name: module for name, module in found.items() if name not in inside}


@HOOKS.register_module()
class CompileHook(_PathsHook):
    """Hook that compiles modules of the model with torch.compile: by default backbone, encoder layers and decoder.

    Each module is compiled by itself. The decoder of a detector is one module, with the refinement of its reference
    points; of Mask2Former's, whose head goes through the layers, each layer is one.

    mmengine's ``compile=True`` compiles the whole step with losses and matching, whose sizes differ from image to
    image. This hook compiles modules in place, so that checkpoints keep their keys and load without it. The first
    iterations wait for the compiler, minutes on a CPU; evaluation between epochs is compiled separately. Probes and
    :class:`GateStatisticsHook` do not see into compiled modules.

    On a CPU, without a mode, dropout draws its numbers by torch's own generator, as without the hook: it is faster
    there than the one that inductor compiles, and the same seed trains the same model.

    Args:
        paths: Patterns like those of ``mmgate.Gated``; by default ``'backbone'``, ``'**.encoder.layers.*'``,
            ``'decoder'`` and ``'**.transformer_decoder.layers.*'``, of which at least one has to match.
        mode: Option of torch.compile. ``'reduce-overhead'`` and ``'max-autotune'`` replay CUDA graphs on a GPU, one for
            each size of the images; pad them to few sizes by ``pad_size_divisor`` of the data preprocessor.
        dynamic: Option of torch.compile; None compiles for the first size and, at the second, for any size.
        backend: Option of torch.compile.

    Raises:
        ConfigError: ``paths`` is malformed, or CUDA graphs are asked for below torch 2.2. :meth:`before_train` raises
            it if a pattern matches nothing, and for CUDA graphs if gradients of several iterations add up.
    """

    usual = ('backbone', '**.encoder.layers.*', 'decoder', '**.transformer_decoder.layers.*')

    def __init__(
        self,
        paths: str | Sequence[str] | None = None,
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        backend: str = 'inductor',
    ) -> None:
        super().__init__(paths)
        self.options: dict[str, Any] = dict(mode=mode, dynamic=dynamic, backend=backend)
        self.replays = mode in ('reduce-overhead', 'max-autotune')
        if self.replays and not hasattr(torch.compiler, 'cudagraph_mark_step_begin'):
            raise ConfigError(
                f'CompileHook: mode={mode!r} replays CUDA graphs by what is new in torch 2.2, this is torch '
                f'{torch.__version__}: leave out the mode.'
            )

    def before_train(self, runner: Runner) -> None:
        """Let torch.compile compile each of the modules in place, at its first call."""
        modules = self.modules(runner)
        if self.replays and _accumulates(runner.optim_wrapper):
            # A graph's next replay overwrites the gradients of the one before.
            raise ConfigError(
                f'CompileHook: mode={self.options["mode"]!r} replays CUDA graphs, which cannot add up the gradients of '
                'several iterations; set optim_wrapper.accumulative_counts to 1, or leave out the mode.'
            )
        for module in dict.fromkeys(modules.values()):
            module.compile(**self.options, options=self._random_numbers(module))
        runner.logger.info(f'CompileHook: {", ".join(modules)} are compiled as they are first called.')

    def _before_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = 'train') -> None:
        """Tell CUDA graphs, in training and evaluation, that results of the last iteration are needed no more."""
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()

    def _random_numbers(self, module: nn.Module) -> dict[str, Any] | None:
        """Return, for a module on a CPU, the option of inductor that leaves random numbers to torch; else None."""
        # torch.compile takes a mode or options, and other backends know no such option.
        if self.options['backend'] != 'inductor' or self.options['mode'] is not None:
            return None
        on_cpu = all(tensor.device.type == 'cpu' for tensor in module.parameters())
        return {'fallback_random': True} if on_cpu else None


def _accumulates(optimizer: Any) -> bool:
    """Return True if an optimizer wrapper, or one of several, adds up the gradients of several iterations."""
    wrappers = getattr(optimizer, 'optim_wrappers', {'': optimizer}).values()
    return any(getattr(wrapper, '_accumulative_counts', 1) > 1 for wrapper in wrappers)


@HOOKS.register_module()
class MatchOnceHook(Hook):
    """Hook that lets a DETR-like detector or Mask2Former match and compute its losses once a step, and rarely wait.

    The head becomes what :func:`mmgate.speed.matching.MatchedOnce` builds. Sizes of feature maps stay on the CPU,
    DINO's denoising queries are made without waiting for the device, and all losses are summed in one operation.
    Values are mmdet's up to rounding. Labels of denoising queries are as random as mmdet's, by other numbers. The
    state dict does not change. Parts that the model's classes override stay as they are, and so does a head whose
    targets, losses, costs or assigner are not mmdet's usual ones, which the log says.
    """

    def before_train(self, runner: Runner) -> None:
        """Change the classes of the model's head, detector and layers in place."""
        from .matching.model import match_model_once  # which imports mmdet, and other hooks work without it

        for line in match_model_once(unwrap_model(runner.model)):
            runner.logger.info(f'MatchOnceHook: {line}')


@HOOKS.register_module()
class SamplingHook(Hook):
    """Hook that lets mmcv's deformable attention without a gate sample by mmgate's operator, where that is faster.

    That is on CPUs, on which mmcv falls back to grid_sample, with the compiled backend ``native``, and on GPUs on which
    ``triton`` was measured faster than mmcv's operator. Parameters, their names and results (to rounding) stay. The log
    says how many modules changed, or why none.
    """

    def before_run(self, runner: Runner) -> None:
        """Change the classes of the modules in place."""
        from .sampling import sample_by_operator  # which imports mmcv, and other hooks work without it

        model = unwrap_model(runner.model)
        device = next((parameter.device for parameter in model.parameters()), torch.device('cpu'))
        runner.logger.info(f'SamplingHook: {sample_by_operator(model, device)}')


@HOOKS.register_module()
class ChannelsLastHook(_PathsHook):
    """Hook that lets the backbone compute in the channels-last memory layout, which is faster on CPUs.

    Convolutions, norms and activations keep the layout of their input. Weights do not change, in memory and in
    checkpoints. The backbone's maps come out in torch's default layout, because mmcv's compiled operators (RoIAlign,
    deformable convolution, CARAFE and others) read memory as NCHW whatever the strides are. A module with such
    operators inside of it stays as it is, which the log says. ``paths`` (``'backbone'`` by default) and errors are as
    in :class:`CompileHook`, but :meth:`before_run` raises them.
    """

    usual = ('backbone',)

    def before_run(self, runner: Runner) -> None:
        """Register hooks on the backbone (or ``paths``) that convert its inputs to channels last, its outputs back."""
        for name, module in self.modules(runner).items():
            operators = sorted({type(inner).__name__ for inner in module.modules() if _is_of_mmcv_ops(inner)})
            if operators:
                runner.logger.info(
                    f'ChannelsLastHook: {name} stays as it is, because its {", ".join(operators)} would read '
                    'channels-last memory as NCHW.'
                )
            elif _channels_last not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_channels_last)
                module.register_forward_hook(_channels_first)


def _is_of_mmcv_ops(module: nn.Module) -> bool:
    """Return True if a module is one of mmcv's operators, by the name of its class, as mmcv may not be installed."""
    return any(f'{base.__module__}.'.startswith('mmcv.ops.') for base in type(module).__mro__)


def _channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert every 4-dimensional tensor among a module's arguments to channels last; a forward pre-hook."""
    return _in_layout(args, torch.channels_last)


def _channels_first(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Convert every 4-dimensional tensor of a module's output to torch's default layout; a forward hook."""
    return _in_layout(output, torch.contiguous_format)


def _in_layout(tree: Any, layout: torch.memory_format) -> Any:
    def convert(x: object) -> object:
        return x.contiguous(memory_format=layout) if isinstance(x, Tensor) and x.dim() == 4 else x

    return tree_map(convert, tree)


@HOOKS.register_module()
class Float32Hook(_PathsHook):
    """Hook that keeps modules in float32 under mixed precision: by default layers that predict boxes and logits.

    A coordinate in bfloat16 has 8 bits, which is four pixels in a thousand, and mmdet's heads refine boxes in the dtype
    of the layers that predict them. Without autocast the hook changes nothing. ``paths`` (by default the layers that
    predict reference points, boxes, classes and sampling offsets in DETR-like detectors) and errors are as in
    :class:`CompileHook`, but :meth:`before_run` raises them.
    """

    usual = ('**.reference_points_fc', '**.*reg_branches.*', '**.*cls_branches.*', '**.sampling_offsets')

    def before_run(self, runner: Runner) -> None:
        """Exempt the modules from autocast, so that they compute in float32."""
        for module in dict.fromkeys(self.modules(runner).values()):
            keep_float32(module)


@HOOKS.register_module()
class TF32Hook(Hook):
    """Hook that lets a GPU round the factors of float32 products to TF32, 10 bits, during the run.

    It is ``torch.set_float32_matmul_precision('high')``, for matrix products of the whole process; convolutions of
    cuDNN use TF32 in torch anyway. Under mixed precision it concerns what stays in float32. mmgate's own kernels do not
    change, nor does a run on a CPU.
    """

    def before_run(self, runner: Runner) -> None:
        """Allow TF32 if there is a GPU."""
        self._before = torch.get_float32_matmul_precision()
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision('high')

    def after_run(self, runner: Runner) -> None:
        """Restore the precision from before the run."""
        torch.set_float32_matmul_precision(self._before)


def keep_float32(module: nn.Module) -> None:
    """Exempt a module from autocast from now on: it converts its inputs to float32 and computes in float32."""
    if not isinstance(module, _Float32):
        cls: Any = type(module)
        module.__class__ = derived_class(_Float32, cls, '')


class _Float32(nn.Module):
    """Mixin that lets a module compute in float32 under autocast; it comes before the module's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = list(self.parameters())[:1]
        # A module without parameters, such as RoIAlign, is where its inputs are.
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on = [x.device.type for x in own or given if autocast_dtype(x.device.type) is not None]
        # Without autocast a model of another dtype stays as it is.
        if own and not on and own[0].dtype != torch.float32:
            return super().forward(*args, **kwargs)
        args, kwargs = tree_map(_wide, (args, kwargs))
        with without_autocast(on[0]) if on else nullcontext():
            return super().forward(*args, **kwargs)


def _wide(x: object) -> object:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
