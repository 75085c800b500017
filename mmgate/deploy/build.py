"""Build, from a detector or a segmentor, the network of tensors that is exported.

Segmentors' own is here; those of detectors, which import mmdet, are in ``detectors.py``.
"""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn

from mmgate._environment import available
from mmgate.errors import ConfigError
from mmgate.gates.base.deformable import MultiScaleDeformableAttention
from mmgate.listing import list_attention
from mmgate.swap import swap_attention

from .network import Network, Run, Samples, not_exportable
from .runtime import Exported


def build_network(model: nn.Module) -> Network:
    """Return the network to export for a model: a module around a copy of the model.

    Vanilla deformable attention runs on mmgate's operator, which computes the same and can be exported.

    Raises:
        ConfigError: The model cannot be exported.
    """
    taken = deepcopy(model)
    ours = MultiScaleDeformableAttention.__name__
    vanilla = [one.path for one in list_attention(taken) if ours in one.gates and one.gate is None]
    if vanilla:
        swap_attention(taken, dict(path=vanilla, type=ours))
    return _network_of(taken)


def serve(model: nn.Module, run: Exported) -> None:
    """Let a model predict with an exported file instead of running its own network.

    Raises:
        ConfigError: The model has no network, or the file was written from a model of another type or other classes.
    """
    own = describe_model(model)
    written = run.notes['model']
    if written != own:
        raise ConfigError(f'{run.path} holds {written}, the config describes {own}. Give the config it was made of.')
    _network_of(model).serve(run)


def describe_model(model: nn.Module) -> str:
    """Describe a model by its type and its largest number of classes, in words that an exported file keeps."""
    counts = [getattr(module, 'num_classes', None) for module in model.modules()]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return f'a {type(model).__name__} of {most} classes'


def _network_of(model: nn.Module) -> Network:
    """Return the network to export around a model itself, which is not copied."""
    found: Network | None = None
    if available('mmdet'):
        from .detectors import detector

        found = detector(model)
    if found is None and available('mmseg'):
        from mmseg.models.segmentors import EncoderDecoder

        found = SegmentationNetwork(model) if type(model) is EncoderDecoder else None
    if found is None:
        raise not_exportable(model, 'it is none of the detectors and segmentors that can be')
    return found.eval()


class _Size(tuple):
    """Height and width of images, maybe symbolic, as a tuple that ``deepcopy`` returns unchanged.

    Data samples copy it deeply, and symbols cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> _Size:
        return self


class SegmentationNetwork(Network):
    """Network to export for mmseg's segmentors with any head: logits ``(B, C, H, W)`` over the input.

    Those of Mask2Former are scores. The model does sliding windows, flips, the removal of padding and the resize to the
    original.
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
