"""The charts of pages: plain SVG whose colours the page sets, with every label and value as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from markupsafe import Markup, escape

WIDTH = 360  # units of every chart: a phone's width, so that text keeps its size there
LEFT, BOTTOM, TALL = 30, 170, 155  # units: where the lines of a chart over an axis begin, and how high they reach
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


@dataclass(frozen=True)
class Curve:
    """A series over numbers: (x, y) in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


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
    scale = TALL / most
    place = [LEFT + (i + 0.5) * (WIDTH - LEFT) / len(ticks) for i in range(len(ticks))]
    drawn = grid(most, axis=axis, mark=mark)
    drawn += [words(x, BOTTOM + 14, tick, look="small") for x, tick in zip(place, ticks, strict=True)]
    for i, line in enumerate(lines):
        look = look_of(i)
        shift = 4.0 * (i - (len(lines) - 1) / 2) if line.intervals else 0.0  # so that intervals do not cover each other
        at = [(x + shift, BOTTOM - y * scale) for x, y in zip(place, line.values, strict=True) if y is not None]
        for x, one in zip(place, line.intervals, strict=False):
            if one:
                drawn.append(whisker([BOTTOM - end * scale for end in one], at=x + shift, upright=True))
        drawn += [polyline(at, look), *(tag("circle", look=look, cx=x, cy=y, r=3) for x, y in at)]
        drawn += key_row(i, line.name, with_dot=True)
    return svg(title, BOTTOM + 40 + 16 * len(lines), drawn)


def curve_chart(title: str, curves: Sequence[Curve], *, axis: str, with_dots: bool = False) -> Markup:
    """Curves from 0 up over a common x from 0 on; each one's last value stands behind its name, as text."""
    most_x = max((x for curve in curves for x, _ in curve.points), default=0) or 1.0
    most = max((y for curve in curves for _, y in curve.points), default=0) or 1.0
    drawn = grid(most, axis=axis)
    for value in round_steps(most_x):
        drawn.append(words(LEFT + value * (WIDTH - LEFT - 10) / most_x, BOTTOM + 14, f"{value:g}", look="small"))
    for i, curve in enumerate(curves):
        at = [(LEFT + x * (WIDTH - LEFT - 10) / most_x, BOTTOM - y * TALL / most) for x, y in curve.points]
        drawn.append(polyline(at, look_of(i)))
        drawn += [tag("circle", look=look_of(i), cx=x, cy=y, r=3) for x, y in at if with_dots or len(at) == 1]
        last = f": {curve.points[-1][1]:.2f} at {curve.points[-1][0]:g}" if curve.points else ": none"
        drawn += key_row(i, shortened(curve.name, most=30) + last, with_dot=with_dots)
    return svg(title, BOTTOM + 40 + 16 * len(curves), drawn)


def thinned(points: Sequence[tuple[float, float]], *, most: int = 120) -> list[tuple[float, float]]:
    """At most so many points: each the mean of as many neighbours, standing at the last of them."""
    size = -(-len(points) // most) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def grid(most: float, *, axis: str, mark: float | None = None) -> list[Markup]:
    """Lines at round values from 0 to most, their values, and the name of the x axis."""
    drawn = [words((LEFT + WIDTH) / 2, BOTTOM + 28, axis, look="small")]
    for value in round_steps(most):
        y = BOTTOM - value * TALL / most
        drawn.append(tag("line", look="mark" if value == mark else "grid", x1=LEFT, x2=WIDTH, y1=y, y2=y))
        drawn.append(words(LEFT - 4, y + 3, f"{value:g}", look="small end"))
    return drawn


def look_of(number: int) -> str:
    """Colour and dash of a series."""
    return f"c{number % NUM_COLOURS} d{number // NUM_COLOURS % 3}"


def polyline(at: Sequence[tuple[float, float]], look: str) -> Markup:
    return tag("polyline", look=f"line {look}", points=" ".join(f"{fixed(x)},{fixed(y)}" for x, y in at))


def key_row(number: int, text: str, *, with_dot: bool) -> list[Markup]:
    """A series' own row below a chart: its line, and its name."""
    y, look = BOTTOM + 46 + 16 * number, look_of(number)
    dot = [tag("circle", look=look, cx=10, cy=y - 4, r=3)] if with_dot else []
    return [polyline([(0, y - 4), (20, y - 4)], look), *dot, words(26, y, shortened(text, most=48))]


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
