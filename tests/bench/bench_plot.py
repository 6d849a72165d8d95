"""Plots as SVG text, without any package: lines over logarithmic axes, and groups of bars."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 180, 44, 48
# For people who see few colours, too; a name has the same one in every plot.
COLOURS = {
    "native": "#888888",
    "cudaMallocAsync": "#e69f00",
    "PyTorch": "#d55e00",
    "PyTorch, expandable": "#cc79a7",
    "PyTorch, preloaded": "#f0c05a",
    "bins": "#0072b2",
    "split": "#009e73",
    "auto": "#56b4e9",
}
MORE_COLOURS = ["#000000", "#5a3d8a", "#7a7a00", "#8a3d3d"]


def coloured(names):
    """{name: colour} in the given order."""
    more = iter(MORE_COLOURS * (1 + len(names)))
    return {name: COLOURS.get(name) or next(more) for name in names}


def short(value):
    """Three digits, without a row of zeros."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


class Canvas:
    def __init__(self, title, unit):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            f'font-size="12" fill="#222222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        ]
        self.text(LEFT, 18, title, size=15)
        self.text(LEFT, 36, unit)

    def text(self, x, y, words, anchor="start", size=12):
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        self.parts.append(f"<text {where}>{escape(words)}</text>")

    def line(self, x1, y1, x2, y2, colour="#dddddd"):
        self.parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>')

    def legend(self, colours):
        for i, (name, colour) in enumerate(colours.items()):
            x, y = WIDTH - RIGHT + 14, TOP + 12 + 20 * i
            self.parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
            self.text(x + 18, y, name)

    def done(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def lines(title, unit, x_label, series, x_text=short):
    """SERIES: {name: [(x, y)]}, all above 0. Both axes are logarithmic; X_TEXT makes labels of x."""
    points = [point for values in series.values() for point in values]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = (math.log10(bound(y for _, y in points)) for bound in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    canvas, colours = Canvas(title, unit), coloured(series)

    def place(x, y):
        across = math.log(x / low_x) / math.log(high_x / low_x) if high_x > low_x else 0.5
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (math.log10(y) - low) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    for power in range(low, high + 1):
        _, y = place(low_x, 10.0**power)
        canvas.line(LEFT, y, WIDTH - RIGHT, y)
        canvas.text(LEFT - 8, y + 4, short(10.0**power), "end")
    for x in sorted({x for x, _ in points}):
        canvas.text(place(x, 10.0**low)[0], HEIGHT - BOTTOM + 18, x_text(x), "middle")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle")
    for name, values in series.items():
        colour = colours[name]
        placed = [place(x, y) for x, y in sorted(values)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        canvas.parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        for x, y in placed:
            canvas.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    canvas.legend(colours)
    return canvas.done()


def bars(title, unit, groups, names):
    """GROUPS: {label: {name: value}}; a name of NAMES that a group lacks leaves a gap."""
    canvas, colours = Canvas(title, unit), coloured(names)
    most = max(value for values in groups.values() for value in values.values())
    step = 10 ** math.floor(math.log10(most))
    step = step / 2 if most / step < 3 else step
    top = math.ceil(most / step) * step

    def height(value):
        return value / top * (HEIGHT - TOP - BOTTOM)

    for i in range(round(top / step) + 1):
        y = HEIGHT - BOTTOM - height(i * step)
        canvas.line(LEFT, y, WIDTH - RIGHT, y)
        canvas.text(LEFT - 8, y + 4, short(i * step), "end")
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = room * 0.85 / len(names)
    for place, (label, values) in enumerate(groups.items()):
        begin = LEFT + place * room + room * 0.075
        for i, name in enumerate(names):
            if name not in values:
                continue
            x, tall = begin + i * wide, height(values[name])
            canvas.parts.append(
                f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{wide * 0.92:.1f}" height="{tall:.1f}" '
                f'fill="{colours[name]}"/>'
            )
            canvas.text(x + wide / 2, HEIGHT - BOTTOM - tall - 3, short(values[name]), "middle", 9)
        canvas.text(begin + room * 0.425, HEIGHT - BOTTOM + 18, label, "middle")
    canvas.legend(colours)
    return canvas.done()
