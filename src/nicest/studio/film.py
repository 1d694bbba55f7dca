"""The frames of an inpainting, to be saved as an animation."""

from __future__ import annotations

from functools import partial

import numpy as np

from nicest.plots import animation, image_grid

FRAMES = 200  # of a film
BYTES = 16 * 2**20  # of its frames


class Film:
    """Frames (chains, *shape), evenly thinned as they come: the number of frames and their bytes are bounded."""

    def __init__(self, brightest: float) -> None:
        self.brightest, self.frames, self.last = brightest, list[np.ndarray](), np.zeros(0)
        self.every, self.seen = 1, 0

    def add(self, images: np.ndarray) -> None:
        """Add a frame (chains, *shape)."""
        self.last = np.clip(images.astype(np.float32) * (255 / self.brightest), 0, 255).round().astype(np.uint8)
        if self.seen % self.every == 0:
            self.frames.append(self.last)
        self.seen += 1
        if len(self.frames) > max(2, min(FRAMES, BYTES // self.last.nbytes)):
            self.frames, self.every = self.frames[::2], 2 * self.every

    def gif(self) -> bytes:
        """Return a GIF with the chains next to each other; it ends with the last frame."""
        frames = [*self.frames, self.last] if self.frames[-1] is not self.last else self.frames
        chains = len(self.last)
        draw = partial(image_grid, brightest=255, columns=chains, size=160 * chains)
        return animation([draw(each) for each in frames], milliseconds=40)
