"""Polygons that cover a mask exactly: outlines along the edges of its pixels."""

from __future__ import annotations

import cv2
import numpy as np

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up: clockwise in image coordinates


def outlines(mask: np.ndarray) -> list[list[int]]:
    """Return COCO polygons ``[x0, y0, x1, y1, ...]`` whose union is ``mask``, pixel for pixel.

    COCO takes the union of an object's polygons, so a hole cannot be written: a part with a hole is cut in two there.

    Args:
        mask: ``(H, W)`` bool.
    """
    polygons: list[list[int]] = []
    pending = [mask]
    while pending:
        # Four-connected parts; a diagonal contact would make an outline cross itself.
        count, parts = cv2.connectedComponents(pending.pop().astype(np.uint8), connectivity=4)
        for number in range(1, count):
            part = parts == number
            column = _column_of_hole(part)
            if column is None:
                polygons.append(_trace(part))
                continue
            left = part.copy()
            left[:, column:] = False
            pending += [left, part & ~left]
    return polygons


def _column_of_hole(part: np.ndarray) -> int | None:
    """Return a column that runs through a hole of ``part``, or None."""
    outside = np.pad(~part, 1, constant_values=True).astype(np.uint8)
    # Eight-connected background: a hole that touches the outside diagonally is traced as outside.
    _, regions = cv2.connectedComponents(outside, connectivity=8)
    holes = (regions != regions[0, 0]) & (outside == 1)
    columns = np.flatnonzero(holes.any(0))
    return None if len(columns) == 0 else int(columns[len(columns) // 2]) - 1


def _trace(part: np.ndarray) -> list[int]:
    """Return the one outline of a part without holes, clockwise, corners only."""
    padded = np.pad(part, 1)

    def inside(x: int, y: int) -> bool:
        return bool(padded[y + 1, x + 1])

    row = int(np.flatnonzero(part.any(1))[0])
    x = start_x = int(np.flatnonzero(part[row])[0])
    y = start_y = row
    direction = 0  # along the top edge of the first pixel, the part on the right-hand side
    corners = [x, y]
    while True:
        dx, dy = _STEPS[direction]
        x, y = x + dx, y + dy
        # The two pixels ahead of the corner, on the left and on the right of the way.
        ahead = {
            0: ((x, y - 1), (x, y)),
            1: ((x, y), (x - 1, y)),
            2: ((x - 1, y), (x - 1, y - 1)),
            3: ((x - 1, y - 1), (x, y - 1)),
        }
        left, right = ahead[direction]
        if not inside(*right):
            turned = (direction + 1) % 4  # first, so that a diagonal contact is not crossed
        elif inside(*left):
            turned = (direction - 1) % 4
        else:
            turned = direction
        if (x, y) == (start_x, start_y) and turned == 0:
            return corners
        if turned != direction:
            corners += [x, y]
            direction = turned
