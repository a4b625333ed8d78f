"""The charts of the report page: plain SVG whose colours the page sets, with every label and value as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from markupsafe import Markup, escape

WIDTH = 360  # units of every chart: a phone's width, so that text keeps its size there
NUM_COLOURS = 6  # classes c0 ... of the page's style
Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A row: parts are laid end to end, text stands behind them; no parts: nothing to measure."""

    label: str
    parts: Sequence[float]
    text: str
    interval: Interval | None = None


@dataclass(frozen=True)
class Line:
    """A series over ticks; None: no value at a tick. intervals: of each value, where it has one."""

    name: str
    values: Sequence[float | None]
    intervals: Sequence[Interval | None] = ()


def bar_chart(title: str, bars: Sequence[Bar], *, most: float | None = None, mark: float | None = None) -> Markup:
    """Horizontal bars below their labels.

    Args: most: the value that fills the width; default: the largest here. mark: a value with a line across all rows.
    """
    ends = [max(sum(bar.parts), bar.interval[1] if bar.interval else 0.0) for bar in bars]
    most = max([most or 0.0, mark or 0.0, *ends]) or 1.0
    scale, top = (WIDTH - 120) / most, 14 if mark is not None else 0
    height = top + 34 * len(bars)
    drawn: list[Markup] = []
    if mark is not None:
        at = mark * scale
        drawn = [tag("line", look="mark", x1=at, x2=at, y1=12, y2=height), words(at, 9, f"{mark:g}", look="small")]
    for i, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        y, x = top + 34 * i, 0.0
        drawn.append(words(0, y + 12, shortened(bar.label)))
        for colour, part in enumerate(bar.parts):
            width = max(part, 0.0) * scale
            drawn.append(tag("rect", look=f"c{colour % NUM_COLOURS}", x=x, y=y + 17, width=width, height=10))
            x += width
        if bar.interval:
            drawn.append(whisker([one * scale for one in bar.interval], at=y + 22.0))
        drawn.append(words(max(end, mark or 0.0) * scale + 6, y + 26, bar.text, look="value"))
    return svg(title, height, drawn)


def line_chart(
    title: str,
    ticks: Sequence[str],
    lines: Sequence[Line],
    *,
    axis: str,
    most: float | None = None,
    mark: float | None = None,
) -> Markup:
    """Series over named ticks from 0 up, with their names below. Args: as of `bar_chart`; axis: what the ticks are."""
    ends = [end for line in lines for one in line.intervals if one for end in one]
    ends += [value for line in lines for value in line.values if value is not None]
    most = max([most or 0.0, mark or 0.0, *ends]) or 1.0
    left, bottom, scale = 30, 170, 155 / most
    place = [left + (i + 0.5) * (WIDTH - left) / len(ticks) for i in range(len(ticks))]
    drawn = [words((left + WIDTH) / 2, bottom + 28, axis, look="small")]
    for value in round_steps(most):
        y = bottom - value * scale
        drawn.append(tag("line", look="mark" if value == mark else "grid", x1=left, x2=WIDTH, y1=y, y2=y))
        drawn.append(words(left - 4, y + 3, f"{value:g}", look="small end"))
    drawn += [words(x, bottom + 14, tick, look="small") for x, tick in zip(place, ticks, strict=True)]
    for i, line in enumerate(lines):
        look, key = f"c{i % NUM_COLOURS} d{i // NUM_COLOURS % 3}", bottom + 46 + 16 * i
        shift = 4.0 * (i - (len(lines) - 1) / 2) if line.intervals else 0.0  # so that intervals do not cover each other
        at = [(x + shift, bottom - y * scale) for x, y in zip(place, line.values, strict=True) if y is not None]
        for x, one in zip(place, line.intervals, strict=False):
            if one:
                drawn.append(whisker([bottom - end * scale for end in one], at=x + shift, upright=True))
        for points in (at, [(0, key - 4), (20, key - 4)]):  # the second: the line's key
            joined = " ".join(f"{fixed(x)},{fixed(y)}" for x, y in points)
            drawn.append(tag("polyline", look=f"line {look}", points=joined))
        drawn += [tag("circle", look=look, cx=x, cy=y, r=3) for x, y in [*at, (10, key - 4)]]
        drawn.append(words(26, key, shortened(line.name, most=48)))
    return svg(title, bottom + 40 + 16 * len(lines), drawn)


def tree_chart(title: str, parents: Sequence[int]) -> Markup:
    """A draft tree from left to right, a parent's likelier children above. Args: parents: as `tree_shape` has them."""
    children: dict[int, list[int]] = {}
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
        depth[node] = depth[parent] + 1
    row: dict[int, int] = {}
    num_leaves, pending = 0, [-1]
    while pending:  # depth first, so that branches do not cross; a node is on the line of its likeliest child
        node = pending.pop()
        row[node] = num_leaves
        num_leaves += node not in children
        pending += reversed(children.get(node, []))
    step = (WIDTH - 40) / max(depth.values())
    at = {node: (8 + depth[node] * step, 10 + 14 * row[node]) for node in row}
    drawn = []
    for node, parent in enumerate(parents):
        (x0, y0), (x1, y1), half = at[parent], at[node], step / 2
        bend = [(x0 + half, y0), (x1 - half, y1), (x1, y1)]
        path = f"M{fixed(x0)} {fixed(y0)}C" + " ".join(f"{fixed(x)} {fixed(y)}" for x, y in bend)
        drawn.append(tag("path", look="branch", d=path))
    drawn += [tag("circle", look="root" if node < 0 else "c0", cx=x, cy=y, r=4) for node, (x, y) in at.items()]
    return svg(title, 20 + 14 * (num_leaves - 1), drawn)


def whisker(ends: Sequence[float], *, at: float, upright: bool = False) -> Markup:
    """An interval's line with its two ends, along x at a y, or upright along y at an x."""
    low, high = ends
    moves = [(low, -4, low, 4), (low, 0, high, 0), (high, -4, high, 4)]
    steps = [(at + b, a, at + d, c) if upright else (a, at + b, c, at + d) for a, b, c, d in moves]
    path = " ".join(f"M{fixed(a)} {fixed(b)}L{fixed(c)} {fixed(d)}" for a, b, c, d in steps)
    return tag("path", look="whisker", d=path)


def words(x: float, y: float, text: str, *, look: str | None = None) -> Markup:
    """Text at a place, escaped."""
    return tag("text", escape(text), look=look, x=x, y=y)


def tag(name: str, inside: Markup | None = None, *, look: str | None = None, **attributes: float | str) -> Markup:
    """One element. Args: look: its class, of the page's style; attributes are escaped."""
    found: dict[str, float | str] = ({"class": look} if look else {}) | attributes
    written = [
        Markup(' {}="{}"').format(key, value if isinstance(value, str) else fixed(value))
        for key, value in found.items()
    ]
    return Markup("<{}{}>{}</{}>").format(name, Markup("").join(written), inside or Markup(""), name)


def svg(title: str, height: float, drawn: Sequence[Markup]) -> Markup:
    """The whole picture, named for those who do not see it."""
    inside = tag("title", escape(title)) + Markup("").join(drawn)
    whole = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return whole.format(WIDTH, fixed(height), title, inside)


def round_steps(most: float) -> list[float]:
    """0 and round values up to most, three to six of them."""
    power = 10 ** floor(log10(most))
    step = next(factor * power for factor in (0.2, 0.25, 0.5, 1, 2) if most / (factor * power) <= 5)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def shortened(text: str, *, most: int = 54) -> str:
    """A label that fits: its middle is left out."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def fixed(value: float) -> str:
    """A coordinate of one decimal."""
    return f"{value:.1f}".removesuffix(".0")
