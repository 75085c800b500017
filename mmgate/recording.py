"""Record what attention notes - weights, gates, sampling points - during a real forward pass, gated or vanilla.

Gated attention notes what it computes. Vanilla attention computes in the code of its package. For the time of a
recording it runs on the forward of its adapter instead, with a gate without parameters: the same function, equal to
rounding, whose notes are those of a gated one. That holds in the recording thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, get_ident
from types import MethodType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from mmgate.adapter import RECORD, Adapter, Record, host_class, is_off, make_gate
from mmgate.errors import ConfigError
from mmgate.gate import GATE_NAME, Gate
from mmgate.gates.base.deformable import DeformableGate
from mmgate.gates.base.dense import DenseGate
from mmgate.gating import gated_class
from mmgate.hosts.table import adapter_for
from mmgate.notes import POINTS, WEIGHTS, Kept, Note, Recorder, Recording, in_graph, recording_by

# By kind of attention without a gate, what it notes.
VANILLA: dict[type[Gate], tuple[str, ...]] = {DeformableGate: POINTS, DenseGate: WEIGHTS}
FORWARD = 'forward'
_lock = Lock()


@contextmanager
def record(
    model: nn.Module,
    names: str | Iterable[str] | None = None,
    *,
    accumulate: Callable[[Note], Any] = lambda first: Kept(),
    graph: bool = False,
) -> Iterator[Recording]:
    """Record what the attention of a model notes in a ``with`` block, in this thread.

    ``with mmgate.record(model, ['gate', 'attention']) as recording: model(images)`` leaves the tensors in
    ``recording[path]['gate'].tensors``. The path is that of the module with the gate:
    ``'encoder.layers.0.self_attn'`` for deformable attention, and ``'encoder.layers.0.self_attn.attn'`` for mmdet's
    dense attention, where mmcv's module holds torch's and the gate is in torch's. Two gates in one attention have
    their own paths.

    The model runs once, and computes what it would without the block: gated attention bit by bit, vanilla attention
    equal to rounding. A module that runs twice (in a shared layer, or in activation checkpointing) is recorded twice;
    one inside a compiled graph, or whose ``forward`` was replaced on the very module, is not. torch's
    ``TransformerEncoder`` packs no nested tensors meanwhile, so that its output for padded tokens is not 0. Copy or
    save the model outside of the block, since the methods by which vanilla attention is recorded would go along. Enter
    :func:`mmgate.gates_disabled` before it: attention whose gate goes off inside is missing.

    Args:
        model: Any model; wrappers such as DistributedDataParallel have to be taken off.
        names: Names of notes: ``'gate'`` and others of gates, or ``'gates'`` for all of them; ``'attention'`` and
            ``'values'`` of dense attention; :data:`.notes.POINTS` of deformable attention; ``'agents'``, ``'kv'``, and
            whatever else modules note. By default all.
        accumulate: Returns an accumulator, whose ``add`` gets the tensors, for the first note of a path and a name; by
            default one that keeps them on the CPU.
        graph: True keeps the tensors' graph.

    Yields:
        The accumulators by path and name; what did not run is missing.
    """
    wanted = None if names is None else {*([names] if isinstance(names, str) else names)}
    paths = {id(module): note_path(path, module) for path, module in model.named_modules()}
    with ExitStack() as stack:
        recorded = set()
        for path, module in model.named_modules() if wanted is None or wanted & {*POINTS, *WEIGHTS} else ():
            found = _record_vanilla(module, wanted)
            if found is not None:
                recorded.add(id(module))
                stack.callback(found.leave)
                gates = found.gate.named_modules(prefix=f'{path}.{GATE_NAME}'.lstrip('.'))
                paths.update({id(gate): note_path(name, gate) for name, gate in gates})
        # In evaluation torch's encoder layer reads the weights of its attention without calling it.
        if any(
            isinstance(layer, nn.TransformerEncoderLayer) and id(layer.self_attn) in recorded
            for layer in model.modules()
        ):
            stack.enter_context(_NoFastPath())
        recorder = Recorder(paths, wanted, accumulate, graph)
        stack.enter_context(recording_by(recorder))
        yield recorder.recording


def vanilla_adapter(module: nn.Module) -> tuple[type[Gate], type[Adapter]] | None:
    """Return the kind and the adapter with which attention without a gate, or whose gate is off, can be recorded."""
    if _is_on(module):
        return None
    vanilla = _as_vanilla(module)
    for kind in VANILLA:
        found = adapter_for(kind, vanilla)
        if found is not None and not found[1]:
            return kind, found[0]
    return None


def note_path(path: str, module: nn.Module) -> str:
    """Return the path of the notes of a module at a path: those of an attention's only gate have the attention's."""
    around, _, name = path.rpartition('.')
    return around if isinstance(module, Gate) and name == GATE_NAME else path


def _is_on(module: nn.Module) -> bool:
    return isinstance(module, Adapter) and not is_off(module)


def _as_vanilla(module: nn.Module) -> nn.Module:
    """Return a vanilla copy of a module whose gate is off, which shares all tensors and children; else the module."""
    if not isinstance(module, Adapter):
        return module
    cls: Any = host_class(module)
    vanilla = cls.__new__(cls)
    state = {name: value for name, value in vars(module).items() if name != RECORD}
    state['_modules'] = {name: child for name, child in module._modules.items() if name != GATE_NAME}
    vars(vanilla).update({**state, **module.gating.replaced})
    return vanilla


class _NoFastPath(TorchFunctionMode):
    """Mode of this thread that changes nothing, in which torch's transformer layers do not take their fast path."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _RecordedForward:
    """Method of a vanilla attention, for the time of a recording, that calls its adapter's ``forward`` instead.

    It does so in threads that record; in others it calls the class's own.
    """

    def __init__(self, module: nn.Module, adapter: type[Adapter], gate: nn.Module) -> None:
        self.module: Any = module
        self.adapter = adapter
        self.gate = gate
        self.threads: list[int] = []
        self.kept = {name: value for name, value in vars(module).items() if name == FORWARD}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if in_graph() or get_ident() not in self.threads or _is_on(module):
            return type(module).forward(module, *args, **kwargs)
        # A gated copy of the module for this call, which shares all tensors and children.
        vanilla = _as_vanilla(module)
        cls: Any = gated_class(self.adapter, type(vanilla))
        gated = cls.__new__(cls)
        state = {name: value for name, value in vars(vanilla).items() if name not in (FORWARD, GATE_NAME)}
        state['_modules'] = {**vanilla._modules, GATE_NAME: self.gate.train(module.training)}
        state[RECORD] = Record(self.adapter, '', {})
        vars(gated).update(state)
        return cls.forward(gated, *args, **kwargs)

    def leave(self) -> None:
        """Leave this thread's recording; the last one gives the module its own method back."""
        with _lock:
            self.threads.remove(get_ident())
            if not self.threads:
                vars(self.module).update(self.kept)
                if not self.kept:
                    del vars(self.module)[FORWARD]


def _record_vanilla(module: nn.Module, names: set[str] | None) -> _RecordedForward | None:
    """Let a vanilla attention be recorded in this thread; None if nothing of it is wanted, or nothing can be."""
    with _lock:
        forward = vars(module).get(FORWARD)
        # transformers leaves a class's own method on the instance, which changes nothing.
        if forward is None or forward == MethodType(type(module).forward, module):
            forward = _recorded_forward(module, names)
        if not isinstance(forward, _RecordedForward):
            return None
        forward.threads.append(get_ident())
        vars(module)[FORWARD] = forward
        return forward


def _recorded_forward(module: nn.Module, names: set[str] | None) -> _RecordedForward | None:
    found = vanilla_adapter(module)
    if found is None or not (names is None or names & {*VANILLA[found[0]]}):
        return None
    kind, adapter = found
    try:
        return _RecordedForward(module, adapter, make_gate(adapter, _as_vanilla(module), kind))
    except ConfigError:
        return None
