"""The model index is what mim, mmengine's hub and its inferencers read of us."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CONFIGS, ROOT, tool
from helpers.metafiles import INDEX, METAFILES, MIM, MODELS, SHIPPED
from mmengine.hub import get_model
from mmengine.infer.infer import BaseInferencer

from mmgate import gate_parameters


def test_every_config_is_listed_once() -> None:
    listed = sorted(ROOT / model['Config'] for model in MODELS)
    assert listed == CONFIGS, 'each config stands in a metafile, and each metafile in model-index.yml or a project'


@pytest.mark.parametrize('path', (tables := tool('config_tables', 'dev')).METAFILES, ids=lambda path: path.parent.name)
def test_a_page_has_the_table_of_its_configs(path: Path) -> None:
    readme = path.parent / 'README.md'
    assert readme.read_text() == tables.pages()[readme], 'python tools/dev/config_tables.py'


@pytest.mark.parametrize('path', METAFILES)
def test_a_collection_names_its_paper(path: str) -> None:
    """A paper's title and address stand where mim finds them: of a ``Paper`` it prints the keys alone."""
    (collection,) = METAFILES[path]['Collections']
    assert (ROOT / collection['README']).is_file()
    paper = collection.get('Paper', {})
    assert not paper or paper['Title']
    assert paper.get('URL', 'https://arxiv.org/abs/').startswith('https://arxiv.org/abs/')
    assert collection.get('Metadata', {}) == {f'Paper {key}': value for key, value in paper.items()}
    assert {model['In Collection'] for model in METAFILES[path]['Models']} == {collection['Name']}


# mm's way to say a schedule without the batch: 8 GPUs with 2 images each
EIGHT_TIMES_TWO = r'_(ms-crop-)?[13]x_coco$'


@pytest.mark.parametrize('model', MODELS, ids=lambda model: model['Name'])
def test_a_model_has_the_fields_that_mim_reads(model: dict[str, Any]) -> None:
    """What mim tabulates: lower-case names, plain metadata, and metrics only beside whose they are."""
    metadata, name = model['Metadata'], model['Name']
    assert name == Path(model['Config']).stem.lower()  # mim lower-cases what it is asked for
    batch = re.search(r'_(\d+)xb(\d+)-', name)  # GPUs and images of each
    assert bool(batch) != bool(re.search(EIGHT_TIMES_TWO, name)), 'the name says no batch, or two'
    assert metadata['Batch Size'] == (int(batch[1]) * int(batch[2]) if batch else 8 * 2)
    assert all(isinstance(value, (str, int)) for value in metadata.values())
    data = metadata['Training Data']
    assert model['Results'] and {result['Dataset'] for result in model['Results']} == {data}
    metrics = [metric for result in model['Results'] for metric in result['Metrics']]
    assert bool(metrics) == ('Metrics From' in metadata)
    assert model['Weights'] is None  # the key has to be there: mmengine's inferencers read it


def test_data_are_called_the_same_in_all_models() -> None:
    """A config's name ends with its data, as ``camvid`` in ``..._1xb4-2k_camvid-160x128``."""
    names = {
        (model['Name'].rpartition('_')[2].partition('-')[0], model['Metadata']['Training Data']) for model in MODELS
    }
    assert len(names) == len({short for short, _ in names}) == len({data for _, data in names}), names


@pytest.mark.parametrize(
    'name, metrics',
    [
        ('plug-deformable-detr_r50_8xb4-50e_coco', {'box AP': 44.9}),
        ('plug-mask2former_swin-b-in1k-384x384-pre_8xb2-160k_ade20k-640x640', {'mIoU': 52.6}),
        ('agent-mask-rcnn_pvt-t_1x_coco', {'box AP': 41.4, 'mask AP': 38.7}),
        ('agent-upernet_swin-t_8xb2-160k_ade20k-512x512', {'mIoU': 46.68}),
        ('saga-cascade-mask-rcnn_swin-t_ms-crop-3x_coco', {'box AP': 51.5, 'mask AP': 44.9}),
        ('agent-cswin-b_8xb32-30e_in1k-384px', {'Top 1 Accuracy': 85.8}),
        ('plug-xcit-t12_8xb128-300e_in1k', {'Top 1 Accuracy': 77.4}),
        ('plug-pvtv2-b1_8xb128-300e_in1k', {}),  # the paper has the first PVT
        ('plug-mask2former-post-softmax_r50_8xb2-160k_ade20k-512x512', {}),  # the paper has it for DeiT alone
    ],
)
def test_metrics_are_the_papers(name: str, metrics: dict[str, float]) -> None:
    (model,) = (model for model in MODELS if model['Name'] == name)
    found = {key: value for result in model['Results'] for key, value in result['Metrics'].items()}
    assert found == metrics


def test_mim_reads_it() -> None:
    """With mim's own reader: no error but that it looks for a README beside the metafile, as in every mm package."""
    modelindex = pytest.importorskip('modelindex.load_model_index', reason="model-index, mim's reader")
    index = modelindex.load(str(MIM / 'model-index.yml'))
    assert len(index.models) == len(SHIPPED) and len(index.collections) == len(INDEX['Import'])
    assert [error for error in index.check(silent=True) if 'README' not in error] == []


def test_mmengine_finds_models_by_name() -> None:
    """The path of ``DetInferencer(name, scope='mmgate')``: it wants the index where ``configs/`` is, here the root."""
    folder = BaseInferencer._get_repo_or_mim_dir('mmgate')
    names = {model['Name'] for model in BaseInferencer._get_models_from_metafile(folder)}
    assert names == {model['Name'] for model in SHIPPED}
    inferencer = SimpleNamespace(scope='mmgate')
    cfg, weights = BaseInferencer._load_model_from_metafile(inferencer, 'plug-deformable-detr_r50_8xb4-50e_coco')
    assert cfg.model.type == 'mmgate.Gated' and weights is None


def test_mmengines_hub_builds_a_config() -> None:
    """It calls ``register_all_modules`` of every package."""
    model = get_model('mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
    assert type(model).__name__ == 'DeformableDETR' and gate_parameters(model)
