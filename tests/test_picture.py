"""The picture of a trace: what is drawn for each request and block, that nothing lies on anything
else or outside, and that the one in docs/ is what the code draws."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tracing import trace

from nanovllm.tools.events import Step
from nanovllm.tools.picture import Cell, cells, draw, pool
from nanovllm.tools.walks import WALKS

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def tour() -> list[Step]:
    return trace("--walk", "tour")[1]


def parse(svg: str) -> tuple[ElementTree.Element, Counter[str]]:
    """The document, and how many elements of each class it has outside the legend."""
    root = ElementTree.fromstring(svg)
    drawn = [e for e in root if e.tag != f"{SVG}g"]
    return root, Counter(e.get("class") for e in drawn if e.get("class"))


def test_lanes_of_the_tour(tour: list[Step]) -> None:
    """What each request does from its arrival to its last token: chunks of 10 and 7, a wait for
    the budget, a hit of 8 positions, a preemption, a resumption with a hit of 4."""
    lanes = cells(tour)
    kinds = {name: [lane[n].kind for n in sorted(lane)] for name, lane in lanes.items()}
    paused, decode = ["paused"], ["decode"]
    assert kinds["A"] == [
        *["prefill"] * 2, *paused * 2, *decode, *paused, *decode * 3, *paused, *decode * 4
    ]  # fmt: skip
    assert kinds["B"] == [
        *["waiting"] * 2, "prefill", *paused, *decode, *paused, *decode * 3
    ]  # fmt: skip
    assert kinds["D"] == ["prefill", "decode", "preempted", "preempted", "prefill", "decode"]
    assert [min(lane) for lane in lanes.values()] == [1, 1, 4, 6]
    assert lanes["A"][1] == Cell("prefill", 10, is_cut=True)
    assert lanes["A"][2] == Cell("prefill", 7)
    assert lanes["C"][4] == Cell("prefill", 4, hit=8)
    assert lanes["D"][10] == Cell("prefill", 7, hit=4)
    assert lanes["D"][11] == Cell("decode", 1, is_last=True)


def test_blocks_of_the_tour(tour: list[Step]) -> None:
    """A block's owners and how full it is, step by step: A's first block is shared with C from
    step 4 to 13; A's fifth fills one position a decode; D's block goes to B at the preemption."""
    blocks = pool(tour, block_size=4)
    assert list(blocks) == list(range(12))
    owners = [blocks[0][n][0] for n in range(1, 15)]
    assert owners == ["A"] * 3 + ["A C"] * 10 + ["A"]
    filled = [blocks[4][n][1] for n in range(1, 15)]
    assert filled == [0, 0.25, 0.25, 0.25, 0.5, 0.5, 0.75] + [1] * 7
    assert [blocks[11][n][0] for n in range(6, 12)] == ["D", "D", "B", "B", "D", "D"]
    assert blocks[9][8] == ("", 0.0), "free, but its prefix can be hit, as D does in step 10"
    assert 14 not in blocks[5], "free, and never full: nothing to show"


def test_the_drawing_of_the_tour(tour: list[Step]) -> None:
    """One bar a prefill, one dot a decode, one ring a finished request, a hatched preemption."""
    root, counts = parse(draw(tour, "Tour", "Small blocks", 4))
    scheduled = [(s.scheduled.phase, len(s.scheduled.chosen)) for s in tour]
    for phase in ("prefill", "decode"):
        assert counts[phase] == sum(count for name, count in scheduled if name == phase)
    assert counts["last"] == 4 and counts["preempted"] == 1 and counts["waiting"] == 1
    assert counts["shared"] == 4, "two blocks, each with a stripe for each of two owners"
    words = Counter(text.text for text in root.iter(f"{SVG}text"))
    assert words["A + C"] == 2 and words["preempted"] == 1
    assert words["8 hit"] == 1 and words["4 hit"] == 1
    assert {"10", "Small blocks", "shared block, a stripe for each owner"} <= set(words)


def test_the_legend_explains_what_is_drawn_and_no_more(tour: list[Step]) -> None:
    few = draw(trace("--walk", "chunk")[1], "Chunk", "Large blocks", 256)
    assert "free, but its prefix can still be hit" not in few and "preempted" not in few
    assert "decode: one position, one more token" in few and ">waiting<" in few
    all_kinds = draw(tour, "Tour", "Small blocks", 4)
    assert len(re.findall("<g ", all_kinds)) == 9


@pytest.mark.parametrize("name", ["A", "prefix", "preempt", "tour"])
def test_nothing_lies_outside_or_on_something_else(name: str) -> None:
    """All coordinates are within the page; bars of the pool, and texts of a line, do not overlap
    (letters are taken to be 0.62 em wide, which is more than a usual font needs)."""
    walk = WALKS[name]
    _, steps = trace("--walk", name)
    root, _ = parse(draw(steps, f"Walk {name}: {walk.title}", "pool " * 20, 256))
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("x"):
            left, right = extent(rect)
            assert left >= -1 and right <= width + 1
            assert float(rect.get("y")) + float(rect.get("height")) <= height
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in (e for e in root if e.tag == f"{SVG}text"):
        size = 0.62 * float(text.get("font-size")) * len(text.text)
        shift = {"start": 0, "middle": size / 2, "end": size}[text.get("text-anchor")]
        left = float(text.get("x")) - shift
        assert left >= 0 and left + size <= width, text.text
        lines.setdefault(float(text.get("y")), []).append((left, left + size))
    pools = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") in ("block", "shared")]
    for rect in pools:
        lines.setdefault(-float(rect.get("y")), []).append(extent(rect))
    for spans in lines.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(spans))


def extent(rect: ElementTree.Element) -> tuple[float, float]:
    left = float(rect.get("x"))
    return left, left + float(rect.get("width"))


def test_a_long_run_stays_a_page_wide() -> None:
    """120 steps of three requests: thinner columns, one bar for a run of decodes, few numbers."""
    ids = [flag for i in range(3) for flag in ("--ids", f"{i},1,2")]
    _, steps = trace(*ids, "--max-tokens", "120", "--block-size", "16", "--blocks", "24")
    root, counts = parse(draw(steps, "Long", "Blocks", 16))
    assert len(steps) == 120 and float(root.get("width")) <= 1200
    assert counts["decode"] == 3
    assert sum(text.text.isdigit() for text in root.iter(f"{SVG}text")) < 60


def test_a_title_is_text_not_markup(tour: list[Step]) -> None:
    root, _ = parse(draw(tour, "a < b & c", "<d>", 4))
    assert root.find(f"{SVG}title").text == "a < b & c"


def test_the_picture_in_docs_is_up_to_date(tmp_path: Path) -> None:
    """Drawn by: python -m nanovllm.trace --walk tour --svg docs/walk.svg"""
    trace("--walk", "tour", "--svg", str(tmp_path / "walk.svg"))
    assert (tmp_path / "walk.svg").read_text() == (ROOT / "docs" / "walk.svg").read_text()
