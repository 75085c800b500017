"""Configs of mmdet's and mmseg's zoos, made small enough for a test: few layers, few queries, all channels."""

from __future__ import annotations

import copy
import re
from typing import Any

import mmdet
import torch
from mmdet.structures import DetDataSample, TrackDataSample
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from mmgate import registry, swap_attention
from mmgate.hosts import gates_for
from mmgate.listing import attention_modules

GATES = ('PLuGMultiScaleDeformableAttention', 'PLuGMultiheadAttention')
HEIGHT, WIDTH = 64, 96
WORDS = ('cat', 'dog', 'bird')

# config, attentions that are replaced once it is reduced, mode
ZOO: dict[str, tuple[str, int, str]] = {
    'atss_dyhead_swin': ('mmdet::dyhead/atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco.py', 8, 'tensor'),
    'conditional_detr': ('mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco.py', 6, 'tensor'),
    'dab_detr': ('mmdet::dab_detr/dab-detr_r50_8xb2-50e_coco.py', 6, 'tensor'),
    'ddq': ('mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py', 6, 'tensor'),
    'deformable_detr': ('mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', 6, 'tensor'),
    'detr': ('mmdet::detr/detr_r18_8xb2-500e_coco.py', 6, 'tensor'),
    'dino': ('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 6, 'tensor'),
    'grounding_dino': ('mmdet::grounding_dino/grounding_dino_r50_scratch_8xb2_1x_coco.py', 12, 'loss'),
    'mm_grounding_dino': ('mmdet::mm_grounding_dino/grounding_dino_swin-t_pretrain_obj365.py', 20, 'loss'),
    'mask2former': ('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', 6, 'tensor'),
    'mask2former_panoptic': ('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py', 6, 'tensor'),
    'mask2former_vis': ('mmdet::mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2021.py', 6, 'loss'),
    'maskformer': ('mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py', 6, 'tensor'),
    'mask_rcnn_swin': ('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', 8, 'tensor'),
    'queryinst': ('mmdet::queryinst/queryinst_r50_fpn_1x_coco.py', 6, 'tensor'),
    'retinanet_pvt': ('mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py', 4, 'tensor'),
    'retinanet_pvtv2': ('mmdet::pvt/retinanet_pvtv2-b0_fpn_1x_coco.py', 4, 'tensor'),
    'sparse_rcnn': ('mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py', 6, 'tensor'),
    'beit': ('mmseg::beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py', 4, 'tensor'),
    'dpt': ('mmseg::dpt/dpt_vit-b16_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'knet': ('mmseg::knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512.py', 1, 'tensor'),
    'mae': ('mmseg::mae/mae-base_upernet_8xb2-amp-160k_ade20k-512x512.py', 4, 'tensor'),
    'mask2former_ade': ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', 6, 'loss'),
    'maskformer_ade': ('mmseg::maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py', 4, 'loss'),
    'san': ('mmseg::san/san-vit-b16_coco-stuff164k-640x640.py', 16, 'loss'),
    'segformer': ('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'segmenter': ('mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py', 4, 'tensor'),
    'setr': ('mmseg::setr/setr_vit-l_pup_8xb2-160k_ade20k-512x512.py', 4, 'tensor'),
    'swin': ('mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py', 8, 'tensor'),
    'twins_pcpvt': ('mmseg::twins/twins_pcpvt-s_fpn_fpnhead_8xb4-80k_ade20k-512x512.py', 8, 'tensor'),
    'twins_svt': ('mmseg::twins/twins_svt-s_uperhead_8xb2-160k_ade20k-512x512.py', 8, 'tensor'),
    'vit': ('mmseg::vit/vit_deit-s16_upernet_8xb2-80k_ade20k-512x512.py', 4, 'tensor'),
}


class _Tokens:
    """What create_positive_map asks of a tokenised caption: the token of a character, after a class token."""

    def __init__(self, caption: str) -> None:
        self.spans = [match.span() for match in re.finditer(r'\w+|\.', caption)]
        self.input_ids = torch.zeros(1, len(self.spans) + 2)

    def char_to_token(self, index: int) -> int | None:
        return next((token + 1 for token, (first, last) in enumerate(self.spans) if first <= index < last), None)


@registry.MODELS.register_module(force=True)
class TinyLanguageModel(nn.Module):
    """In the place of Grounding DINO's BERT, whose weights are a download: an embedding of words by their length."""

    max_tokens, pad_to_max = 256, False

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.language_backbone = nn.Module()
        self.language_backbone.body = nn.Module()
        self.language_backbone.body.language_dim = width
        self.embedding = nn.Embedding(16, width)

    def tokenizer(self, captions: list[str], **kwargs: Any) -> _Tokens:
        return _Tokens(captions[0])

    def forward(self, captions: list[str]) -> dict[str, Tensor]:
        spans = [_Tokens(caption).spans for caption in captions]
        words = torch.tensor([[0, *(min(last - first, 15) for first, last in one), 0] for one in spans])
        count, tokens = words.shape
        embedded = self.embedding(words)  # (B, T, C)
        return dict(
            embedded=embedded,
            hidden=embedded,
            text_token_mask=torch.ones(count, tokens, dtype=torch.bool),
            masks=torch.ones(count, tokens, tokens, dtype=torch.bool),
            position_ids=torch.arange(tokens).expand(count, tokens),
        )


def reduced(config: str) -> Config:
    """Return ``'package::config'`` with few layers and queries, and nothing to be downloaded."""
    cfg = get_config(config)
    init_default_scope(cfg.default_scope)
    model = cfg.model
    _plain(model)
    backbone = model.get('backbone') or model.get('image_encoder')
    if isinstance(backbone.get('num_layers'), int):
        indices = backbone.get('out_indices')
        kept = len(indices) if isinstance(indices, (list, tuple)) else 2
        backbone.num_layers = kept
        if isinstance(indices, (list, tuple)):
            backbone.out_indices = tuple(range(kept))
    elif 'num_layers' in backbone:
        backbone.num_layers = [1] * len(backbone.num_layers)
    if 'Swin' in backbone.type or 'PCPVT' in backbone.type or 'SVT' in backbone.type:
        backbone.depths = [2] * 4
    if backbone.type in ('BEiT', 'MAE'):  # their tables of relative positions are of one size
        backbone.img_size = (HEIGHT, WIDTH)
    head = model.get('decode_head')
    if isinstance(head, dict) and 'kernel_update_head' in head:  # K-Net
        head.num_stages, head.kernel_update_head = 1, head.kernel_update_head[:1]
    if 'text_encoder' in model:  # SAN encodes each name in each of 14 templates
        names = [*WORDS, 'sky', 'sea', 'tree']
        model.text_encoder.update(dataset_name=None, vocabulary=names, num_layers=2, cache_feature=False)
        head.num_classes = len(names)
        head.loss_decode[0].class_weight = [*[1.0] * len(names), 0.1]
    return cfg


def _plain(node: Any) -> None:
    """Leave out what needs a file or a GPU, and most layers of encoders and decoders."""
    if isinstance(node, list):
        for child in node:
            _plain(child)
    if not isinstance(node, dict):
        return
    for key in ('init_cfg', 'pretrained'):
        if isinstance(node.get(key), (dict, str)):
            node[key] = None
    if node.get('type') == 'SyncBN':
        node['type'] = 'BN'
    for name, child in node.items():
        if name in ('encoder', 'decoder', 'transformer_decoder') and isinstance(child, dict) and 'num_layers' in child:
            child['num_layers'] = min(child['num_layers'], 2)
            if 'num_cp' in child:
                child['num_cp'] = 0
        if name == 'language_model':
            node[name] = dict(type='mmgate.TinyLanguageModel')
        else:
            _plain(child)
    for key in ('num_queries', 'sos_token_num'):  # SAN's name for the same number
        if key in node:
            node[key] = min(node[key], 20)


def build(cfg: Config) -> nn.Module:
    """Build and initialise; attentions that start at zero, where no gate has an effect, are given some size."""
    model = MODELS.build(cfg.model)
    if 'GroundingDINO' in cfg.model.type and mmdet.__version__ >= '3.5':
        # the fork's Grounding DINO inherits a decoder that feeds this twice as much as it takes, and cannot run
        model.decoder.ref_point_head.layers[0] = nn.Linear(4 * model.embed_dims, model.embed_dims)
    fill_what_is_only_loaded(model)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if re.search(r'attention_weights\.weight|sampling_offsets\.weight|relative_position_bias_table', name):
            nn.init.normal_(parameter, std=0.05)
    for module in model.modules():  # what is dropped depends on the order of draws
        for name in ('p', 'drop_prob', 'dropout'):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def fill_what_is_only_loaded(model: nn.Module) -> None:
    """Fill the parts of SAN that start from a checkpoint alone, with the same numbers each time."""
    if hasattr(model, 'text_encoder'):
        model.decode_head.rec_with_attnbias.init_weights = lambda state: None
        for parameter in (model.text_encoder.positional_embedding, model.text_encoder.text_projection):
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))


def gate(model: nn.Module) -> list[str]:
    """Gate whatever fits; return the names."""
    fitting = {gate.__name__ for _, module in attention_modules(model) for gate in gates_for(module)}
    return swap_attention(model, [dict(type=name, path='**') for name in GATES if name in fitting])


def batch(cfg: Config, size: tuple[int, int] = (HEIGHT, WIDTH)) -> dict[str, Any]:
    """Return two images with what the config's model needs to compute losses."""
    samples = [_segmentation(size) if cfg.default_scope == 'mmseg' else _detection(size) for _ in range(2)]
    images = torch.randn(2, 3, *size)
    if 'track_head' in cfg.model:  # two frames of a video
        video = TrackDataSample(metainfo=dict(key_frames_inds=[0]))
        video.video_data_samples = samples
        return dict(inputs=images[None], data_samples=[video])
    return dict(inputs=images, data_samples=samples)


def _detection(size: tuple[int, int]) -> DetDataSample:
    from mmdet.structures.mask import BitmapMasks

    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0))
    sample = DetDataSample(metainfo=dict(meta, text='. '.join(WORDS), custom_entities=True))
    boxes = torch.tensor([[4.0, 8.0, 40.0, 50.0], [20.0, 5.0, 60.0, 30.0]])
    masks = torch.zeros(2, *size)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y1:y2, x1:x2] = 1
    sample.gt_instances = InstanceData(
        bboxes=boxes,
        labels=torch.tensor([1, 2]),
        masks=BitmapMasks(masks.numpy().astype('uint8'), *size),
        instances_ids=torch.tensor([0, 1]),
    )
    stuff = torch.full((1, *size), 255)
    stuff[:, 30:, 30:] = 100
    sample.gt_sem_seg = PixelData(sem_seg=stuff)
    return sample


def _segmentation(size: tuple[int, int]) -> SegDataSample:
    labels = torch.full((1, *size), 255)
    labels[:, 10:40, 8:30] = 2
    labels[:, 30:60, 30:60] = 5
    sample = SegDataSample(metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size))
    sample.gt_sem_seg = PixelData(data=labels)
    return sample


def forward(model: nn.Module, data: dict[str, Any], mode: str) -> list[Tensor]:
    """Return the outputs, or the losses where a model has no such mode; what it draws is the same each time."""
    torch.manual_seed(0)
    model.train(mode == 'loss')
    with torch.no_grad():
        return tensors(model(**copy.deepcopy(data), mode=mode))


def tensors(output: Any) -> list[Tensor]:
    """Return all tensors in ``output``, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, InstanceData):
        output = output.to_dict()
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for child in output for tensor in tensors(child)] if isinstance(output, (list, tuple)) else []
