"""The whole engine under any order of calls: requests added, stepped, streamed, generated, aborted,
streams left early, and models that raise; the invariants hold after every action.

The model is arithmetic over the pool as the scheduler laid it out (see scheduling.FakeModel), so
that each request must end with exactly what its prompt and its parameters determine.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from checkpoints import make_checkpoint
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_invariants, check_step
from scheduling import FakeModel, complete_alone

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Increment, Request
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence

LETTERS = '!"#$'  # the texts of ids 0 to 3: one character each
EOS = 3

PROMPT = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(4, 12),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text(LETTERS[:3], min_size=1, max_size=3), max_size=2),
)
ERROR = st.sampled_from([RuntimeError, KeyboardInterrupt])
JOB = st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=4)
Job = list[tuple[list[int], SamplingParams]]


class Result(NamedTuple):
    token_ids: list[int]
    text: str
    reason: str


def result_of(prompt: list[int], params: SamplingParams, max_model_len: int) -> Result:
    """What the request must give, from the definitions: the first token at which it may and must
    end. One token is one character, so a stop string ends with the last of them."""
    ids, _ = complete_alone(prompt, params.max_tokens, max_model_len, vocab_size=4)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += LETTERS[token_id]
        if count < params.min_tokens:
            continue
        cuts = [len(text) - len(stop) for stop in params.stop if text.endswith(stop)]
        if cuts:
            return Result(ids[:count], text[: min(cuts)], "stop")
        if token_id == EOS and not params.ignore_eos:
            return Result(ids[:count], text, "stop")
    return Result(ids, text, "length")


class Stream:
    """A stream that is being read, and what it has given so far."""

    def __init__(self, increments: Iterator[Increment], job: Job) -> None:
        self.increments = increments
        self.job = job
        self.results = [Result([], "", "") for _ in job]

    def take(self, increment: Increment) -> None:
        before = self.results[increment["index"]]
        assert before.reason == "", "something came after the last increment"
        self.results[increment["index"]] = Result(
            before.token_ids + increment["token_ids"],
            before.text + increment["text"],
            increment["finish_reason"] or "",
        )


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One engine for all examples; each gives it a scheduler and a fake model of its own."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(folder, device="cpu", kvcache_block_size=4, num_kvcache_blocks=4) as llm:
        assert llm.tokenizer.decode([0, 1, 2, 3]) == LETTERS
        AnyCalls.llm = llm
        yield


class AnyCalls(RuleBasedStateMachine):
    llm: LLM

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 16),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        max_model_len=st.integers(10, 30),
    )
    def start(self, block_size: int, num_blocks: int, **limits: int) -> None:
        limits["max_num_batched_tokens"] = limits.pop("budget")
        llm = self.llm
        llm.config = replace(llm.config, kvcache_block_size=block_size, **limits)
        llm.scheduler = Scheduler(llm.config, num_blocks, [EOS])
        llm.requests = {}
        self.model = FakeModel(llm.scheduler, vocab_size=4)
        self.error: type[BaseException] | None = None
        llm.model_runner.run = self.run
        self.added: dict[int, tuple[Request, Job]] = {}  # by add_request, not aborted
        self.streams: list[Stream] = []

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        check_step(self.llm.scheduler, ScheduledBatch(seqs, is_prefill))
        if self.error is not None:
            error, self.error = self.error, None
            self.model.spoil(seqs)
            raise error("made to fail")
        self.llm.model_runner.logprobs = {}
        return self.model.run(seqs, is_prefill)

    def fits(self, job: Job) -> bool:
        limit = self.llm.config.max_model_len
        manager = self.llm.scheduler.block_manager
        room = len(manager.blocks) * manager.block_size
        return all(
            len(prompt) < limit and min(len(prompt) + params.max_tokens, limit) - 1 <= room
            for prompt, params in job
        )

    def expected(self, job: Job) -> list[Result]:
        return [result_of(*request, self.llm.config.max_model_len) for request in job]

    # --- one request at a time

    @rule(job=st.tuples(PROMPT, PARAMS).map(lambda request: [request]))
    def add_request(self, job: Job) -> None:
        if self.fits(job):
            request_id = self.llm.add_request(*job[0])
            self.added[request_id] = self.llm.requests[request_id], job
        else:
            with pytest.raises(ValueError):
                self.llm.add_request(*job[0])

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        """Every added request is reported, once, whoever ran it."""
        for _ in range(count):
            for request_id, token_ids in self.llm.step()[0]:
                if request_id in self.added:
                    request, job = self.added.pop(request_id)
                    output = request.completion()
                    assert token_ids == output["token_ids"]
                    result = Result(token_ids, output["text"], output["finish_reason"])
                    assert [result] == self.expected(job)

    @precondition(lambda self: not self.llm.scheduler.is_finished())
    @rule(error=ERROR)
    def step_that_fails(self, error: type[BaseException]) -> None:
        tokens = {request_id: len(r.seq) for request_id, r in self.llm.requests.items()}
        self.error = error
        with pytest.raises(error, match="made to fail"):
            self.llm.step()
        assert {i: len(r.seq) for i, r in self.llm.requests.items()} == tokens, "none lost or made"

    @precondition(lambda self: self.added.keys() & self.llm.requests.keys())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(self.added.keys() & self.llm.requests.keys())
        request_id = data.draw(st.sampled_from(live))
        assert self.llm.abort(request_id) and not self.llm.abort(request_id)
        request, _ = self.added.pop(request_id)
        assert request.seq.finish_reason == "abort"

    # --- whole loops, while others are alive

    @rule(job=JOB)
    def generate(self, job: Job) -> None:
        """Returns its own results only."""
        if not self.fits(job):
            self.refused(lambda *args: self.llm.generate(*args, use_tqdm=False), job)
            return
        outputs = self.llm.generate(*map(list, zip(*job, strict=True)), use_tqdm=False)
        results = [Result(o["token_ids"], o["text"], o["finish_reason"]) for o in outputs]
        assert results == self.expected(job)

    @rule(job=JOB, error=ERROR, steps=st.integers(0, 6))
    def generate_that_fails(self, job: Job, error: type[BaseException], steps: int) -> None:
        """Its requests are gone, the others are still there."""
        if not self.fits(job):
            return
        before = set(self.llm.requests)
        run, left = self.llm.model_runner.run, steps

        def failing(seqs: list[Sequence], is_prefill: bool) -> list[int]:
            nonlocal left
            if not left:
                self.error = error
            left -= 1
            return run(seqs, is_prefill)

        self.llm.model_runner.run = failing
        try:
            self.llm.generate(*map(list, zip(*job, strict=True)), use_tqdm=False)
        except error:
            assert left == -1
        finally:
            self.llm.model_runner.run = run
        assert set(self.llm.requests) <= before

    def refused(self, call: Any, job: Job) -> None:
        before = list(self.llm.requests)
        with pytest.raises(ValueError, match=r"prompt \d: "):
            call(*map(list, zip(*job, strict=True)))
        assert list(self.llm.requests) == before

    # --- streams

    @precondition(lambda self: len(self.streams) < 3)
    @rule(job=JOB)
    def open_stream(self, job: Job) -> None:
        if not self.fits(job):
            self.refused(self.llm.stream, job)
            return
        increments = self.llm.stream(*map(list, zip(*job, strict=True)))
        self.streams.append(Stream(increments, job))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), count=st.integers(1, 8))
    def read_stream(self, data: st.DataObject, count: int) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        for _ in range(count):
            self.read(stream)

    def read(self, stream: Stream) -> None:
        increment = next(stream.increments, None)
        if increment is not None:
            stream.take(increment)
        elif stream in self.streams:
            self.streams.remove(stream)
            assert stream.results == self.expected(stream.job)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close_stream(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        self.streams.remove(stream)
        stream.increments.close()
        assert next(stream.increments, None) is None

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), error=ERROR)
    def stream_that_fails(self, data: st.DataObject, error: type[BaseException]) -> None:
        """It may have increments left that need no step; then comes the error, and the end."""
        stream = data.draw(st.sampled_from(self.streams))
        self.error = error
        try:
            while stream in self.streams:
                self.read(stream)
        except error:
            self.streams.remove(stream)
        self.error = None
        assert next(stream.increments, None) is None

    # --- after every action

    @invariant()
    def holds(self) -> None:
        scheduler = self.llm.scheduler
        check_invariants(scheduler)
        live = {seq.seq_id for seq in (*scheduler.waiting, *scheduler.running)}
        assert live == set(self.llm.requests)
        own = {request_id for request_id, (r, _) in self.added.items() if not r.seq.is_finished}
        assert own <= live
        unread = sum(result.reason == "" for s in self.streams for result in s.results)
        assert len(live - own) <= unread, "a closed stream or a failed generate lives on"

    def teardown(self) -> None:
        if not hasattr(self, "streams"):
            return
        for stream in list(self.streams):
            while stream in self.streams:
                self.read(stream)
        for _ in range(1000):
            self.step(1)
        assert self.llm.is_finished(), "I7"
        self.holds()
        assert not self.added, "the end of an added request has not been reported"


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
