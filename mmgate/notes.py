"""Numbers (weights, gates, sampling points) that attention hands to recorders while it computes them.

Whoever has a number that a figure may want calls :func:`note`. Nothing runs a second time, and no module is asked
later what it did. :func:`mmgate.record` is the public way to take notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mmgate.ops.backend import outside_graphs

GATES = 'gates'  # names all notes that have axes, which are those of gates
WEIGHTS = ('attention', 'values')  # notes of dense attention
POINTS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'num_points')  # of deformable attention
AXES = ('', 'pairs', 'levels', 'heads', 'channels')

Result = TypeVar('Result')

# Below torch 2.3 this is True where torch.compile reads it, though nowhere else.
in_graph: Callable[[], bool] = (
    torch.compiler.is_compiling if hasattr(torch.compiler, 'is_compiling') else torch._utils.is_compiling
)


class Note(NamedTuple):
    """One tensor that was noted.

    Attributes:
        owner: The gate, or the other module, that noted it.
        path: Path of the attention in the model.
        name: Name of the note.
        value: The tensor.
        axes: See :func:`note`.
        unchanged: See :func:`note`.
    """

    owner: nn.Module
    path: str
    name: str
    value: Tensor
    axes: str
    unchanged: float | None


class _OfThread(threading.local):
    """Whatever takes notes in this thread.

    Attributes:
        recorders: Recorders, which take nothing inside a compiled graph.
        returned: Owner and name of each note that attention itself returns, with the list that takes it.
    """

    # Not as defaults of the class, in place of which torch.compile refuses to set them.
    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()
        self.returned: tuple[tuple[nn.Module, str, list[Tensor]], ...] = ()


_of_thread = _OfThread()


def note(
    owner: nn.Module,
    name: str,
    value: Tensor | Callable[[], Tensor],
    axes: str = '',
    unchanged: float | None = None,
) -> None:
    """Hand a tensor to the recorders of this thread; without any it costs next to nothing.

    Args:
        owner: The gate, or the module that attends: it gives the note its path.
        name: ``'gate'``, ``'attention'``, ``'values'``, ``'locations'``, or any other name.
        value: The tensor, or a function that returns it. Fused kernels form no weights, so that these are formed for a
            recorder alone.
        axes: For the values of a gate, what each number belongs to, and with it the tensor's shape: ``'pairs'`` of
            queries and keys, ``(B, H|1, N, M)``; ``'levels'``, ``(B, Q, H|1, L|1, P|1)``, or ``(B, Q, H|1, N|1)`` with
            N points in all where levels have different numbers of them; ``'heads'``, ``(B, H|1, N|1, d|1)``; or
            ``'channels'``, ``(B, N, C)``. B may be 1 where the values do not depend on the image.
        unchanged: The gate's value at which attention is as without the gate; None if there is none.

    Raises:
        ValueError: The axes are unknown; seen while something records.
    """
    # The first question is one that torch.compile can trace; the second spares it a guard on recorders.
    returned = _of_thread.returned
    if not returned and (in_graph() or not _of_thread.recorders):
        return
    lists = [found for of, called, found in returned if of is owner and called == name]
    recorders = [] if in_graph() else [one for one in _of_thread.recorders if one.wants(owner, name, axes)]
    if lists:
        tensor: Any = value() if callable(value) else value
    elif recorders:
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(one.graph for one in recorders)):
            tensor = value() if callable(value) else value
    for found in lists:
        found.append(tensor)
    for recorder in recorders:
        recorder.take(owner, name, tensor, axes, unchanged)


@outside_graphs
def with_note(owner: nn.Module, name: str, compute: Callable[[], Result]) -> tuple[Result, Tensor | None]:
    """Compute something; return it, and what ``owner`` noted by this name meanwhile, with its graph, or None.

    Attention returns its weights by this, also inside a compiled graph.
    """
    found: list[Tensor] = []
    before = _of_thread.returned
    _of_thread.returned = (*before, (owner, name, found))
    try:
        result = compute()
    finally:
        _of_thread.returned = before
    return result, found[-1] if found else None


class Kept:
    """Accumulator that keeps every recorded tensor on the CPU, in the list ``tensors``, in the order of the passes.

    Args:
        reduce: Function applied to every tensor first.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.reduce = reduce
        self.tensors: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Keep a copy of a tensor, because the model may write into the tensor later."""
        self.tensors.append(self.reduce(x).to('cpu', copy=True))

    @property
    def last(self) -> Tensor:
        """The tensor that the last forward pass added."""
        return self.tensors[-1]


Recording = dict[str, dict[str, Any]]  # accumulators, by path of the attention and name of the note


class Recorder:
    """Recorder of notes of the modules that it knows.

    Args:
        paths: Path of each module by its id.
        names: Names of the notes that it takes, or None for all; :data:`GATES` names all that have axes.
        accumulate: Returns an accumulator, whose ``add`` gets the tensors, for the first note of a path and a name.
        graph: True keeps the graph of the tensors; else they are detached.

    Attributes:
        recording: The accumulators.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        names: Collection[str] | None = None,
        accumulate: Callable[[Note], Any] = lambda first: Kept(),
        graph: bool = False,
    ) -> None:
        self.paths = paths
        self.names = names
        self.accumulate = accumulate
        self.graph = graph
        self.recording: Recording = {}

    def wants(self, owner: nn.Module, name: str, axes: str) -> bool:
        """Return True if this recorder takes a note."""
        named = self.names is None or name in self.names or (axes != '' and GATES in self.names)
        return named and id(owner) in self.paths

    def take(self, owner: nn.Module, name: str, value: Tensor, axes: str, unchanged: float | None) -> None:
        """Add a tensor to the accumulator of its path and name."""
        if axes not in AXES:
            raise ValueError(
                f'{type(owner).__name__} notes {name!r} with the axes {axes!r}; choose one of {", ".join(AXES[1:])}.'
            )
        value = value if self.graph else value.detach()
        path = self.paths[id(owner)]
        of_path = self.recording.setdefault(path, {})
        if name not in of_path:
            of_path[name] = self.accumulate(Note(owner, path, name, value, axes, unchanged))
        of_path[name].add(value)


@contextmanager
def recording_by(recorder: Recorder) -> Iterator[None]:
    """Let a recorder take the notes of this thread inside a ``with`` block."""
    before = _of_thread.recorders
    _of_thread.recorders = (*before, recorder)
    try:
        yield
    finally:
        _of_thread.recorders = before
