"""Figures of matplotlib, which is loaded late: their styles, and the files made of them."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.paths import printable

ENDINGS = (".svg", ".png", ".pdf", ".html")
# The colours that M. Okabe and K. Ito chose for all kinds of colour vision, but for the yellow,
# which is too pale on paper; then the same, dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
_STYLE: Any = {
    **{"font.size": 9, "axes.spines.top": False, "axes.spines.right": False},
    **{"svg.fonttype": "none", "savefig.bbox": "tight", "figure.dpi": 120},
    **{"svg.hashsalt": "flowrl", "hatch.linewidth": 0.6, "axes.titlesize": 10},
}
LEGEND: Any = {"frameon": False, "fontsize": 8}
BESIDE: Any = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), **LEGEND}
_OTHER_SCRIPTS = re.compile("CJK|Source Han|WenQuanYi|Fallback|Gothic|PingFang|YaHei|Unifont")
_HALF = 25  # characters of a long text, from each end
_MOST_ROWS = 1000  # of a page's table
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>body{{font:14px sans-serif;margin:2em}} svg{{max-width:100%;height:auto}}
td,th{{padding:.1em .8em;text-align:left;font-variant-numeric:tabular-nums}}</style>
<h1>{title}</h1>
{svg}
<table>
{rows}
</table></html>
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of matplotlib, and the rows of its numbers by column; None where there is none."""

    title: str
    figure: Any
    rows: Sequence[Mapping[str, Any]]

    def written(self, ending: str) -> bytes:
        """Return the content of a file with one of `ENDINGS`; it has no date and no script."""
        import matplotlib
        from matplotlib.text import Text

        if ending == ".html":
            return self._page()
        content, fonts = io.BytesIO(), _fonts()
        for text in self.figure.findobj(Text):
            text.set_fontfamily(fonts)
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box is drawn
            dated = (
                {} if ending == ".png" else {"Date" if ending == ".svg" else "CreationDate": None}
            )
            self.figure.savefig(content, format=ending.removeprefix("."), metadata=dated)
        return content.getvalue()

    def _page(self) -> bytes:
        svg = self.written(".svg").decode()
        step = -(-len(self.rows) // _MOST_ROWS) or 1  # the last row is among them
        table = [[*self.rows[0]], *(row.values() for row in self.rows[::-step][::-1])]
        rows = ("".join(f"<td>{html.escape(said(cell))}</td>" for cell in row) for row in table)
        lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
        title = html.escape(printable(self.title))
        return _PAGE.format(title=title, svg=svg[svg.index("<svg") :], rows=lines).encode()


def _fonts() -> list[str]:
    """Return matplotlib's own font, then installed ones for what it cannot write."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    others = sorted(name for name in installed if _OTHER_SCRIPTS.search(name))
    return ["DejaVu Sans", *others, "sans-serif"]


def said(cell: Any) -> str:
    """Return a cell of a table as text; None is nothing."""
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else printable(str(cell))


def figure_and_axes(rows: int, size: tuple[float, float], **how: Any) -> tuple[Any, Any]:
    """Return a figure of so many inches and its axes below one another; `how` as of subplots."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, **how)


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and the dashes of a line among others."""
    dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


def stack(axes: Any, places: Sequence[float], shares: Mapping[str, Sequence[float]]) -> None:
    """Draw shares upon one another, by name; colours that come again are hatched."""
    layers = (
        axes.stackplot(places, *shares.values(), labels=[*map(plain, shares)]) if shares else ()
    )
    for number, layer in enumerate(layers):
        layer.set(facecolor=COLOURS[number % len(COLOURS)], edgecolor="white", linewidth=0)
        layer.set_hatch(("", "////", "....")[number // len(COLOURS) % 3])


def scale_of_shares() -> Any:
    """Return the colours of shares from 0 to 1; all kinds of colour vision and print keep them."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(0, 1), "cividis")


def frames_on(axis: Any) -> None:
    """Let an axis say 10k and 2M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def plain(text: str) -> str:
    """A text in which matplotlib finds no formula, in one line that leaves room for a picture."""
    short = text if len(text) <= 2 * _HALF else f"{text[:_HALF]}…{text[-_HALF:]}"
    return printable(short).replace("\\", "\\\\").replace("$", r"\$")
