"""What a graph is being written for: the same network has operators in ONNX that torch's own programs do not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FORMATS = ('onnx', 'torch-export')
_format: ContextVar[str] = ContextVar('format', default='torch-export')


def writes_onnx() -> bool:
    """Return whether a graph is being written whose operators will be ONNX's."""
    return _format.get() == 'onnx'


@contextmanager
def writing(format: str) -> Iterator[None]:
    """Write graphs of ``format``, one of :data:`FORMATS`."""
    token = _format.set(format)
    try:
        yield
    finally:
        _format.reset(token)
