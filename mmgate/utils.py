"""``register_all_modules``, which ``mmengine.hub.get_model`` calls in the module ``utils`` of every package."""

from __future__ import annotations


def register_all_modules(init_default_scope: bool = True) -> None:
    """Do nothing, since ``import mmgate`` has registered all components; mmengine's hub calls this in any package.

    Args:
        init_default_scope: An argument of mmengine's. It has no effect: our configs inherit from mmdet's and mmseg's,
            so that mmengine builds their models in the scope of their package.
    """
