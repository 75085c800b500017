"""Parts of the pictures of generated shapes: outlines, surfaces, backgrounds, and fragments that are no objects."""

from __future__ import annotations

import cv2
import numpy as np

CLASSES = ('circle', 'square', 'triangle', 'star', 'ring', 'cross')
HUE_SPREAD = 7.0  # half degrees; the classes lie 30 apart


def shape_mask(rng: np.random.Generator, label: int, size: int, diameter: float) -> np.ndarray:
    """Return the pixels of one rotated, slightly stretched shape whose centre lies in the image."""
    margin = diameter * 0.3
    cx, cy = rng.uniform(margin, size - margin, 2)
    angle = rng.uniform(0, 2 * np.pi)
    stretch = rng.uniform(0.8, 1.25)
    radius = diameter / 2
    y, x = np.mgrid[:size, :size] + 0.5
    dx = x - cx
    dy = y - cy
    u = (dx * np.cos(angle) + dy * np.sin(angle)) / (radius * stretch)
    v = (-dx * np.sin(angle) + dy * np.cos(angle)) / radius * stretch
    distance = np.hypot(u, v)
    direction = np.arctan2(v, u)
    name = CLASSES[label]
    if name == 'circle':
        return distance < 1
    if name == 'ring':
        return (distance < 1) & (distance > rng.uniform(0.45, 0.6))
    if name == 'square':
        return np.maximum(np.abs(u), np.abs(v)) < 0.8
    if name == 'cross':
        arm = rng.uniform(0.25, 0.35)
        return (np.minimum(np.abs(u), np.abs(v)) < arm) & (np.maximum(np.abs(u), np.abs(v)) < 1)
    if name == 'triangle':
        return (v > -0.55) & (v < 1 - np.abs(u) * 1.75)
    # star: a radius that falls linearly with the angle from each of five tips
    to_tip = np.abs((direction * 5 / (2 * np.pi)) % 1 - 0.5) * 2
    return distance < 0.42 + 0.68 * to_tip**1.5


def fragment_mask(rng: np.random.Generator, size: int, diameter: float) -> np.ndarray:
    """Return the pixels of a fragment that belongs to no class: an arc, a bent stroke or a blob, ``(S, S)`` bool."""
    mask = np.zeros((size, size), np.uint8)
    centre = rng.uniform(0, size, 2)
    radius = diameter / 2
    thickness = max(2, round(diameter * rng.uniform(0.1, 0.2)))
    kind = int(rng.integers(3))
    if kind == 0:
        start = rng.uniform(0, 360)
        axes = (round(radius), round(radius * rng.uniform(0.6, 1)))
        cv2.ellipse(mask, np.rint(centre).astype(int).tolist(), axes, start, 0, rng.uniform(60, 150), 1, thickness)
    elif kind == 1:
        corners = np.rint(centre + rng.uniform(-radius, radius, (3, 2))).astype(np.int32)
        cv2.polylines(mask, [corners], False, 1, thickness)
    else:
        turns = np.sort(rng.uniform(0, 2 * np.pi, 7))
        reach = radius * rng.uniform(0.3, 1, (7, 1))
        corners = np.rint(centre + reach * np.stack([np.cos(turns), np.sin(turns)], -1)).astype(np.int32)
        cv2.fillPoly(mask, [corners], 1)
    return mask.astype(bool)


def _muted_colour(rng: np.random.Generator) -> np.ndarray:
    return np.clip(rng.uniform(20, 235) + rng.normal(0, 20, 3), 0, 255)


def _object_colours(rng: np.random.Generator, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two saturated colours, with random hues around the class's; those of neighbouring classes overlap."""
    hue = (label * 180 / len(CLASSES) + rng.normal(0, HUE_SPREAD)) % 180  # OpenCV's hues are half degrees
    hsv = np.array([[[hue, 220, 235], [hue, rng.uniform(90, 220), rng.uniform(90, 170)]]], np.uint8)
    bgr = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0].astype(np.float64)
    return bgr[0], bgr[1]


def texture(rng: np.random.Generator, label: int, size: int) -> np.ndarray:
    """Return a plain, graded, striped, checkered or speckled surface, ``(S, S, 3)``."""
    y, x = np.mgrid[:size, :size].astype(np.float64)
    first, second = _object_colours(rng, label)
    angle = rng.uniform(0, np.pi)
    period = rng.uniform(4, 14)
    along = x * np.cos(angle) + y * np.sin(angle)
    across = -x * np.sin(angle) + y * np.cos(angle)
    kind = int(rng.integers(5))
    share: np.ndarray
    if kind == 0:
        share = np.zeros((size, size))
    elif kind == 1:
        share = (along - along.min()) / np.ptp(along)
    elif kind == 2:
        share = (along // (period / 2) % 2).astype(np.float64)
    elif kind == 3:
        share = ((along // (period / 2) + across // (period / 2)) % 2).astype(np.float64)
    else:
        share = np.asarray(cv2.GaussianBlur(rng.random((size, size)), (0, 0), 1.0))
        share = (share - share.min()) / np.ptp(share)
    return first + (second - first) * share[..., None]


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a soft background with strokes and specks, which are not annotated."""
    grid = int(rng.integers(2, 6))
    image = cv2.resize(_clutter_grid(rng, grid), (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(int(rng.integers(0, 8))):
        start = rng.integers(0, size, 2)
        end = rng.integers(0, size, 2)
        thickness = int(rng.integers(1, 3))
        cv2.line(image, start.tolist(), end.tolist(), _muted_colour(rng).tolist(), thickness, cv2.LINE_AA)
    for _ in range(int(rng.integers(0, 12))):
        centre = rng.integers(0, size, 2)
        radius = int(rng.integers(1, max(2, size // 40)))
        cv2.circle(image, centre.tolist(), radius, _muted_colour(rng).tolist(), -1, cv2.LINE_AA)
    return image


def _clutter_grid(rng: np.random.Generator, grid: int) -> np.ndarray:
    grey = rng.uniform(60, 200)
    return np.clip(grey + rng.normal(0, 12, 3) + rng.normal(0, 25, (grid, grid, 1)), 0, 255)
