"""Sizes, colours and panels that all figures share; the colour-blind can tell the colours (Okabe and Ito's) apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#000000')
DIVERGING = 'RdBu_r'  # centred on 0
SEQUENTIAL = 'viridis'
LINE = 75  # characters of a title as wide as a figure
WIDTH = 7.0  # inches: at half a page, text of 9 points stays above 4


def read_image(path: str) -> np.ndarray:
    """Read an image file and return it as RGB ``(h, w, 3)``, turned upright by its EXIF orientation."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert('RGB'))


def image_of(sample: Any) -> np.ndarray:
    """Return a data sample's image as RGB ``(h, w, 3)``, of its file or, of a data set without files, from memory."""
    image = sample.get('image')
    if image is None:
        return read_image(sample.img_path)
    return image if image.ndim == 3 else np.repeat(image[..., None], 3, -1)


def panels(rows: int, columns: int, *, height: float, width: float = WIDTH) -> tuple[Figure, np.ndarray]:
    """Return a new matplotlib figure, which opens no window, and its axes; rows are ``height`` inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
    return figure, axes


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure into a PNG file, in a folder that is made if it is missing, and return the file's path."""
    for axis in figure.axes:
        axis.title.set_fontsize(9)
        for label in (axis.xaxis.label, axis.yaxis.label):
            label.set_fontsize(8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=max(150, figure.dpi), bbox_inches='tight', pad_inches=0.06)
    return path


def show_map(axis: Axes, values: np.ndarray, image: np.ndarray | None = None, **style: Any) -> AxesImage:
    """Draw a map ``(h, w)`` of values in colours on an axis, over a grey image if one is given; return the artist."""
    if image is None:
        return axis.imshow(values, **style)
    height, width = image.shape[:2]
    extent = (0, width, height, 0)
    # A pale image, so that its dark objects do not look like low values.
    axis.imshow(image.mean(-1), cmap='gray', extent=extent, vmin=-127, vmax=255)
    return axis.imshow(values, extent=extent, interpolation='bilinear', **style)


def colour_bar(
    figure: Figure, drawn: ScalarMappable, axes: Axes | np.ndarray, label: str = '', **options: Any
) -> Colorbar:
    """Add a colour bar for a map that :func:`show_map` has drawn, beside the given axes, and return it."""
    bar = figure.colorbar(drawn, ax=axes, **{'shrink': 0.8, **options})
    bar.ax.tick_params(labelsize=7)
    bar.set_label(label, fontsize=8)
    return bar


def layer_axis(axis: Axes, xlabel: str = 'layer') -> None:
    """Give an axis whose x counts layers or steps a label, ticks at whole numbers and a grid."""
    axis.set_xlabel(xlabel)
    axis.locator_params(axis='x', integer=True)
    axis.grid(alpha=0.3)


def from_zero(axis: Axes) -> None:
    """Let an axis' values begin at 0, with room above the largest for its marker."""
    top = float(axis.dataLim.y1)
    axis.set_ylim(0, 1.06 * top if np.isfinite(top) and top > 0 else None)


def legend(figure: Figure, handles: Sequence[Artist] = (), *, note: str = '', columns: int = 2) -> None:
    """Write the legend below a figure, and under it a note that explains how to read the figure."""
    style: dict[str, Any] = dict(fontsize=7, title_fontsize=7, frameon=False, ncols=columns)
    figure.legend(handles=handles, title=note or None, loc='outside lower center', **style)


def add_box(axis: Axes, corners: Iterable[float], **style: Any) -> None:
    """Draw the outline of a box with the corners ``(x1, y1, x2, y2)`` on an axis."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = (float(x) for x in corners)
    axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))


def class_name(label: int, names: Sequence[str]) -> str:
    """Return the name of the object class with this number, or the number as text if its name is not known."""
    return names[label] if 0 <= label < len(names) else f'class {label}'


def short(path: str, length: int = 34) -> str:
    """Shorten a module's dotted path for a label: if it is longer than ``length``, dots replace its middle."""
    return path if len(path) <= length else f'{path[: length // 2 - 1]}…{path[-length // 2 :]}'


def layer_labels(paths: Sequence[str], length: int = 34) -> list[str]:
    """Return short labels for modules: their paths without the names with which all of them begin and end.

    Numbers stay.

    Args:
        paths: The modules' paths.
        length: Characters from which a label's middle is left out.
    """
    split = [path.split('.') for path in paths]
    shortest = min(len(names) for names in split)

    def shared(place: int) -> bool:
        return not split[0][place].isdigit() and len({names[place] for names in split}) == 1

    first = next((i for i in range(shortest) if not shared(i)), 0)
    last = next((i for i in range(1, shortest - first + 1) if not shared(-i)), 1)
    return [short('.'.join(names[first : len(names) - last + 1]), length) for names in split]
