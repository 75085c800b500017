"""Network to export for mmseg's segmentors with any head, which returns logits over the whole input."""

from __future__ import annotations

from mmseg.models.segmentors import EncoderDecoder
from torch import Tensor, nn

from .network import Network, Run, Samples


class _Size(tuple):
    """Height and width of images, maybe symbolic, as a tuple that ``deepcopy`` returns unchanged.

    Data samples copy it deeply, and symbols cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> _Size:
        return self


class SegmentationNetwork(Network):
    """Network to export for a segmentor, up to the logits ``(B, C, H, W)`` over the input (Mask2Former: scores).

    The model does sliding windows, flips, the removal of padding and the resize to the original.
    """

    inputs = ('images',)
    outputs = ('logits',)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Return the logits ``(B, C, H, W)`` of images ``(B, 3, H, W)``."""
        size = _Size(images.shape[-2:])
        return (self.model.encode_decode(images, [dict(img_shape=size, pad_shape=size, ori_shape=size)]),)

    def feeds(self, images: Tensor, samples: Samples) -> tuple[Tensor, ...]:
        """Return the padded images or, if the segmentor tests by sliding windows, the first window of each."""
        cfg = self.model.test_cfg
        height, width = cfg['crop_size'] if cfg.get('mode') == 'slide' else images.shape[-2:]
        return (images[..., :height, :width],)

    def serve(self, run: Run) -> None:
        """Let the segmentor take logits from ``run``, such as an exported file: of whole images or of windows."""
        self.model.encode_decode = lambda inputs, batch_img_metas: run(inputs)[0]


def segmentor(model: nn.Module) -> Network | None:
    """Return the network to export for a segmentor of mmseg, or None if there is none for its class."""
    return SegmentationNetwork(model) if type(model) is EncoderDecoder else None
