"""Networks of mmseg's segmentors: logits over the whole input, for any head."""

from __future__ import annotations

from mmseg.models.segmentors import EncoderDecoder
from torch import Tensor, nn

from .network import Network, Run, Samples


class _Size(tuple):
    """Height and width, which may be symbolic: data samples copy them deeply, and symbols cannot be copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Size:
        return self


class SegmentationNetwork(Network):
    """Network of a segmentor up to its logits ``(B, C, H, W)`` over the input; for Mask2Former they are scores.

    The host does sliding windows, flips, the removal of padding and the resize to the original.
    """

    inputs = ('images',)
    outputs = ('logits',)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Return the logits of images ``(B, 3, H, W)``."""
        size = _Size(images.shape[-2:])
        return (self.host.encode_decode(images, [dict(img_shape=size, pad_shape=size, ori_shape=size)]),)

    def feeds(self, images: Tensor, samples: Samples) -> tuple[Tensor, ...]:
        """Return the padded images or, if the host slides windows over them, the first window."""
        cfg = self.host.test_cfg
        height, width = cfg['crop_size'] if cfg.get('mode') == 'slide' else images.shape[-2:]
        return (images[..., :height, :width],)

    def serve(self, run: Run) -> None:
        """Let ``run`` return the logits of whole images or of windows, depending on the host's ``test_cfg``."""
        self.host.encode_decode = lambda inputs, batch_img_metas: run(inputs)[0]


def segmentor(host: nn.Module) -> Network | None:
    """Return the network of a segmentor, or None if there is none for it."""
    return SegmentationNetwork(host) if type(host) is EncoderDecoder else None
