"""Pictures as a film, mp4 or gif, or in a terminal; a leaf that loads Pillow, rich and PyAV."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import termios
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.control import Control
from rich.text import Text

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.paths import RunPaths, printable
from flowrl.storage import arrays

ENDINGS = (".mp4", ".gif")
_WIDTHS = {".mp4": 640, ".gif": 320}  # pixels at most, of a picture that is enlarged
_ARRAYS = ("frames", "captions", "holds")
_LARGEST = 4096  # pixels of a picture, each way
_LONGEST = 10.0  # seconds that a picture may stay longer
_COLOURS = 64  # of a gif
_SPACING = 1.4  # of lines, in sizes of the font
_LINES = 6  # of a caption at most
_LEAST = (20, 12)  # columns and lines of a terminal
_MOST_SLIM = 8  # times as wide as high, or the reverse, of a picture in a terminal
_INK, _PAPER = (230, 230, 230), (24, 24, 27)


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """T pictures with captions."""

    frames: np.ndarray  # uint8 `[T, H, W, 3]`
    captions: tuple[str, ...]  # lines of text
    holds: tuple[float, ...]  # seconds that each picture stays beyond those of every one


def film_of(content: bytes) -> Film:
    """The film that `PlayCommand.work` printed; FileRefusedError if it is none."""
    columns = arrays.read(content, _ARRAYS, place="the pictures", remedy="try again")
    frames, captions, holds = (columns[name] for name in _ARRAYS)
    if not _is_film(frames, captions, holds):
        raise FileRefusedError("the pictures are not those of an episode; try again")
    said = tuple("\n".join(map(printable, str(caption).split("\n"))) for caption in captions)
    return Film(frames=frames, captions=said, holds=tuple(map(float, holds)))


def _is_film(frames: np.ndarray, captions: np.ndarray, holds: np.ndarray) -> bool:
    """True if arrays have the shapes and bounds of a film; skill code may have written them."""
    drawn = frames.ndim == 4 and frames.dtype == np.uint8 and frames.shape[-1] == 3
    if not drawn or not 0 < min(frames.shape) <= max(frames.shape[1:]) <= _LARGEST:
        return False
    if captions.dtype.kind != "U" or holds.dtype.kind != "f":
        return False
    same = captions.shape == holds.shape == frames.shape[:1]
    return same and bool(((holds >= 0) & (holds <= _LONGEST)).all())


def check_encoder(path: Path) -> None:
    """Raise ConfigError if a film of this ending needs what is not installed."""
    if path.suffix == ".mp4" and importlib.util.find_spec("av") is None:
        raise ConfigError(f"{path} needs PyAV; pip install '.[video]', or write a .gif")


def check_terminal(console: Console) -> None:
    """Raise ConfigError if a terminal has no colours, says no size, or is too small for a film."""
    if console.is_dumb_terminal or console.no_color:
        why = "NO_COLOR is set" if console.no_color else f"TERM is {os.environ.get('TERM')}"
        problem = f"the terminal is to show no colours, as {printable(why)}"
        raise ConfigError(f"{problem}; unset it, or name a file with -o play.gif")
    if console.is_terminal and 0 in os.get_terminal_size(console.file.fileno()):
        problem = "the terminal does not say its size"
        raise ConfigError(f"{problem}; try `stty rows 24 cols 80`, or name a file with -o play.gif")
    columns, lines = _LEAST
    if console.width < columns or console.height < lines:
        has = f"{console.width} × {console.height}"
        problem = f"the terminal has {has} characters, and a film needs {columns} × {lines}"
        raise ConfigError(f"{problem}; enlarge it, or name a file with -o play.gif")


def kept_film(archive: RunPaths) -> Path:
    """The film that is kept beside an expert: mp4 if PyAV is installed, else gif."""
    return archive.films[importlib.util.find_spec("av") is None]


def encoded(film: Film, ending: str, *, fps: int) -> bytes:
    """The film as the content of a file with this ending, `.mp4` or `.gif`."""
    from matplotlib import get_data_path  # Pillow's own font lacks signs such as ×

    times = max(1, _WIDTHS[ending] // film.frames.shape[2])
    width = film.frames.shape[2] * times
    place = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(place, max(11, width // 48))
    texts = _texts(film.captions, int(width / font.getlength("n")))
    pictures = (
        _captioned(frame.repeat(times, axis=0).repeat(times, axis=1), text, font)
        for frame, text in zip(film.frames, texts, strict=True)
    )
    return _mp4(pictures, film.holds, fps) if ending == ".mp4" else _gif(pictures, film.holds, fps)


def _texts(captions: Iterable[str], columns: int) -> list[list[str]]:
    """The lines of captions that fit into so many columns, the same number for each."""
    texts = [
        [part for line in caption.split("\n") for part in wrap(line, columns)][:_LINES]
        for caption in captions
    ]
    most = max(map(len, texts))
    return [[*text, *[""] * (most - len(text))] for text in texts]


def _captioned(frame: np.ndarray, text: Sequence[str], font: Any) -> Image.Image:
    """A picture with lines of text below it, of even sizes."""
    line = int(_SPACING * font.size)
    height, width = frame.shape[0] + line * len(text) + line // 2, frame.shape[1]
    canvas = Image.new("RGB", (width + width % 2, height + height % 2), _PAPER)
    draw = ImageDraw.Draw(canvas)
    for number, part in enumerate(text):
        place = (font.size / 2, frame.shape[0] + line * (number + 0.75))
        draw.text(place, part, _INK, font, anchor="lm")
    canvas.paste(Image.fromarray(frame))
    return canvas


def _mp4(pictures: Iterable[Image.Image], holds: Iterable[float], fps: int) -> bytes:
    import av

    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream: Any = None
        for picture, hold in zip(pictures, holds, strict=True):
            if stream is None:
                options = {"crf": "23", "preset": "veryfast"}
                stream = container.add_stream("libx264", rate=fps, options=options)
                stream.width, stream.height = picture.size
                stream.pix_fmt = "yuv420p"
            for _ in range(1 + round(hold * fps)):
                container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return content.getvalue()


def _gif(pictures: Iterable[Image.Image], holds: Iterable[float], fps: int) -> bytes:
    content = io.BytesIO()
    first, *others = (picture.quantize(_COLOURS) for picture in pictures)
    times = [10 * round(100 * (1 / fps + hold)) for hold in holds]  # gif counts hundredths
    options: Mapping[str, Any] = {"save_all": True, "loop": 0, "disposal": 1}
    first.save(content, "GIF", append_images=others, duration=times, **options)
    return content.getvalue()


def show(film: Film, console: Console, *, fps: int) -> None:
    """Play a film in a terminal: by sixel or kitty's protocol if it can, else in half blocks."""
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # keys are no answers
    from textual_image.renderable import Image as Picture  # it asks the terminal what that can do

    texts = _texts(film.captions, console.width)
    room = max(1, console.height - 1 - len(texts[0]))
    before = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cursor comes back, too
    try:
        console.show_cursor(show=False)
        console.clear()
        for frame, text, hold in zip(film.frames, texts, film.holds, strict=True):
            picture = Picture(_not_too_slim(frame), "auto", "auto")
            below = Text("\n".join(part.ljust(console.width) for part in text))
            with console:  # all at once, so that nothing flickers
                console.control(Control.home())
                console.print(picture, height=room)
                console.print(below, end="")
            if before:
                before.cleanup()  # what the terminal keeps of it
            before = picture
            time.sleep(1 / fps + hold)
    finally:
        console.show_cursor()
        console.print()


def _not_too_slim(frame: np.ndarray) -> Image.Image:
    """A picture, with a margin if it would be less than a character wide or high."""
    height, width = frame.shape[:2]
    size = (max(width, -(-height // _MOST_SLIM)), max(height, -(-width // _MOST_SLIM)))
    canvas = Image.new("RGB", size, _PAPER)
    canvas.paste(Image.fromarray(frame))
    return canvas
