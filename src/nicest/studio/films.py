"""The frames of inpaintings, kept for a while, to be saved as animations."""

from __future__ import annotations

import secrets
import threading
from functools import partial

import numpy as np

from nicest.errors import NicestError
from nicest.plots import animation, image_grid

FRAMES = 200  # of a film
BYTES = 16 * 2**20  # of its frames
KEPT = 6  # films, the newest


class Film:
    """Frames (chains, *shape), evenly thinned as they come: never more than are shown."""

    def __init__(self, brightest: float) -> None:
        self.brightest, self.frames, self.last = brightest, list[np.ndarray](), np.zeros(0)
        self.every, self.seen = 1, 0

    def add(self, images: np.ndarray) -> None:
        self.last = np.clip(images.astype(np.float32) * (255 / self.brightest), 0, 255).round().astype(np.uint8)
        if self.seen % self.every == 0:
            self.frames.append(self.last)
        self.seen += 1
        if len(self.frames) > max(2, min(FRAMES, BYTES // self.last.nbytes)):
            self.frames, self.every = self.frames[::2], 2 * self.every

    def gif(self) -> bytes:
        """The chains side by side, frame by frame; the last is held."""
        frames = [*self.frames, self.last] if self.frames[-1] is not self.last else self.frames
        chains = len(self.last)
        draw = partial(image_grid, brightest=255, columns=chains, size=160 * chains)
        return animation([draw(each) for each in frames], milliseconds=40)


class Films:
    """The newest films, by an id that nobody guesses."""

    def __init__(self) -> None:
        self.kept: dict[str, Film] = {}
        self.lock = threading.Lock()

    def begin(self, brightest: float) -> tuple[str, Film]:
        id, film = secrets.token_hex(8), Film(brightest)
        with self.lock:
            self.kept[id] = film
            for old in list(self.kept)[:-KEPT]:
                del self.kept[old]
        return id, film

    def find(self, id: str) -> Film:
        film = self.kept.get(id)
        if film is None or not film.frames:
            raise NicestError(
                f"the frames of this inpainting are not kept any more (only the last {KEPT} are): run it again"
            )
        return film
