"""What ``mmengine.hub.get_model('mmgate::...')`` asks of a package, under the one name where it looks for it."""

from __future__ import annotations


def register_all_modules(init_default_scope: bool = True) -> None:
    """Register every component, which importing mmgate has done.

    Args:
        init_default_scope: What mmengine hands over. No scope is set: our configs inherit from mmdet's and mmseg's, so
            that mmengine builds their models in the scope of the host.
    """
