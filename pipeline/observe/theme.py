"""Colours of plots and report. A drawing is made once; as SVG its colours are CSS variables, so that the page's theme decides."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
}
COLOURS = ("accent", "teal", "amber", "rose", "violet", "sky", "slate")


@dataclass(frozen=True, slots=True)
class Palette:
    ink: str
    muted: str
    grid: str
    accent: str
    teal: str
    amber: str
    rose: str
    violet: str
    sky: str
    slate: str

    def series(self, index: int) -> str:
        return getattr(self, COLOURS[index % len(COLOURS)])


_NAMES = ("ink", "muted", "grid", *COLOURS)
LIGHT = Palette("#1d2026", "#697180", "#e3e5ea", "#4a5bd4", "#12917a", "#d08a1c", "#cf4559", "#8755c9", "#2b86c5", "#97a0ae")
DARK = Palette("#e7e9ee", "#98a1b0", "#2c323d", "#8b99ff", "#3fcbac", "#efb45c", "#f27d8d", "#bb95f4", "#6ab8ee", "#667183")
THEMED = Palette(*(f"#fe00{index:02x}" for index in range(len(_NAMES))))
"""Placeholders that `svg` turns into `var(--name)`."""


def css_variables(palette: Palette) -> str:
    return "".join(f"--{name}:{getattr(palette, name)};" for name in _NAMES)


def svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an inline <svg> without links or fixed size; ids start with `name`, which is unique in the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = _own_ids(text, name)
    head = re.search(r'viewBox="([^"]+)"', text)
    view = head[1] if head else "0 0 100 100"
    text = re.sub(r"<svg[^>]*>", f'<svg viewBox="{view}" role="img" aria-label="{label}">', text, count=1)
    for variable in _NAMES:
        text = text.replace(getattr(THEMED, variable), f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", text)


def _own_ids(text: str, name: str) -> str:
    """Drop ids that nothing refers to and make the others unique in the page."""
    used = set(re.findall(r"#([A-Za-z][\w-]*)[\")]", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r"url\(#([\w-]+)\)", rf"url(#{name}-\1)", text)
    return re.sub(r'xlink:href="#([\w-]+)"', rf'href="#{name}-\1"', text)
