"""An extension of griffe: the API lists what a user names, and roles such as ``:class:`Name``` become plain names."""

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


class PublicNames(griffe.Extension):
    """Leaves out what no user names: all but registered classes, names in ``__all__``, and what a page asks for.

    Methods of registered classes are left out, too.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """Mark the members of the package's modules."""
        self._mark(pkg)

    def _mark(self, module: griffe.Module) -> bool:
        """Return True if anything in ``module`` is public."""
        found = bool(module.exports)
        for member in module.members.values():
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module):
                member.public = self._mark(member)
            else:
                decorators = getattr(member, 'decorators', [])
                registered = any('register_module' in str(decorator.value) for decorator in decorators)
                member.public = registered or member.name in (module.exports or ())
                if registered:  # its options are a user's, the host packages call its methods
                    for name in member.members:
                        member.members[name].public = False
            found |= bool(member.public)
        return found
