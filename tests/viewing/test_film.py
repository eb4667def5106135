"""Films: what is written can be read again, picture by picture, and what is no film is refused."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence
from rich.console import Console

from flowrl.agent import Agent, AgentStep
from flowrl.errors import ConfigError, FileRefusedError, GraphError
from flowrl.measures.episodes import EpisodesOrigin, RecordedEpisode, RecordedEpisodes
from flowrl.viewing.film import Film, check_encoder, check_terminal, encoded, film_of
from flowrl.viewing.pictures import _shown, pictures, recorded_pictures

av = pytest.importorskip("av", reason="PyAV is not installed: pip install '.[video]'")


def a_film(times: int = 6, size: tuple[int, int] = (9, 7), caption: str = "step 1") -> Film:
    """Pictures that become brighter."""
    levels = np.linspace(0, 250, times).astype(np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (times, *size, 3)).copy()
    return Film(frames=frames, captions=(caption,) * times, holds=(0.0,) * (times - 1) + (1.0,))


def pictures_in(content: bytes, ending: str) -> list[np.ndarray]:
    if ending == ".gif":
        image = Image.open(io.BytesIO(content))
        return [np.asarray(picture.convert("RGB")) for picture in ImageSequence.Iterator(image)]
    with av.open(io.BytesIO(content)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("ending", [".mp4", ".gif"])
def test_every_picture_is_in_the_film_and_the_last_one_stays(ending):
    film = a_film()
    found = pictures_in(encoded(film, ending, fps=10), ending)
    assert len(found) == len(film.frames) + (10 if ending == ".mp4" else 0)
    assert all(size % 2 == 0 for size in found[0].shape[:2])
    for frame, seen in zip(film.frames, found, strict=False):
        assert abs(int(seen[4, 4].mean()) - int(frame[0, 0].mean())) < 8


def test_a_gif_holds_the_last_picture_as_long_as_it_says():
    image = Image.open(io.BytesIO(encoded(a_film(), ".gif", fps=10)))
    held = [picture.info["duration"] for picture in ImageSequence.Iterator(image)]
    assert held == [100] * 5 + [1100]


@settings(max_examples=20, deadline=None)
@given(caption=st.text(max_size=300), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_a_caption_changes_no_pixel_of_the_picture_and_no_width(caption, size):
    """Names of skills are anything that can be printed; no film has over six lines of them."""
    film, plain = a_film(2, size, caption), a_film(2, size, "")
    found, other = (pictures_in(encoded(each, ".gif", fps=5), ".gif")[0] for each in (film, plain))
    assert found.shape[1] == other.shape[1]
    assert 0 <= found.shape[0] - other.shape[0] < 100
    times = 320 // size[1]
    drawn = found[: size[0] * times, : size[1] * times]
    assert drawn.max() < 8, "the first picture is black"


GOOD = {"frames": np.zeros((2, 3, 3, 3), "u1"), "captions": ["a", "b"], "holds": [0.0, 1.0]}


def packed(**arrays) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def bare() -> bytes:
    content = io.BytesIO()
    np.save(content, np.zeros(3))
    return content.getvalue()


BAD = [
    {"frames": np.zeros((2, 3, 3, 3))},
    {"frames": np.zeros((2, 0, 3, 3), "u1")},
    {"frames": np.zeros((0, 3, 3, 3), "u1"), "captions": [], "holds": []},
    {"frames": np.zeros((1, 1, 5000, 3), "u1"), "captions": ["a"], "holds": [0.0]},
    {"frames": np.array([{}])},
    {"captions": ["a"]},
    {"captions": "a"},
    {"captions": [1, 2]},
    {"captions": [["a"], ["b"]]},
    {"holds": [0.0]},
    {"holds": 1.0},
    {"holds": [0.0, np.nan]},
    {"holds": [0.0, np.inf]},
    {"holds": [-5.0, 0.0]},
    {"holds": [0.0, 1e12]},
    {"holds": [[0.0], [0.0]]},
    {"holds": np.zeros(2, [("x", float)])},
]


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", bare(), packed(), *(packed(**{**GOOD, **bad}) for bad in BAD)],
)
def test_what_is_no_film_is_refused_and_nothing_is_unpickled(content):
    assert len(film_of(packed(**GOOD)).frames) == 2
    with pytest.raises(FileRefusedError, match=r"the pictures (cannot be read|are not those)"):
        film_of(content)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_film_is_a_film_or_one_line(data):
    content = bytearray(packed(**GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FileRefusedError):
        encoded(film_of(bytes(content)), ".gif", fps=10)


def test_a_caption_cannot_command_a_terminal():
    film = film_of(packed(**{**GOOD, "captions": ["\x1b]52;c;ZXZpbA==\x07\x1b[2J", "a\nb"]}))
    assert not {"\x1b", "\x07"} & set("".join(film.captions))


def test_the_lines_of_a_caption_are_below_every_picture_at_the_same_place():
    """The first line of the second caption is too long for the picture."""
    captions = ("step 1\nhealth 9\nwood 1", f"step 1: {'died ' * 30}\nhealth 0", "")
    film = replace(a_film(3, (40, 80)), captions=captions)
    assert len({found.shape for found in pictures_in(encoded(film, ".gif", fps=5), ".gif")}) == 1
    first, second, third = shown(film, columns=30, rows=12)
    assert len(first) == len(second) == len(third) <= 12
    assert [line.strip() for line in first[-6:]] == ["step 1", "health 9", "wood 1", "", "", ""]
    assert second[-6].startswith("step 1: died died")
    assert all(len(line) <= 30 for line in second[-6:])


def test_mp4_needs_its_extra(tmp_path, monkeypatch):
    check_encoder(tmp_path / "film.mp4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_encoder(tmp_path / "film.gif")
    with pytest.raises(ConfigError, match=re.escape("pip install '.[video]', or write a .gif")):
        check_encoder(tmp_path / "film.mp4")


PLAY = """import sys
from rich.console import Console
from flowrl.viewing.film import check_terminal, film_of, show
film, screen = film_of(open(sys.argv[1], "rb").read()), Console(color_system="truecolor")
check_terminal(screen)
show(film, screen, fps=1000)"""
SIXEL, KITTY, PLAIN = "\x1b[?62;4c", "\x1b_Gi=1;OK\x1b\\", "\x1b[?1;2c"


def played(film: Film, *answers: str, columns: int = 20, rows: int = 12) -> str:
    """What a terminal gets that answers questions so; its cells have 8 × 16 pixels."""
    frames, captions, holds = film.frames, list(film.captions), [0.0] * len(film.frames)
    screen, terminal = os.openpty()
    fcntl.ioctl(
        terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 8 * columns, 16 * rows)
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(packed(frames=frames, captions=captions, holds=holds))
        file.flush()
        words = [sys.executable, "-c", PLAY, file.name]
        env = {name: said for name, said in os.environ.items() if name not in ("COLUMNS", "LINES")}
        child = subprocess.Popen(words, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        said, left = "", [*answers]
        with contextlib.suppress(OSError):  # the child has ended
            while part := os.read(screen, 65536).decode(errors="replace"):
                said += part
                if left and said.rstrip("\x1b\\").endswith(("\x1b[c", ";AAAA")):
                    os.write(screen, left.pop(0).encode())
        os.close(screen)
        assert child.wait() == 0, said
    return said.replace("\r\n", "\n")


def shown(film: Film, *, columns: int, rows: int) -> list[list[str]]:
    """The lines of each picture in a terminal that draws nothing but characters."""
    said = played(film, PLAIN, columns=columns, rows=rows)
    parts = re.sub(r"\x1b\[[0-9;?]*[a-zG-Z]", "", said.replace("\x1b[H", "\0")).split("\0")
    return [part.rstrip("\n").split("\n") for part in parts if "▀" in part]


def test_a_terminal_shows_each_picture_within_its_size_and_is_left_as_it_was():
    said = played(a_film(3, (40, 80)), PLAIN)
    assert said.count("\x1b[?25l") == 1
    assert said.endswith("\x1b[?25h\n")
    assert said.index("\x1b[38;2;0;0;0;48;2;0;0;0m▀") < said.index("\x1b[38;2;250;250;250;48;2;")
    pictures = shown(a_film(3, (40, 80)), columns=20, rows=12)
    assert len(pictures) == 3
    for lines in pictures:
        assert 0 < max(line.count("▀") for line in lines) <= 20
        assert len(lines) <= 12


def test_a_small_terminal_is_refused_and_the_smallest_one_shows_any_picture():
    for size in (19, 12), (20, 11), (1, 1):
        with pytest.raises(ConfigError, match="a film needs 20 × 12; enlarge it"):
            check_terminal(Console(width=size[0], height=size[1]))
    with pytest.raises(AssertionError, match="the terminal does not say its size; try `stty rows"):
        played(a_film(1), columns=0, rows=0)
    check_terminal(Console(width=20, height=12))
    for size in (1, 1), (1, 300), (300, 1):
        film = a_film(1, size, "a [red]b[/]\n" * 9)
        assert "▀" in played(film, PLAIN)
        assert "\x1bP" in played(film, SIXEL)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_is_refused(monkeypatch, name, value):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    check_terminal(Console(width=20, height=12))
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"no colours, as {name} is .*; unset it, or name a fil"):
        check_terminal(Console(force_terminal=True, width=20, height=12, file=io.StringIO()))


def test_a_film_that_is_ended_gives_the_cursor_back():
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 12, 20, 192, 160))
    with tempfile.NamedTemporaryFile() as file:
        frames = a_film(2, (4, 4)).frames
        file.write(packed(frames=frames, captions=["a", "b"], holds=[9.0, 0.0]))
        file.flush()
        words = [sys.executable, "-c", PLAY, file.name]
        child = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL)
        os.close(terminal)
        said = ""
        while "▀" not in said:
            said += os.read(screen, 65536).decode(errors="replace")
            if said.endswith("\x1b[c"):
                os.write(screen, PLAIN.encode())
        child.terminate()
        with contextlib.suppress(OSError):
            while part := os.read(screen, 65536).decode(errors="replace"):
                said += part
        os.close(screen)
        assert child.wait() != 0
    assert "\x1b[?25l" in said
    assert said.rpartition("\x1b[?25h")[2].strip() == ""


def test_a_terminal_that_can_draws_the_pixels_themselves():
    film = a_film(3, (40, 80))
    by_sixel, by_kitty = played(film, SIXEL), played(film, PLAIN, KITTY)
    assert by_sixel.count("\x1bP") == 3, "a sixel picture begins so"
    sent = re.findall(r"\x1b_G([^;]*)(?:;([^\x1b]*))?\x1b", by_kitty)
    begun = [keys for keys, _ in sent if "f=100" in keys]
    pictures = "".join(text for keys, text in sent if "f=100" in keys).split("iVBOR")[1:]
    found = [np.asarray(Image.open(io.BytesIO(b64decode("iVBOR" + text)))) for text in pictures]
    assert len(begun) >= len(found) == 3
    assert [int(each.mean()) for each in found] == [int(each.mean()) for each in film.frames]
    assert sum("a=d" in keys for keys, _ in sent) == 2, "it forgets all but the last"
    assert "▀" not in by_sixel + by_kitty


def steps_of(*places: int, success: bool = False, cause: str = "") -> list[AgentStep]:
    """An episode whose timesteps are in these steps of a plan."""
    last = len(places) - 1
    return [
        AgentStep(
            observation=np.zeros(1),
            skill=f"Skill {place}",
            step=place,
            count=1 + 3 * (place == 3),
            expert=10 + place,
            action=0,
            reward=0.0,
            success=success and number == last,
            done=number == last,
            cause=cause if number == last else "",
            intrinsics={"health": 9.0, "food": 0.125} if place == 3 else {},
            inventory={"wood_pickaxe": 12} if place == 3 else {},
            frame=np.zeros((1, 1, 3), np.uint8),
        )
        for number, place in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("ending", "said"),
    [({"success": True}, "done"), ({"cause": "zombie"}, "died: zombie"), ({}, "not done")],
)
def test_captions_say_where_the_plan_is_and_how_the_episode_ended(ending, said):
    lines, _, holds = zip(*_shown(2, steps_of(0, 0, 1, 3, **ending), 4), strict=True)
    assert lines == (
        "episode 2, step 1/4 Skill 0, expert 10, timestep 1",
        "episode 2, step 1/4 Skill 0, expert 10, timestep 2",
        "episode 2, step 2/4 Skill 1, expert 11, timestep 1",
        f"episode 2, step 4/4 Skill 3 × 4, expert 13, timestep 1: {said}\n"
        "health 9, food 0.125\nwood pickaxe 12",
    )
    assert holds == (0.0, 0.5, 0.5, 1.5)


class Lucky(Agent):
    """An agent whose episodes succeed in all seeds but every fifth."""

    def __init__(self) -> None:
        """It has no experts."""

    def plan(self, skill: str | int) -> tuple[str, ...]:
        return ("Skill 0", str(skill))

    def play(self, skill: str | int, *, seed: int = 0, frames: bool = False) -> Iterator[AgentStep]:
        return iter(steps_of(0, 1, success=seed % 5 > 0))

    def replay(
        self, skill: str | int, episode: RecordedEpisode, *, frames: bool = False
    ) -> Iterator[AgentStep]:
        return iter(steps_of(0, 1, success=episode.success))


def test_recorded_episodes_are_shown_as_far_as_there_are_some(monkeypatch):
    """The second and the fourth of five fail; a film of more than it holds is refused."""
    columns = {"lengths": np.ones(5, np.int32), "success": np.arange(5) % 2 == 0}
    rows = ("world_keys", "actions", "steps", "step_keys", "rewards", "digests")
    columns |= {name: np.zeros(5, np.int32) for name in rows}
    origin = EpisodesOrigin(skill="a", env_name="b", module="c", generation=1, seed=2)
    recorded = RecordedEpisodes(origin=origin, columns=columns)

    def captions(episodes: int, **asked: Any) -> list[str]:
        content = recorded_pictures(Lucky(), "Skill 1", recorded, episodes=episodes, **asked)
        return [*film_of(content).captions[1::2]]

    def said(episodes: int, **asked: Any) -> list[str]:
        return [caption.rpartition(": ")[2] for caption in captions(episodes, **asked)]

    assert said(3, failures=False) == ["done", "not done", "done"]
    assert said(9, failures=False) == ["done", "not done"] * 2 + ["done"]
    assert said(9, failures=True) == ["not done"] * 2
    (shown,) = captions(1, failures=True, first=3)
    assert shown.startswith("episode 4, ")
    with pytest.raises(GraphError, match="no failure of Skill 1 is recorded from number 5 on; use"):
        captions(1, failures=True, first=5)
    monkeypatch.setattr("flowrl.viewing.pictures._MOST", 6)
    with pytest.raises(ConfigError, match="up to number 4 have over 6 timesteps, more than"):
        said(9, failures=False)
    columns["success"][:] = True
    with pytest.raises(GraphError, match="no failure of Skill 1 is recorded; use flowrl evaluate"):
        said(9, failures=True)


@given(episodes=st.integers(1, 6), seed=st.integers(0, 20))
def test_only_failures_are_shown_where_they_are_asked_for(episodes, seed):
    asked = {"episodes": episodes, "seed": seed}
    film = film_of(pictures(Lucky(), "Skill 1", failures=True, **asked))
    assert len(film.frames) == 2 * episodes
    assert all(caption.endswith("not done") for caption in film.captions[1::2])
    film = film_of(pictures(Lucky(), "Skill 1", failures=False, **asked))
    said = ["done" if (seed + n) % 5 else "not done" for n in range(episodes)]
    assert [caption.rpartition(": ")[2] for caption in film.captions[1::2]] == said


def test_too_few_failures_are_said(monkeypatch):
    monkeypatch.setattr("flowrl.viewing.pictures._TRIED", 2)
    with pytest.raises(
        GraphError, match="only 2 of 6 episodes of Skill 1 fail; ask for --episodes 2"
    ):
        pictures(Lucky(), "Skill 1", episodes=3, seed=0, failures=True)
