"""What a config or its data did wrong, where a run fails: one message in the place of a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .preflight import ConfigError

PACKAGE = Path(__file__).parents[1]
TRACEBACK = 'MMGATE_TRACEBACK=1 shows the traceback'
_RUNNING = {
    'Cannot find valid image after': 'no image of the training data got through the pipeline: its transforms dropped '
    'one after the other. Look at what drops samples (LoadImageFromFile.ignore_empty, FilterAnnotations), and at the '
    'images and annotations that they meet',
    'Expected more than 1 value per channel when training': 'a batch norm met one number a channel, a batch of one '
    'image and a map of one pixel. Use larger images or a larger train_dataloader.batch_size, with '
    'train_dataloader.drop_last=True where the last batch is what is left over',
    'Results do not correspond to current coco set': "CocoMetric's ann_file does not list every image of the data set. "
    'Set ann_file of both to the same file',
    "'segm is not in results'": 'CocoMetric measures segm, and this model predicts no masks. Set metric of the '
    "evaluator to 'bbox'",
}


@contextmanager
def explained_run() -> Iterator[None]:
    """Turn errors of a run that only its data or config can mend into one message."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        for sign, meaning in _RUNNING.items():
            if sign in str(error):
                raise ConfigError(f'{meaning}.') from error
        frames = traceback.extract_tb(error.__traceback__)
        last, passed = frames[-1], {frame.name for frame in frames}
        if 'loaded state dict' in str(error) and passed & {'resume', 'load_or_resume'}:
            raise ConfigError(
                'the checkpoint to resume groups its parameters otherwise than this config: other rates or another '
                'constructor in optim_wrapper. A run goes on with its own config alone; --cfg-options load_from=FILE '
                'without --resume starts a new one from its weights.'
            ) from error
        if isinstance(error, IndexError) and last.name == 'results2json':
            raise ConfigError(
                "the model found a class that CocoMetric's ann_file does not have as a category. Set num_classes of "
                'the heads to the number of the classes.'
            ) from error
        said = str(last.line).startswith('raise')  # and not by Python
        if isinstance(error, ValueError) and said and Path(last.filename).is_relative_to(PACKAGE):
            raise ConfigError(f'{error} ({TRACEBACK})') from error
        if 'build_from_cfg' in passed and not passed & {'run_iter', 'run_epoch'}:  # what is built at the start
            raise cannot_be_built(error) from error
        raise


def cannot_be_built(error: Exception) -> ConfigError:
    """Return an error that a component's constructor raised, or a registry, as one message."""
    reason = error.args[0] if isinstance(error, KeyError) and error.args else error
    return ConfigError(f'the config cannot be built: {type(error).__name__}: {reason} ({raised_at(error)})')


def raised_at(error: Exception) -> str:
    """Return in words the last place that an error passed, and how to see the others."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f'{last.filename}:{last.lineno}; {TRACEBACK}'
