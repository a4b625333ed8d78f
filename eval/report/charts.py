"""Charts as plain SVG, coloured by chart_style.css.j2, with every label and value as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from markupsafe import Markup, escape

WIDTH = 360  # of every chart, in its units: a phone's width, so that text keeps its size there
LEFT, BOTTOM, TALL = 30, 170, 155  # where the grid of a chart over an axis begins, and how high it reaches
NUM_COLOURS = 6  # classes c0 ... of chart_style.css.j2
Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart. text: printed behind it."""

    label: str
    value: float
    text: str
    interval: Interval | None = None


@dataclass(frozen=True)
class Series:
    """points: (x, y) in order of x, which is an index where a chart has ticks."""

    name: str
    points: Sequence[tuple[float, float]]


def bar_chart(title: str, bars: Sequence[Bar], *, most: float = 0.0) -> Markup:
    """Horizontal bars, each below its label, and a vertical line at 1.

    Args: most: the value that fills the width, at least; default: the largest here.
    """
    ends = [max(bar.value, bar.interval[1] if bar.interval else 0.0) for bar in bars]
    one = (WIDTH - 120) / max(most, 1.0, *ends)  # the width of a bar of 1
    elements = [text_at(one, 9, "1", css="small")]
    for i, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        y = 14 + 34 * i
        elements.append(text_at(0, y + 12, shortened(bar.label)))
        elements.append(element("line", css="mark", x1=one, x2=one, y1=y + 15, y2=y + 33))  # not through its label
        elements.append(element("rect", css="c0", x=0.0, y=y + 17, width=bar.value * one, height=10))
        if bar.interval:
            elements.append(whisker([value * one for value in bar.interval], at=y + 22.0))
        elements.append(text_at(max(end, 1.0) * one + 6, y + 26, bar.text, css="value"))
    return svg(title, 14 + 34 * len(bars), elements)


def line_chart(
    title: str,
    lines: Sequence[Series],
    *,
    axis: str,
    ticks: Sequence[str] = (),
    most: float = 0.0,
    mark: float | None = None,
) -> Markup:
    """Series from 0 up, with their names below; without ticks over numbers from 0, with the last value of each.

    Args: axis: what x is. ticks: names along it. most: as of `bar_chart`. mark: a value with a dashed line.
    """
    most = max([most, mark or 0.0, *(y for line in lines for _, y in line.points)]) or 1.0
    most_x = max((x for line in lines for x, _ in line.points), default=0.0) or 1.0
    labels = dict(enumerate(ticks)) if ticks else {value: f"{value:g}" for value in round_steps(most_x)}
    scale, start = ((WIDTH - LEFT) / len(ticks), 0.5) if ticks else ((WIDTH - LEFT - 10) / most_x, 0.0)
    elements = grid(most, axis=axis, mark=mark)
    elements += [text_at(LEFT + (x + start) * scale, BOTTOM + 14, label, css="small") for x, label in labels.items()]
    for i, line in enumerate(lines):
        css, name = series_css(i), line.name
        at = [(LEFT + (x + start) * scale, BOTTOM - y * TALL / most) for x, y in line.points]
        elements.append(polyline(at, css))
        elements += [element("circle", css=css, cx=x, cy=y, r=3) for x, y in at]
        if not ticks:
            last = f"{line.points[-1][1]:.2f} at {line.points[-1][0]:g}" if line.points else "none"
            name = f"{shortened(name, most=30)}: {last}"
        elements += legend_row(i, name)
    return svg(title, BOTTOM + 40 + 16 * len(lines), elements)


def grid(most: float, *, axis: str, mark: float | None = None) -> list[Markup]:
    """Lines at round values from 0 to most, their values, and the name of the x axis."""
    elements = [text_at((LEFT + WIDTH) / 2, BOTTOM + 28, axis, css="small")]
    for value in round_steps(most):
        y = BOTTOM - value * TALL / most
        elements.append(element("line", css="mark" if value == mark else "grid", x1=LEFT, x2=WIDTH, y1=y, y2=y))
        elements.append(text_at(LEFT - 4, y + 3, f"{value:g}", css="small end"))
    return elements


def series_css(number: int) -> str:
    """The classes with the colour and dash of a series."""
    return f"c{number % NUM_COLOURS} d{(number + number // NUM_COLOURS) % 3}"


def polyline(at: Sequence[tuple[float, float]], css: str) -> Markup:
    return element("polyline", css=f"line {css}", points=" ".join(f"{fixed(x)},{fixed(y)}" for x, y in at))


def legend_row(number: int, text: str) -> list[Markup]:
    """The row of a series below its chart: its line and its name."""
    y, css = BOTTOM + 46 + 16 * number, series_css(number)
    dot = element("circle", css=css, cx=10, cy=y - 4, r=3)
    return [polyline([(0, y - 4), (20, y - 4)], css), dot, text_at(26, y, shortened(text, most=48))]


def whisker(ends: Sequence[float], *, at: float) -> Markup:
    """An interval's line with its two ends, along x at a y."""
    low, high = ends
    moves = [(low, -4, low, 4), (low, 0, high, 0), (high, -4, high, 4)]
    path = " ".join(f"M{fixed(a)} {fixed(at + b)}L{fixed(c)} {fixed(at + d)}" for a, b, c, d in moves)
    return element("path", css="whisker", d=path)


def text_at(x: float, y: float, text: str, *, css: str | None = None) -> Markup:
    return element("text", escape(text), css=css, x=x, y=y)


def element(name: str, inside: Markup | None = None, *, css: str | None = None, **attributes: float | str) -> Markup:
    """An SVG element. Args: css: its classes, of chart_style.css.j2. Attributes are escaped."""
    values: dict[str, float | str] = ({"class": css} if css else {}) | attributes
    texts = {key: value if isinstance(value, str) else fixed(value) for key, value in values.items()}
    written = [Markup(' {}="{}"').format(key, value) for key, value in texts.items()]
    return Markup("<{}{}>{}</{}>").format(name, Markup("").join(written), inside or Markup(""), name)


def svg(title: str, height: float, elements: Sequence[Markup]) -> Markup:
    """The picture, with a name for screen readers. A page scales it; without a page it is WIDTH wide."""
    inside = element("title", escape(title)) + Markup("").join(elements)
    size = {"viewBox": f"0 0 {WIDTH} {fixed(height)}", "width": WIDTH, "height": height}
    return element("svg", inside, **size, role="img", **{"aria-label": title})


def round_steps(most: float) -> list[float]:
    """Three to six round values from 0 to at most `most`."""
    power = 10 ** floor(log10(most))
    step = next(factor * power for factor in (0.2, 0.25, 0.5, 1, 2) if most / (factor * power) <= 5)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def shortened(text: str, *, most: int = 54) -> str:
    """A label that fits: without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def fixed(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
