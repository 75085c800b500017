"""Export models that have no config (of transformers, timm, plain torch) to ONNX from Python.

Here the graph is that of the model's ``forward``, for inputs of one size, and is compared on these inputs. Detectors of
mm packages have another way, by their config: the graph makes boxes, and is compared on images; see :mod:`.export`.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmgate._environment import log, why_not
from mmgate.adapter import gated_modules, is_off
from mmgate.errors import ConfigError, first_line
from mmgate.gates.base.deformable import MultiScaleDeformableAttention
from mmgate.gating import remove_gate
from mmgate.listing import list_attention
from mmgate.swap import swap_attention
from mmgate.wrappers import unwrap_model

from .runtime import NOTES_KEY, Exported
from .sampling import exportable_sampling
from .tracing import plain_attention

if TYPE_CHECKING:
    from torch.export import ExportedProgram

OPSET = 18
NEEDED = ('onnx', 'onnxscript', 'onnxruntime')
# First torch that can export whole detectors.
OLDEST = (2, 9)
# Largest number of images that a file takes, if it takes any number.
MAX_BATCH = 64


def check_environment() -> None:
    """Raise ConfigError if no ONNX file can be written here: torch is too old, or a package is missing."""
    if tuple(int(part) for part in torch.__version__.split('.')[:2]) < OLDEST:
        raise ConfigError(
            f'exporting needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: export from an '
            'environment of the maintained forks, which loads the same configs and checkpoints.'
        )
    missing = [name for name in NEEDED if why_not(name)]
    if missing:
        raise ConfigError(f'an export to ONNX needs {", ".join(missing)}: pip install "mmgate[deploy]".')


class Tensors(nn.Module):
    """Wrapper that calls a model with inputs by position and returns its outputs as a tuple of tensors.

    Args:
        model: The model.
        inputs: Names of its arguments.
        outputs: Names of the outputs to return; empty for every tensor that it returns.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def named(self, found: Any) -> dict[str, Tensor]:
        """Return the tensors in a model's output (a tensor, tuple or dict) by name."""
        if isinstance(found, Tensor):
            found = dict(output=found)
        elif isinstance(found, (tuple, list)):
            found = {f'output_{number}': one for number, one in enumerate(found)}
        named = found.items() if isinstance(found, Mapping) else ()
        tensors = {name: one for name, one in named if isinstance(one, Tensor)}
        lacking = [name for name in self.outputs if name not in tensors]
        if lacking or not tensors:
            raise ConfigError(
                f'{type(self.model).__name__} returns no tensor {", ".join(lacking) or "at all"}; its tensors are '
                f'{", ".join(tensors) or "none"}.'
            )
        return {name: tensors[name] for name in self.outputs} if self.outputs else tensors

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the model and return the chosen outputs as a tuple of tensors."""
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(self.named(found).values())


def export_onnx(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    outputs: Sequence[str] = (),
    dynamic_batch: bool = False,
    tolerance: float = 1e-4,
) -> dict[str, float]:
    """Export a model to an ONNX file, and compare the outputs of onnxruntime with those of PyTorch.

    They are compared on ``inputs`` and on the same with each image mirrored. Gates that are switched off are left out.
    Vanilla deformable attention that mmgate knows is written as ours, which computes the same.

    Args:
        model: A model, gated or not, with its weights; it is exported in eval mode and stays as it is.
        inputs: Tensors by the names of the model's arguments, images first. The file takes inputs of their size.
        path: File to write, which ends with ``.onnx``; folders are made. It is written if the two agree.
        outputs: Names of the outputs that the file has, such as ``('logits', 'pred_boxes')``; default all tensors that
            the model returns. Those of a model that returns a tuple are called ``output_0``, ``output_1``, ...
        dynamic_batch: True for a file that takes any number of images up to 64; then it is compared on two batches.
        tolerance: Largest difference of an output, divided by its largest value where that is above 1.

    Returns:
        The largest difference of each output by its name. Where several outputs are ``(B, Q, ...)``, as logits and
        boxes of Q queries, their rows are compared in any order, and 1 % of them may be missing: detectors choose
        queries by scores, and rounding exchanges those that are tied.

    Raises:
        ConfigError: A package is missing, torch is too old, the model refuses such arguments or returns no such output,
            it cannot be exported, or the file differs from the model.
    """
    check_environment()
    path = Path(path)
    if path.suffix != '.onnx':
        raise ConfigError(f'{path}: an ONNX file ends with .onnx.')
    _check_names(inputs, outputs)
    _check_arguments(model, inputs)
    network = Tensors(copied(model), tuple(inputs), outputs).eval()
    tensors = tuple(tensor.detach() for tensor in inputs.values())
    batches = [tensors, tuple(tensor.flip(-1) if tensor.is_floating_point() else tensor for tensor in tensors)]
    if dynamic_batch:
        batches.append(tuple(torch.cat([tensor, tensor, tensor]) for tensor in tensors))
    with torch.no_grad():
        network.outputs = tuple(network.named(network.model(**inputs)))
        expected = [[one.cpu() for one in network(*batch)] for batch in batches]
    use_our_sampler(network.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        program = _captured(network, tensors, dynamic_batch)
    except ConfigError:
        raise
    # torch raises many kinds of errors.
    except Exception as error:
        name = type(network.model).__name__
        if dynamic_batch and 'Constraints violated (batch)' in str(error):
            raise ConfigError(f'the code of {name} fixes the number of images; leave dynamic_batch out.') from error
        reason = first_line(error)
        raise ConfigError(f'{name} cannot be exported: {reason}') from error
    size = list(tensors[0].shape[-2:])
    takes = f'{network.inputs[0]} of {" x ".join(map(str, size))}'
    notes = dict(inputs=network.inputs, outputs=network.outputs, divisor=0, size=size, takes=takes)
    notes['model'] = f'a {type(network.model).__name__}'
    with tempfile.TemporaryDirectory(dir=path.parent, prefix='.export-') as folder:
        new = Path(folder) / path.name
        write_program(program, network.inputs, network.outputs, new, notes)
        run = Exported(new)
        found: dict[str, float] = {}
        for batch, wanted in zip(batches, expected, strict=True):
            by_file = run(*(one.cpu() for one in batch))
            for name, apart in _differences(network.outputs, by_file, wanted).items():
                found[name] = max(found.get(name, 0.0), apart)
        listed = ', '.join(f'{name} to {apart:.2g}' for name, apart in found.items())
        if not all(apart <= tolerance for apart in found.values()):
            raise ConfigError(
                f'the exported {type(model).__name__} differs from PyTorch and is not kept: {listed}, where tolerance='
                f'{tolerance:g} is allowed. 16-bit numbers need more; a detector that is not trained may choose '
                'queries by scores that are tied.'
            )
        os.replace(new, path)
    log(f'{path} is as PyTorch: {listed}')
    return found


def _check_names(inputs: object, outputs: object) -> None:
    """Raise ConfigError unless inputs are tensors by name and outputs a list of names."""
    are_tensors = isinstance(inputs, Mapping) and all(isinstance(one, Tensor) for one in inputs.values())
    if not inputs or not are_tensors:
        raise ConfigError(
            "inputs must be a dict of tensors by the names of the model's arguments, such as dict(pixel_values=...)."
        )
    if isinstance(outputs, str):
        raise ConfigError(f'outputs={outputs!r} must be a list of names, such as [{outputs!r}].')


def _check_arguments(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if the model's ``forward`` does not take these inputs."""
    own = unwrap_model(model)
    try:
        arguments = inspect.signature(own.forward)
    # A traced module has none.
    except ValueError:
        return
    try:
        arguments.bind(**inputs)
    except TypeError as error:
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = ', '.join(name for name, one in arguments.parameters.items() if one.kind not in several)
        raise ConfigError(f'inputs: {error}; the arguments of {type(own).__name__} are: {names}.') from error


def write_program(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    path: Path,
    notes: Mapping[str, Any],
    translations: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> None:
    """Write a program that torch.export has captured into an ONNX file.

    Args:
        program: The program.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        path: File to write.
        notes: Notes for the file's metadata.
        translations: Functions that write operators which are not torch's.
    """
    # The exporter and its optimizer log their progress.
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with plain_attention():
            written: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=True,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                custom_translation_table=None if translations is None else dict(translations),
            )
    finally:
        logging.disable(silenced)
    _keep_constants(written.model.graph)
    # The optimizer may put a shared constant after its first use.
    written.model.graph.sort()
    written.model.metadata_props[NOTES_KEY] = json.dumps(notes)
    written.save(path, external_data=False)


def _keep_constants(graph: Any) -> None:
    """Turn constants of an ONNX graph into initializers if the optimizer has removed the nodes that made them."""
    inputs = set(graph.inputs)
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value in inputs or value.name in graph.initializers:
                continue
            if value.producer() is None and value.const_value is not None:
                graph.register_initializer(value)


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode, from which gates that are switched off are removed."""
    own = unwrap_model(model)
    taken = deepcopy(own)
    # Some models return None from ``eval``.
    taken.eval()
    for name, module in list(gated_modules(own)):
        if is_off(module):
            remove_gate(taken.get_submodule(name))
    return taken


def use_our_sampler(model: nn.Module) -> None:
    """Let vanilla deformable attention in a model run on mmgate's operator, which graphs can hold."""
    ours = MultiScaleDeformableAttention.__name__
    vanilla = [one.path for one in list_attention(model) if ours in one.gates and one.gate is None]
    if vanilla:
        swap_attention(model, dict(path=vanilla, type=ours))


def _captured(network: Tensors, tensors: tuple[Tensor, ...], dynamic_batch: bool) -> ExportedProgram:
    """Capture a network with torch.export and return the program."""
    from torch.export import Dim

    shapes = None
    if dynamic_batch:
        # torch.export would fix a batch of one.
        tensors = tuple(torch.cat([x, x])[:2] if len(x) == 1 else x for x in tensors)
        batch = Dim('batch', min=1, max=MAX_BATCH)
        shapes = (tuple({0: batch} for _ in tensors),)
    with warnings.catch_warnings(), exportable_sampling(), plain_attention(), torch.no_grad():
        warnings.simplefilter('ignore')
        return torch.export.export(network, tensors, dynamic_shapes=shapes, strict=False)


def _differences(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """Return for each output, by name, the largest difference between the file and PyTorch.

    See :func:`export_onnx`.
    """
    shapes = [one.shape[:2] for one in expected if one.dim() > 2]
    queries = max(shapes, default=None, key=shapes.count)
    apart: dict[str, Tensor] = {}
    of_rows: list[str] = []
    partners = _partners(queries, found, expected)
    for name, one, other in zip(names, found, expected, strict=True):
        if one.shape != other.shape:
            apart[name] = torch.tensor([math.inf])
            continue
        if partners is not None and other.dim() > 2 and other.shape[:2] == queries:
            of_rows.append(name)
            one = one[torch.arange(len(one))[:, None], partners]
        # Masked logits are infinite in both.
        gap = (one.double() - other.double()).masked_fill(one == other, 0.0).abs()
        gap = gap.nan_to_num(nan=math.inf, posinf=math.inf)
        largest = other.double().nan_to_num(posinf=0.0, neginf=0.0).abs().amax() if other.numel() else 0.0
        gap = gap / max(float(largest), 1.0)
        apart[name] = gap.flatten(2).amax(-1).flatten() if name in of_rows else gap.flatten()
    if of_rows:
        worst = torch.stack([apart[name] for name in of_rows]).amax(0)
        kept = worst.argsort()[: len(worst) - len(worst) // 100]
        apart.update({name: apart[name][kept] for name in of_rows})
    return {name: float(gap.max()) if gap.numel() else 0.0 for name, gap in apart.items()}


def _partners(queries: Any, found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor | None:
    """Match each expected query ``(B, Q, ...)`` to the nearest query of the file; return indices ``(B, Q)``."""
    pairs = [
        (one, other)
        for one, other in zip(found, expected, strict=True)
        if other.dim() > 2 and other.shape[:2] == queries and one.shape == other.shape
    ]
    # The order of the classes of a single map matters.
    if len(pairs) < 2:
        return None
    rows = []
    for side in zip(*pairs, strict=True):
        flat = [one.flatten(1).view(*one.shape[:2], -1).float() for one in side]
        rows.append(torch.cat(flat, -1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return torch.cdist(rows[1], rows[0], compute_mode='donot_use_mm_for_euclid_dist').argmin(-1)
