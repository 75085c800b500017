"""An extension of griffe: roles of reStructuredText in docstrings, ``:class:`Name```, become plain names."""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r':(?:class|func|meth|mod|attr|data|obj):`~?\.?([^`]+)`')


class PlainNames(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Remove the roles from the docstring of ``obj``."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(lambda role: f'`{role[1]}`', obj.docstring.value)
