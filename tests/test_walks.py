"""The trace prints, for each named walk, the numbers that were worked out by hand for it. CPU, the
bundled model."""

import json
from dataclasses import dataclass

from tracing import trace

from nanovllm.tools.table import COLUMNS
from nanovllm.tools.walks import WALKS


@dataclass
class Printed:
    """One step as it was printed."""

    phase: str
    free: tuple[int, int, int]  # before, while it runs, after
    rows: dict[str, dict[str, str]]  # request -> column -> cell
    notes: str


def walk(name: str, *arguments: str) -> list[Printed]:
    """The steps of a named walk, read back from what was printed."""
    text = "\n".join(trace("--walk", name, *arguments)[0])
    head, *steps = text.split("\nstep ")
    assert head.startswith(f"walk {name}: {WALKS[name].title}\n")
    return [read(i, step.splitlines()) for i, step in enumerate(steps, 1)]


def read(number: int, lines: list[str]) -> Printed:
    title, header, *rest = lines
    words = title.replace(",", "").split()
    assert int(words[0]) == number
    at = words.index("blocks")
    free = (int(words[at + 1]), int(words[at + 2]), int(words[-2]))
    starts = [2, *(header.index(name) for name in COLUMNS[1:])]
    rows = {}
    while not rest[0].startswith("  input_ids"):
        line = rest.pop(0)
        cells = [
            line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)
        ]
        rows[cells[0]] = dict(zip(COLUMNS[1:], cells[1:], strict=True))
    return Printed(words[1].rstrip(":"), free, rows, " ".join(rest))


def column(step: Printed, name: str) -> list[str]:
    return [row[name] for row in step.rows.values()]


def events(name: str) -> list[list[dict]]:
    """The four events of each step of a walk."""
    return [list(step.events()) for step in trace("--walk", name)[1]]


def test_walk_a_one_request() -> None:
    """Ids [100, 200, 300], 3 tokens: one prefill, two decodes, then nothing is held."""
    one, two, three = walk("A")
    assert [step.phase for step in (one, two, three)] == ["prefill", "decode", "decode"]
    assert [column(step, "positions") for step in (one, two, three)] == [["0..2"], ["3"], ["4"]]
    assert [column(step, "cached") for step in (one, two, three)] == [
        ["0 -> 3"],
        ["3 -> 4"],
        ["4 -> 5 -> 0"],
    ]
    assert [column(step, "total") for step in (one, two, three)] == [
        ["3 -> 4"],
        ["4 -> 5"],
        ["5 -> 6"],
    ]
    assert "context_lens [4] " in two.notes and "context_lens [5] " in three.notes
    assert "A is finished (length) and gives back [0]" in three.notes
    assert [step.free for step in (one, two, three)] == [(32, 31, 31), (31, 31, 31), (31, 31, 32)]
    *_, end = events("A")[-1]
    assert end["requests"] == [
        {
            "name": "A",
            "status": "FINISHED",
            "total": 6,
            "cached": 0,
            "scheduled": 0,
            "num_blocks": 1,
            "block_table": [],
        }
    ]


def test_walk_b_two_requests() -> None:
    """Five steps, the first of 7 positions; a block comes back after step 2 and after step 5."""
    steps = walk("B")
    assert [sum(map(int, column(step, "scheduled"))) for step in steps] == [7, 2, 1, 1, 1]
    assert column(steps[0], "total") == ["3 -> 4", "4 -> 5"]
    assert column(steps[0], "cached") == ["0 -> 3", "0 -> 4"]
    assert [list(step.rows) for step in steps] == [["A", "B"], ["A", "B"], ["B"], ["B"], ["B"]]
    assert [step.free[2] for step in steps] == [30, 31, 31, 31, 32]
    assert "A is finished" in steps[1].notes and "B is finished" in steps[4].notes


def test_walk_b_one_request_a_step() -> None:
    """max_num_seqs caps the step, not the live requests: seven steps."""
    steps = walk("B", "--max-num-seqs", "1")
    assert [list(step.rows) for step in steps] == [[name] for name in "ABABBBB"]
    assert [step.phase for step in steps] == ["prefill"] * 2 + ["decode"] * 5
    assert "A is finished" in steps[2].notes
    assert "pausing: A 3 of 4 cached" in steps[1].notes


def test_walk_c_block_boundary() -> None:
    """256 ids: 2 blocks are needed for 257 tokens, but the second comes with the first decode."""
    one, two, three = walk("C")
    assert (column(one, "total"), column(one, "cached")) == (["256 -> 257"], ["0 -> 256"])
    assert "A needs 2 blocks for 257 tokens, but has 1" in one.notes
    assert column(one, "block table") == ["[0]"]
    assert "A takes block 1: position 256 opens it" in two.notes
    assert (column(two, "positions"), column(two, "slots")) == (["256"], [str(1 * 256)])
    assert "context_lens [257] " in two.notes
    assert (column(three, "slots"), column(three, "block table")) == ([str(1 * 256 + 1)], ["[0 1]"])
    assert [step.free for step in (one, two, three)] == [(32, 31, 31), (31, 30, 30), (30, 30, 32)]


def test_walk_lifecycle() -> None:
    """64 and 96 ids without padding: 160 positions, logits of rows 63 and 159."""
    one, two, _ = walk("lifecycle")
    assert "input_ids [160] " in one.notes and "cu_seqlens_q [0, 64, 160] " in one.notes
    assert "logits of rows [63, 159]" in one.notes and "block_tables" not in one.notes
    assert column(one, "total") == ["64 -> 65", "96 -> 97"]
    assert column(one, "cached") == ["0 -> 64", "0 -> 96"]
    assert column(two, "positions") == ["64", "96"]
    assert "context_lens [65, 97] " in two.notes


def test_walk_chunk() -> None:
    """700 and 32 ids, a budget of 512, tables [17, 5, 23] and [11]."""
    one, two, three = walk("chunk")
    assert column(one, "positions") == ["0..511"]
    assert (column(one, "total"), column(one, "cached")) == (["700 -> 700"], ["0 -> 512"])
    assert column(one, "candidate")[0].endswith("dropped")
    assert "A is cut to the budget: 188 positions left" in one.notes
    assert "waiting: B 0 of 32 cached" in one.notes

    assert column(two, "positions") == ["512..699", "0..31"]
    assert column(two, "scheduled") == ["188", "32"]
    assert column(two, "slots") == ["5888..6075", "2816..2847"]
    assert column(two, "block table") == ["[17 5 23]", "[11]"]
    assert column(two, "total") == ["700 -> 701", "32 -> 33"]
    assert column(two, "cached") == ["512 -> 700", "0 -> 32"]
    assert all(candidate.endswith("accepted") for candidate in column(two, "candidate"))
    for shown in (
        "input_ids [220] ",
        "cu_seqlens_q [0, 188, 220] ",
        "cu_seqlens_k [0, 700, 732] ",
        "block_tables [[17, 5, 23], [11, -1, -1]] ",
        "max_seqlen_q 188 ",
        "max_seqlen_k 700 ",
        "logits of rows [187, 219]",
    ):
        assert shown in two.notes

    assert (column(three, "positions"), column(three, "slots")) == (["700", "32"], ["6076", "2848"])
    assert "context_lens [701, 33] " in three.notes


def test_walk_chunk_as_json() -> None:
    """An object a line, four a step; small tensors are written out, with shape and dtype."""
    objects = [json.loads(line) for line in trace("--walk", "chunk", "--json")[0]]
    kinds = ["before_schedule", "scheduled", "inputs", "after_postprocess"]
    assert [(o["step"], o["event"]) for o in objects] == [
        (step, kind) for step in (1, 2, 3) for kind in kinds
    ]
    inputs = objects[6]
    tensors = inputs["tensors"]
    assert tensors["positions"]["values"] == [*range(512, 700), *range(32)]
    assert tensors["slot_mapping"] == {
        "shape": [220],
        "dtype": "int32",
        "values": [*range(5888, 6076), *range(2816, 2848)],
    }
    assert tensors["input_ids"]["values"] == [
        *WALKS["chunk"].arrivals[0].prompt[512:],
        *WALKS["chunk"].arrivals[1].prompt,
    ]
    assert tensors["block_tables"]["values"] == [[17, 5, 23], [11, -1, -1]]
    assert inputs["numbers"] == {"max_seqlen_q": 188, "max_seqlen_k": 700}
    assert inputs["last_rows"] == [187, 219]


def test_walk_chunk_shapes() -> None:
    """What flows through layer 0 for 220 positions of 2 requests (hidden 256, 4 heads of 64, 2 KV
    heads, MLP 768, vocabulary 2048)."""
    (_, step, _) = trace("--walk", "chunk", "--shapes")[1]
    shapes = {name: (given, out) for name, given, out in step.inputs.shapes}
    assert shapes["embed_tokens"] == ([[220]], [220, 256])
    assert shapes["self_attn.qkv_proj"] == ([[220, 256]], [220, 512])
    q, kv = [220, 4, 64], [220, 2, 64]
    assert shapes["self_attn.attn"] == ([q, kv, kv], q)
    assert shapes["self_attn.o_proj"] == ([[220, 256]], [220, 256])
    assert shapes["mlp.gate_up_proj"] == ([[220, 256]], [220, 1536])
    assert shapes["mlp.down_proj"] == ([[220, 768]], [220, 256])
    assert shapes["lm_head"] == ([[2, 256]], [2, 2048])


def test_walk_prefix() -> None:
    """620 ids, of which 512 are stored already: 108 are computed. Reference counts of the shared
    blocks: released, reused, shared, released twice. 512 equal ids hit one block, not two."""
    steps = walk("prefix")
    reuse = steps[2]
    assert (column(reuse, "positions"), column(reuse, "scheduled")) == (["512..619"], ["108"])
    assert column(reuse, "cached") == ["512 -> 620"]
    assert "B hits [0 1]: these 512 positions" in reuse.notes
    assert "cu_seqlens_q [0, 108] " in reuse.notes and "cu_seqlens_k [0, 620] " in reuse.notes
    assert "block_tables [[0, 1, 3]] " in reuse.notes
    assert "free, but still in the prefix index: [0 1]" in steps[1].notes
    assert "shared: [0 1] with reference counts [2, 2]" in steps[3].notes
    assert steps[3].free[2] == 32 - 4, "both alive: 4 blocks, not 6"
    assert (column(steps[8], "scheduled"), column(steps[8], "cached")) == (
        ["256"],
        ["256 -> 512 -> 0"],
    )
    counts = [end["ref_counts"] for *_, end in events("prefix")]
    released = [[counts[i].get(0, 0), counts[i].get(1, 0)] for i in (1, 2, 3, 5, 6)]
    assert released == [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]]


def test_walk_preempt() -> None:
    """A takes the last of four blocks, B needs one, C gives way and keeps its ids."""
    one, two, *_, resumed, _ = walk("preempt")
    assert column(one, "total") == ["4 -> 5"] * 3 and one.free == (4, 1, 1)
    assert list(two.rows) == ["A", "B"]
    assert "C is preempted: B needs a block and none is free; C is the newest" in two.notes
    assert "C gives back [2], keeps its ids, and waits first in the queue" in two.notes
    assert "A takes block 3" in two.notes and "B takes block 2" in two.notes
    assert "waiting: C 0 of 5 cached" in two.notes
    assert column(resumed, "positions") == ["0..4"] and list(resumed.rows) == ["C"]
    (_, scheduled, *_) = events("preempt")[1]
    assert scheduled["preempted"] == [{"name": "C", "needed_by": "B", "blocks": [2]}]
    (other,) = scheduled["others"]
    assert (other["name"], other["status"]) == ("C", "WAITING")
    assert (other["cached"], other["block_table"], other["total"]) == (0, [], 5)


def test_a_later_arrival_joins_before_its_step() -> None:
    text = "\n".join(trace("--walk", "tour")[0])
    assert "D: 9 ids" in text and "joins before step 6" in text
    assert [list(step.rows) for step in walk("tour")][5] == ["D"]
