"""SVG: the few shapes of a drawing, as text."""

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

INK, SOFT, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#ffffff"
HATCH = "url(#hatch)"
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def document(title: str, width: float, height: float, body: Iterable[str]) -> Iterator[str]:
    """The lines of an SVG file. Its paper is white also where the page around it is dark."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="{FONT}">'
    )
    yield f"<title>{escape(title)}</title>"
    yield (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{PAPER}"/>'
        f'<rect width="2" height="6" fill="{LINE}"/></pattern></defs>'
    )
    yield rect(0, 0, width, height, PAPER, radius=10)
    yield from (*body, "</svg>")


def rect(
    x: float, y: float, width: float, height: float, fill: str, kind: str = "", radius: float = 0
) -> str:
    """kind: the element's class, for whoever styles or tests a drawing."""
    extra = (f' class="{kind}"' if kind else "") + (f' rx="{radius:g}"' if radius else "")
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{extra}/>'


def bar(
    x: float, y: float, width: float, height: float, fill: str, share: float = 1, kind: str = ""
) -> str:
    """A pale bar, in full colour from its bottom up to `share`."""
    pale = "#" + "".join(f"{178 + int(fill[i : i + 2], 16) * 77 // 255:02x}" for i in (1, 3, 5))
    stored = height * share
    return rect(x, y, width, height, pale, kind) + (
        rect(x, y + height - stored, width, stored, fill) if share else ""
    )


def dot(x: float, y: float, fill: str, is_last: bool = False) -> str:
    """A decoded token; a ring marks the last one."""
    ring = f'<circle class="last" cx="{x:g}" cy="{y:g}" r="10.5" fill="none" stroke="{fill}"'
    dot = f'<circle class="decode" cx="{x:g}" cy="{y:g}" r="7" fill="{fill}"/>'
    return dot + (ring + ' stroke-width="2"/>' if is_last else "")


def line(x1: float, x2: float, y: float, stroke: str, kind: str) -> str:
    """A level line: waiting ones are dashed, reusable ones dotted."""
    dash = {"waiting": ' stroke-dasharray="5 4"', "reusable": ' stroke-dasharray="1 5"'}
    return (
        f'<line class="{kind}" x1="{x1 + 3:g}" x2="{x2 - 3:g}" y1="{y:g}" y2="{y:g}" '
        f'stroke="{stroke}" stroke-width="2" stroke-linecap="round"{dash.get(kind, "")}/>'
    )


def text(
    x: float,
    y: float,
    content: str,
    fill: str = INK,
    size: int = 14,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    """y: of the baseline; anchor: which part of the text lies at x (start, middle, end)."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )
