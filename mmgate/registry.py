"""Registries of scope ``mmgate``, children of mmengine's roots, so that ``type='mmgate.X'`` works in any config."""

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import TASK_UTILS as MMENGINE_TASK_UTILS
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry

MODELS = Registry(
    'model',
    parent=MMENGINE_MODELS,
    scope='mmgate',
    locations=['mmgate.gates', 'mmgate.layers', 'mmgate.backbones', 'mmgate.speed.matching'],
)
DATASETS = Registry('dataset', parent=MMENGINE_DATASETS, scope='mmgate', locations=['mmgate.datasets.svhn'])
TRANSFORMS = Registry('transform', parent=MMENGINE_TRANSFORMS, scope='mmgate', locations=['mmgate.datasets.noise'])
TASK_UTILS = Registry(
    'task util', parent=MMENGINE_TASK_UTILS, scope='mmgate', locations=['mmgate.speed.matching.assigner']
)
HOOKS = Registry(
    'hook',
    parent=MMENGINE_HOOKS,
    scope='mmgate',
    locations=[
        'mmgate.analysis.hooks',
        'mmgate.speed.hooks',
        'mmgate.train.data_check_hook',
        'mmgate.train.gates_hook',
        'mmgate.train.interrupt_hook',
        'mmgate.train.reproducible',
    ],
)
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    'optimizer wrapper constructor',
    parent=MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS,
    scope='mmgate',
    locations=['mmgate.speed.parameter_groups', 'mmgate.train.decay'],
)
