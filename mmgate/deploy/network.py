"""Base of the modules that are exported: each wraps a detector or a segmentor and maps tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, TypeAlias

import torch
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmgate.errors import ConfigError

# A function of a network's inputs that returns its outputs, such as an exported file.
Run: TypeAlias = Callable[..., Sequence[Tensor]]
Samples: TypeAlias = Sequence[BaseDataElement]


class Network(nn.Module):
    """Module to export: a detector or segmentor from preprocessed images up to its output tensors.

    Only :meth:`forward` is exported. The other methods run in Python before and after it, for example to preprocess
    images and to let the model predict with the exported file.

    Args:
        model: The model, in eval mode.

    Attributes:
        inputs: Names of the arguments of :meth:`forward`.
        outputs: Names of the tensors that it returns.
    """

    inputs: ClassVar[tuple[str, ...]] = ('images', 'sizes')
    outputs: ClassVar[tuple[str, ...]] = ('boxes', 'scores', 'labels')

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def feeds(self, images: Tensor, samples: Samples) -> tuple[Tensor, ...]:
        """Return the tensors that the network takes, named in :attr:`inputs`, for a batch of images.

        Args:
            images: ``(B, 3, H, W)``, normalised and padded by the model's data preprocessor.
            samples: The model's data samples, whose ``img_shape`` is the image's size without padding.
        """
        shapes = [sample.metainfo['img_shape'][:2] for sample in samples]
        return (images, torch.tensor(shapes, dtype=torch.int64, device=images.device))[: len(self.inputs)]

    def preprocess(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Preprocess a data loader's batch and return the tensors that the network takes, named in :attr:`inputs`."""
        data = self.model.data_preprocessor(deepcopy(batch), False)
        return self.feeds(data['inputs'], data['data_samples'])

    def serve(self, run: Run) -> None:
        """Let the wrapped model predict with ``run``, such as an exported file, instead of this network.

        The model's code does all else, so that its tools test the exported file.
        """
        model = self.model

        def predict(batch_inputs: Tensor, batch_data_samples: Samples, rescale: bool = True) -> Samples:
            outputs = run(*self.feeds(batch_inputs, batch_data_samples))
            results = self.results(outputs, batch_data_samples, rescale)
            return model.add_pred_to_datasample(batch_data_samples, results)

        model.predict = predict

    def results(self, outputs: Sequence[Tensor], samples: Samples, rescale: bool) -> Any:
        """Turn the network's output tensors for a batch into the wrapped model's results, in original pixels."""
        raise NotImplementedError


def not_exportable(model: nn.Module, reason: str) -> ConfigError:
    """Return an exception whose message gives the reason why a model cannot be exported."""
    return ConfigError(
        f'{type(model).__name__} cannot be exported: {reason}. tools/deploy/README.md lists the models that can.'
    )
