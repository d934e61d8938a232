"""Picture: a trace as an SVG drawing. Time runs to the right, a column a step; each request has a
lane above, and each KV block that was ever used has one below.

Nothing is told by colour alone: requests carry their letter, phases their form. The colours are
Okabe and Ito's, which colour-blind readers can tell apart, on a background of their own.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple, TypeVar

from nanovllm.tools.events import RequestState, Step
from nanovllm.tools.svg import (
    HATCH,
    INK,
    LINE,
    PAPER,
    SOFT,
    bar,
    document,
    dot,
    line,
    rect,
    text,
)

COLOURS = (  # fill, and the colour of letters on it
    ("#0072b2", PAPER),
    ("#e69f00", INK),
    ("#009e73", PAPER),
    ("#cc79a7", INK),
    ("#56b4e9", INK),
    ("#d55e00", PAPER),
)
BAND = "#f1f3f5"
MARGIN, LEFT, TOP, LANE, BLOCK = 24, 112, 118, 44, 24
LEGEND_ROW, LEGEND_COLUMN = 26, 300
MOST_WIDTH, MOST_POOL_HEIGHT = 1000, 720  # beyond them columns and blocks get thinner


T = TypeVar("T")


class Cell(NamedTuple):
    """One request in one step. kind: prefill, decode, paused, waiting or preempted."""

    kind: str
    positions: int = 0
    hit: int = 0
    is_cut: bool = False
    is_last: bool = False


def draw(steps: list[Step], title: str, subtitle: str, block_size: int) -> str:
    """The SVG document of a trace."""
    return "\n".join(_Drawing(steps, title, subtitle, block_size).document()) + "\n"


def cells(steps: list[Step]) -> dict[str, dict[int, Cell]]:
    """name -> step number -> what it did then, from its arrival to its last token."""
    lanes: dict[str, dict[int, Cell]] = {}
    preempted: set[str] = set()
    for step in steps:
        scheduled = step.scheduled
        preempted |= {p.name for p in scheduled.preempted}
        hits = {hit.name: hit.positions for hit in scheduled.hits}
        ended = {o.name for o in step.after_postprocess.outcomes if o.finish_reason}
        for state in scheduled.chosen:
            name, is_cut = state.name, state.cached + state.scheduled < state.total
            cell = Cell(scheduled.phase, state.scheduled, hits.get(name, 0), is_cut, name in ended)
            lanes.setdefault(name, {})[step.number] = cell
        for state in scheduled.others:
            kind = "paused" if state.status == "RUNNING" else "waiting"
            kind = "preempted" if state.name in preempted else kind
            lanes.setdefault(state.name, {})[step.number] = Cell(kind)
    return dict(sorted(lanes.items(), key=lambda lane: (len(lane[0]), lane[0])))


def pool(steps: list[Step], block_size: int) -> dict[int, dict[int, tuple[str, float]]]:
    """block -> step number -> (its owners' names, the share of its positions that is stored when
    the step ends). A free block that can still be hit has the owners "", others are left out."""
    blocks: dict[int, dict[int, tuple[str, float]]] = {}
    for step in steps:
        for block_id in step.scheduled.reusable_blocks:
            blocks.setdefault(block_id, {})[step.number] = ("", 0.0)
        owners: dict[int, list[RequestState]] = {}
        for state in (*step.scheduled.chosen, *step.scheduled.others):
            for block_id in state.block_table:
                owners.setdefault(block_id, []).append(state)
        for block_id, states in owners.items():
            stored = max(
                (s.cached + s.scheduled) / block_size - s.block_table.index(block_id)
                for s in states
            )
            names = " ".join(sorted(s.name for s in states))
            blocks.setdefault(block_id, {})[step.number] = (names, min(max(stored, 0.0), 1.0))
    return dict(sorted(blocks.items()))


class _Drawing:
    """Coordinates and shapes. Each method yields the lines of one part of the document."""

    def __init__(self, steps: list[Step], title: str, subtitle: str, block_size: int) -> None:
        self.steps, self.title, self.subtitle = steps, title, subtitle
        self.lanes, self.blocks = cells(steps), pool(steps, block_size)
        self.colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(self.lanes)}
        self.column = min(MOST_WIDTH / len(steps), max(70, 560 / len(steps)))
        self.roomy = self.column >= 24  # enough for a number in each cell
        self.block_height = min(BLOCK, max(3, MOST_POOL_HEIGHT / len(self.blocks)))
        self.pool_top = TOP + LANE * len(self.lanes) + 44
        self.pool_end = self.pool_top + self.block_height * len(self.blocks)
        self.width = max(
            LEFT + self.column * len(steps) + MARGIN,
            2 * LEGEND_COLUMN + 2 * MARGIN,
            12 * len(title) + 2 * MARGIN,
            9 * len(subtitle) + 2 * MARGIN,
        )

    def document(self) -> Iterator[str]:
        body = [*self._body()]
        legend = [*self._legend("".join(body))]
        height = self.pool_end + 54 + len(legend) * LEGEND_ROW
        body += [line for row in legend for line in row]
        yield from document(self.title, self.width, height, body)

    def _body(self) -> Iterator[str]:
        yield text(MARGIN, 38, self.title, size=20, weight=600)
        yield text(MARGIN, 60, self.subtitle, SOFT)
        yield from self._time()
        for i, name in enumerate(self.lanes):
            yield from self._lane(name, TOP + LANE * (i + 0.5))
        yield text(MARGIN, self.pool_top - 14, "KV blocks", weight=600)
        for i, block_id in enumerate(self.blocks):
            yield from self._block(block_id, self.pool_top + self.block_height * i)
        if self.roomy:
            yield text(MARGIN, self.pool_end + 20, "free", SOFT, 12)
        for step in self.steps if self.roomy else ():
            x, free = self._x(step.number + 0.5), str(step.scheduled.free_blocks)
            yield text(x, self.pool_end + 20, free, SOFT, 12, anchor="middle")

    def _x(self, number: float) -> float:
        """The left edge of a step's column."""
        return LEFT + self.column * (number - 1)

    def _time(self) -> Iterator[str]:
        """Step numbers, and a band behind each run of prefill steps."""
        for phase, group in groupby(self.steps, key=lambda step: step.scheduled.phase):
            run = [step.number for step in group]
            x, width = self._x(run[0]), self.column * len(run)
            if phase == "prefill":
                yield rect(x, TOP - 40, width, self.pool_end - TOP + 46, BAND)
            if width >= 50:
                yield text(x + width / 2, TOP - 24, phase, SOFT, 12, anchor="middle")
        yield text(MARGIN, TOP - 8, "step", SOFT, 12)
        every = 1 if self.roomy else -(-len(self.steps) // 25)
        for number in range(1, len(self.steps) + 1, every):
            yield text(self._x(number + 0.5), TOP - 8, str(number), SOFT, 12, anchor="middle")

    def _lane(self, name: str, middle: float) -> Iterator[str]:
        fill, ink = self.colours[name]
        label = max(24, 10 * len(name) + 6)
        yield rect(MARGIN, middle - 12, label, 24, fill, radius=12)
        yield text(MARGIN + label / 2, middle + 5, name, ink, 14, 600, "middle")
        yield text(MARGIN + label + 6, middle + 4, f"{self._prompt(name)} ids", SOFT, 12)
        lane = self.lanes[name]
        for kind, first, last in _runs({number: cell.kind for number, cell in lane.items()}):
            x, width = self._x(first), self.column * (last - first + 1)
            if kind in ("paused", "waiting"):
                yield line(x, x + width, middle, fill if kind == "paused" else LINE, kind)
            elif kind == "preempted":
                yield rect(x + 1, middle - 12, width - 2, 24, HATCH, kind, 4)
                if width >= 76:
                    yield rect(x + width / 2 - 35, middle - 9, 70, 18, PAPER, radius=4)
                    yield text(x + width / 2, middle + 4, kind, size=12, anchor="middle")
            elif kind == "decode" and not self.roomy:
                yield rect(x, middle - 7, width, 14, fill, kind)
            else:
                for number in range(first, last + 1):
                    yield from self._work(lane[number], self._x(number), middle, fill, ink)

    def _prompt(self, name: str) -> int:
        first = self.steps[min(self.lanes[name]) - 1].scheduled
        return next(s.total for s in (*first.chosen, *first.others) if s.name == name)

    def _work(self, cell: Cell, x: float, middle: float, fill: str, ink: str) -> Iterator[str]:
        """A bar for a prefill, joined to the next one if it was cut; a dot for a decode."""
        center, gap = x + self.column / 2, 2 if self.roomy else 0
        if cell.kind == "decode":
            yield dot(center, middle, fill, cell.is_last)
            return
        width = self.column - (0 if cell.is_cut else 2 * gap)
        yield rect(x + gap, middle - 16, width, 32, fill, cell.kind, 2 * gap)
        if self.roomy:
            up = 6 if cell.hit else 0
            yield text(center, middle + 5 - up, str(cell.positions), ink, 13, 600, "middle")
        if self.roomy and cell.hit:
            yield text(center, middle + 11, f"{cell.hit} hit", ink, 11, anchor="middle")

    def _block(self, block_id: int, top: float) -> Iterator[str]:
        height, life = self.block_height, self.blocks[block_id]
        gap, middle = 2 if height >= 12 else 0, top + height / 2
        if height >= 12:
            yield text(LEFT - 12, middle + 4, str(block_id), SOFT, 12, anchor="end")
        for (owners, stored), first, last in _runs(life):
            x, width = self._x(first), self.column * (last - first + 1)
            names = owners.split()
            if not names:
                yield line(x, x + width, middle, LINE, "reusable")
            tall = (height - 2 * gap) / max(len(names), 1)
            kind = "shared" if len(names) > 1 else "block"
            for i, name in enumerate(names):
                fill = self.colours[name][0]
                yield bar(x, top + gap + i * tall, width, tall, fill, stored, kind)
        for owners, first, last in _runs({number: names for number, (names, _) in life.items()}):
            x, end = self._x(first), self._x(last + 1)
            if owners:
                yield rect(end - 1, top, 2, height, PAPER)  # parts it from the next owner
            label = owners.replace(" ", " + ")
            width = 10 + 7.5 * len(label)
            if owners and height >= 18 and end - x >= width + 4:
                yield rect((x + end - width) / 2, middle - 8, width, 16, PAPER, radius=8)
                yield text((x + end) / 2, middle + 4, label, INK, 11, 600, "middle")

    def _legend(self, body: str) -> Iterator[list[str]]:
        """The rows of what occurs in `body`: samples 36 wide around y = 0."""
        (fill, ink), (other, _) = COLOURS[:2]
        number = text(18, 5, "12", ink, 13, 600, "middle")
        shared = bar(0, -8, 36, 8, fill) + bar(0, 0, 36, 8, other)
        entries = [
            (
                "prefill",
                "prefill: number of positions",
                rect(0, -10, 36, 20, fill, "", 4) + number,
            ),
            ("decode", "decode: one position, one more token", dot(18, 0, fill)),
            ("last", "its last token", dot(18, 0, fill, is_last=True)),
            ("paused", "running, but the step prefills others", line(0, 36, 0, fill, "paused")),
            ("waiting", "waiting", line(0, 36, 0, LINE, "waiting")),
            ("preempted", "preempted: only its ids are kept", rect(0, -8, 36, 16, HATCH, "", 4)),
            ("block", "block, filled as K/V is stored", bar(0, -8, 36, 16, fill, 0.6)),
            ("shared", "shared block, a stripe for each owner", shared),
            (
                "reusable",
                "free, but its prefix can still be hit",
                line(0, 36, 0, LINE, "reusable"),
            ),
        ]
        entries = [entry for entry in entries if f'class="{entry[0]}"' in body]
        columns = int((self.width - 2 * MARGIN) // LEGEND_COLUMN)
        num_rows = -(-len(entries) // columns)
        for row in range(num_rows):
            y = self.pool_end + 54 + LEGEND_ROW * row
            yield [
                f'<g transform="translate({MARGIN + LEGEND_COLUMN * i:g} {y:g})">{sample}'
                f"{text(46, 4, meaning, size=12)}</g>"
                for i, (_, meaning, sample) in enumerate(entries[row::num_rows])
            ]


def _runs(values: dict[int, T]) -> Iterator[tuple[T, int, int]]:
    """(value, first step, last step) of each stretch of steps with the same value."""
    # Consecutive numbers lie at the same distance from their rank.
    ranked = enumerate(sorted(values))
    for (value, _), group in groupby(ranked, key=lambda pair: (values[pair[1]], pair[1] - pair[0])):
        stretch = [number for _, number in group]
        yield value, stretch[0], stretch[-1]
