"""mmseg's attentions as hosts."""

from mmseg.models.backbones.swin import ShiftWindowMSA, WindowMSA

from .swin import adapt_swin

adapt_swin(WindowMSA, ShiftWindowMSA)
