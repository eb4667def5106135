"""Hostile names and figures in every picture: text stays text, and a refusal is one clear line."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.errors import FileRefusedError, FlowrlError
from flowrl.paths import GraphPaths
from flowrl.viewing.curves import metric_picture, read_lines, skill_picture
from flowrl.viewing.drawing import Picture
from flowrl.viewing.plots import bars, compare_picture, graph_picture, needs_picture
from tests.hostile_names import HOSTILE
from tests.viewing.making import a_row, events_of, lines_of

pytestmark = pytest.mark.filterwarnings("ignore:Glyph", "ignore:.*identical")
FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TAGS = {
    *(
        "html",
        "meta",
        "title",
        "style",
        "h1",
        "table",
        "tr",
        "th",
        "td",
        "svg",
        "g",
        "path",
        "rect",
    ),
    *("text", "tspan", "use", "defs", "clippath", "pattern", "lineargradient", "stop", "image"),
}


class Page(HTMLParser):
    """Collects what a browser would do with a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    handle_startendtag = handle_starttag


def shows_only(picture: Picture) -> None:
    """Fail if a browser would execute or fetch anything of the picture, alone or in its page."""
    html = picture.written(".html").decode()
    ElementTree.fromstring(html[html.index("<svg") : html.rindex("</svg>") + 6])
    page = Page(html)
    own = {tag for tag in page.tags if not tag.startswith(("rdf:", "cc:", "dc:", "metadata"))}
    assert own <= TAGS, own - TAGS
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href", "src"):
            assert str(value).startswith(("#", "data:image/png;base64,"))
    assert "default-src 'none'" in html


@FEW
@given(name=st.sampled_from(HOSTILE) | st.text(max_size=60))
def test_any_name_is_text_in_every_picture(name, tmp_path):
    graph_paths = GraphPaths(tmp_path)
    moves = events_of(
        (0, name, "waiting"), (1, name, "running"), (3, name, "merging"), (4, name, "completed")
    )
    graph_paths.events.write_text("".join(f"{json.dumps(line)}\n" for line in moves))
    rows = [a_row(name, success_rate=0.5), a_row(f"{name}B", needs=(name,))]
    shows_only(graph_picture(graph_paths, rows))
    shows_only(needs_picture(name, rows))
    shows_only(compare_picture({name: {name: (0.5, 99), "B": (1.0, 9)}, "other": {name: (0.0, 9)}}))
    lines = lines_of(1, updates=4, steps=("0_Collect_Wood", f"1_{name}"))
    shows_only(skill_picture(name, lines))
    shows_only(metric_picture(name, [line | {f"m/{name}": 1} for line in lines], "m"))


KEYS = [*lines_of(1, updates=1)[0], "acted/expert_0", "acted/expert_7", "loss"]
COUNTS = st.integers(0, 2**53) | st.sampled_from([10**400, -1, 2**64])
VALUES = st.recursive(
    COUNTS | st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
)


@settings(FEW, max_examples=40)
@given(
    changes=st.lists(st.dictionaries(st.sampled_from(KEYS), COUNTS | VALUES, max_size=3)),
    missing=st.sets(st.sampled_from(KEYS), max_size=3),
    end=st.sampled_from(["", '{"frames": 9', "{", "\x00", "é"]),
    minutes=st.booleans(),
    metric=st.sampled_from([*KEYS, "died", "acted", "nosuch", ""]),
)
def test_any_figures_are_drawn_or_refused(tmp_path, changes, missing, end, minutes, metric):
    path = tmp_path / "metrics.jsonl"
    honest = lines_of(3, updates=max(len(changes), 1))
    lines = [own | change for own, change in zip(honest, [*changes, {}], strict=False)]
    lines = [{key: line[key] for key in line if key not in missing} for line in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + end)
    for draw in (skill_picture, lambda *a, **k: metric_picture(*a, metric, **k)):
        try:
            picture, said = draw("A", read_lines(path), minutes=minutes), "one line"
        except FlowrlError as error:
            picture, said = None, str(error)
        assert len(said.splitlines()) == 1
        if picture:
            shows_only(picture)
            json.dumps(picture.rows, allow_nan=False)


@settings(FEW, max_examples=100)
@given(
    lines=st.lists(
        st.fixed_dictionaries(
            {"at": st.datetimes().map(str) | VALUES},
            optional={
                "skill": st.sampled_from(["A", "B"]) | VALUES,
                "status": st.sampled_from(["waiting", "preparing", "running", "merging"]) | VALUES,
                "attempt": VALUES,
            },
        )
    )
)
def test_any_events_are_bars_or_refused(lines):
    try:
        found = bars(lines, {"A": ("B",), "B": ("A", "C")})
    except FileRefusedError:
        return
    assert all(bar.skill in [line.get("skill") for line in lines] for bar in found)


def test_a_page_has_the_last_of_many_rows():
    many = [{"n": number} for number in range(12_345)]
    figure = compare_picture({"a": {"A": (0.5, 256)}}).figure
    page = Picture("t", figure, many).written(".html").decode()
    assert page.count("<tr>") <= 1001
    assert "<td>12344</td>" in page
