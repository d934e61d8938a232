"""Scheduler: who runs in the next step, and how many positions of each. Never touches a tensor."""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus

# `Scheduler.headroom` rises by this share of what it lacks of the most with a preemption, and
# eases by this share with a finished request. From simulated jobs: see README, "What was tried".
HEADROOM_MOST, HEADROOM_RAISE, HEADROOM_EASE = 1.5, 0.25, 0.002


class ScheduledBatch(NamedTuple):
    """One step's work, the hand-off from scheduler to runner. Unpacks as `seqs, is_prefill`.

    seqs: in the order of the step's rows; the scheduler has set each one's
        `num_scheduled_tokens` (1 in decode) and `block_table`.
    is_prefill: the phase; a step is never mixed.
    """

    seqs: list[Sequence]
    is_prefill: bool


class Progress(NamedTuple):
    """One row of a launched step, until its token arrives: positions start..end-1 of `seq` were
    computed; if `accepts`, the token sampled after them is token number `end`."""

    seq: Sequence
    start: int
    end: int
    accepts: bool


class Scheduler:
    """Prefill first, in arrival order; decode when nothing can be prefilled.

    `waiting` holds requests whose prompt is not fully scheduled (new, cut, or preempted),
    `running` those that decode. Every live request is in exactly one of them.

    Invariants (with I1-I4 of BlockManager; tests/invariants.py):
    I5  A step obeys max_num_seqs, a prefill step max_num_batched_tokens too; none holds a sequence
        twice.
    I6  Between steps a running sequence has exactly one token without K/V.
    I7  Every accepted request finishes in a bounded number of steps: `add` refuses one that could
        outgrow the pool, and only a newer request is preempted for an older one.
    I8  When all have finished every block is free, and the prefix index still hits.
    """

    def __init__(self, config: Config, num_blocks: int, eos_token_ids: Collection[int]) -> None:
        """num_blocks: of the KV pool, as the runner sized it; eos_token_ids: may be empty."""
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.block_manager = BlockManager(num_blocks, config.kvcache_block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        # For _has_headroom: the share of the growth that is possible that is expected, and the
        # longest completion so far, past which no growth is expected.
        self.headroom, self.longest_completion = 0.0, 0
        self.learns_headroom = True  # False: the plain rule throughout, for tests and experiments
        # Counters, since start, for `LLMEngine.stats`.
        self.num_steps = 0
        self.num_prefill_tokens = self.num_decode_tokens = self.num_prefix_hit_tokens = 0
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def check(self, seq: Sequence) -> None:
        """Raise ValueError if `seq` could never finish here; changes nothing."""
        block_size, num_blocks = self.block_manager.block_size, len(self.block_manager.blocks)
        if seq.block_size != block_size:
            raise ValueError(
                f"the sequence was made for blocks of {seq.block_size} positions, this engine has "
                f"blocks of {block_size}: pass block_size={block_size} to Sequence"
            )
        if seq.num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {seq.num_prompt_tokens} tokens, which leaves no room for a "
                f"completion within max_model_len={self.max_model_len}: shorten it, or raise "
                "max_model_len where the model's max_position_embeddings is larger"
            )
        # The last token to be accepted is never fed back, so it needs no slot.
        positions = min(seq.num_prompt_tokens + seq.max_tokens, self.max_model_len) - 1
        if positions > num_blocks * block_size:
            raise ValueError(
                f"a prompt of {seq.num_prompt_tokens} tokens with max_tokens={seq.max_tokens} may "
                f"need {positions} KV positions, but the whole pool has {num_blocks * block_size} "
                f"({num_blocks} blocks of {block_size}): shorten the prompt, lower max_tokens or "
                "enlarge the pool (num_kvcache_blocks or gpu_memory_utilization)"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a new request; it joins at the next step. Raises ValueError as `check` does."""
        self.check(seq)
        if self.is_finished():  # a new job: what the last one taught need not hold for it
            self.headroom, self.longest_completion = 0.0, 0
        self.waiting.append(seq)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's work and reserve its blocks. Call only while not finished."""
        seqs = self._schedule_prefill()
        if seqs:
            return ScheduledBatch(seqs, is_prefill=True)
        return ScheduledBatch(self._schedule_decode(), is_prefill=False)

    def _schedule_prefill(self) -> list[Sequence]:
        chosen: list[Sequence] = []
        budget = self.max_num_batched_tokens
        while self.waiting and len(chosen) < self.max_num_seqs and budget:
            seq = self.waiting[0]
            num_cached, num_hits = seq.num_cached_tokens, 0
            if not seq.block_table:
                num_hits = self.block_manager.can_allocate(seq)
                if num_hits < 0 or not self._has_headroom(seq, is_first=not chosen):
                    break
                num_cached = num_hits * self.block_manager.block_size
            num_left = seq.num_tokens - num_cached
            # Only a step's first sequence may be cut: with two half-done prompts, each holding
            # the blocks of its whole length, the pool could fill up with neither able to finish.
            if chosen and num_left > budget:
                break
            if not seq.block_table:
                self.block_manager.allocate(seq, num_hits)
                self.num_prefix_hit_tokens += seq.num_cached_tokens
            seq.num_scheduled_tokens = min(num_left, budget)
            budget -= seq.num_scheduled_tokens
            chosen.append(seq)
            if seq.num_scheduled_tokens < num_left:
                break  # cut: it stays at the left of waiting, and goes on in the next step
            seq.status = SequenceStatus.RUNNING
            self.running.append(self.waiting.popleft())
        return chosen

    def _has_headroom(self, seq: Sequence, is_first: bool) -> bool:
        """Whether `seq` can join without the running requests soon outgrowing the pool.

        Admitting whatever fits *now* thrashes under pressure: all grow, the newest are preempted,
        prefill again as soon as something fits, and are preempted again. So what decides is the
        peak of the demand to come (as in Gong et al. 2025, "Past-Future Scheduler"). In the order
        of what they have left to grow: when a sequence ends, those after it have grown as much as
        it, and those before it have given their blocks back. Since completions often stop early,
        they are expected to grow to the longest seen so far at most, times `headroom`. That is
        learned: 0, the plain rule, until something is preempted; raised by each preemption (beyond
        1 where even the full growth leaves no margin) and eased by each finished request.

        Every prefill makes all who run wait. So the first of a step joins when there is room for
        company too: for a quarter of those who run, or in a sixth of the pool.
        """
        if not self.headroom or not self.running:
            return True
        num_free = len(self.block_manager.free_block_ids)
        company = seq.num_blocks * (1 + len(self.running) // 4)
        if is_first and num_free < min(company, len(self.block_manager.blocks) // 6):
            return False
        live = [(self._blocks_to_grow(s), s.num_blocks) for s in (*self.running, seq)]
        peak = freed = 0.0
        for num_ended, (growth, num_blocks) in enumerate(sorted(live)):
            peak = max(peak, (len(live) - num_ended) * growth - freed)
            freed += num_blocks
        return peak <= num_free - seq.num_blocks

    def _blocks_to_grow(self, seq: Sequence) -> float:
        completion = min(seq.max_tokens, self.longest_completion or seq.max_tokens)
        total = min(seq.num_prompt_tokens + completion, self.max_model_len)
        return self.headroom * max(total - seq.num_tokens, 0) / self.block_manager.block_size

    def _schedule_decode(self) -> list[Sequence]:
        chosen: list[Sequence] = []
        while self.running and len(chosen) < self.max_num_seqs:
            seq = self.running.popleft()
            while not self.block_manager.can_append(seq):
                # The newest gives way: it has the least to lose, and the oldest surely finish.
                self.preempt(self.running.pop() if self.running else seq)
                self.num_preemptions += 1
                if self.learns_headroom:
                    self.headroom += (HEADROOM_MOST - self.headroom) * HEADROOM_RAISE
                if seq.status is SequenceStatus.WAITING:
                    break
            else:
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                chosen.append(seq)
        self.running.extendleft(reversed(chosen))
        assert chosen, "no request can run: `add` let one through that outgrows the pool"
        return chosen

    def preempt(self, seq: Sequence) -> None:
        """Take back the blocks of `seq`, already out of `running`. It keeps its token ids, waits at
        the left of the queue and prefills again, often from its own still unspoiled blocks."""
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled_tokens = 0
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(
        self, seqs: list[Sequence], token_ids: list[int], is_prefill: bool
    ) -> list[tuple[Sequence, int]]:
        """Account for a step that ran: token_ids[i] was sampled at the last scheduled position of
        seqs[i]. It is dropped when that was not the last position of the sequence. Returns what
        was accepted, as (sequence, token id)."""
        return self.commit(self.advance(seqs, is_prefill), token_ids)

    def advance(self, seqs: list[Sequence], is_prefill: bool) -> list[Progress]:
        """First half of `postprocess`, which needs no token: the step is launched, so its positions
        count as cached, and each sequence that will get a token has a PENDING one. With that the
        next step can be scheduled. What will be full leaves `running`; it ends in `commit`."""
        self.num_steps += 1
        progress = []
        for seq in seqs:
            start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            progress.append(Progress(seq, start, end, accepts=end == seq.num_tokens))
            if is_prefill:
                self.num_prefill_tokens += end - start
            else:
                self.num_decode_tokens += end - start
            seq.num_cached_tokens, seq.num_scheduled_tokens = end, 0
            if progress[-1].accepts:
                seq.append_token(PENDING)
                if self._is_full(seq, seq.num_tokens):
                    self.running.remove(seq)
        return progress

    def commit(self, progress: list[Progress], token_ids: list[int]) -> list[tuple[Sequence, int]]:
        """Second half of `postprocess`: the step's tokens are here. A sequence that ended
        meanwhile (stop string, abort) gets none. Returns what was accepted."""
        accepted = []
        for (seq, start, end, accepts), token_id in zip(progress, token_ids, strict=True):
            if seq.is_finished:
                continue
            self.block_manager.hash_blocks(seq, start, end)
            if accepts:
                seq.token_ids[end] = token_id
                accepted.append((seq, token_id))
                reason = self._stop_reason(seq, token_id, end + 1)
                if reason is not None:
                    self.finish(seq, reason)
        return accepted

    def _stop_reason(self, seq: Sequence, token_id: int, num_tokens: int) -> str | None:
        params = seq.sampling_params
        if num_tokens - seq.num_prompt_tokens >= params.min_tokens and (
            (token_id in self.eos_token_ids and not seq.ignore_eos)
            or token_id in params.stop_token_ids
        ):
            return "stop"
        return "length" if self._is_full(seq, num_tokens) else None

    def _is_full(self, seq: Sequence, num_tokens: int) -> bool:
        return (
            num_tokens - seq.num_prompt_tokens >= seq.max_tokens or num_tokens >= self.max_model_len
        )

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a live request: FINISHED, its blocks freed, a pending token forgotten. A step in
        flight may still write to its last block; later owners write there after that. Of one that
        has finished already only the reason changes (a stop string found in its last token)."""
        seq.finish_reason = reason
        if seq.is_finished:
            return
        self._drop_pending(seq)
        self._leave_queue(seq)
        seq.status = SequenceStatus.FINISHED
        self.block_manager.deallocate(seq)
        if reason != "abort":
            self.headroom *= 1 - HEADROOM_EASE
            self.longest_completion = max(self.longest_completion, seq.num_completion_tokens)

    def can_run_ahead(self) -> bool:
        """Whether `schedule` can choose a step now, while tokens are pending, without a
        preemption: a pending token must arrive before its sequence can be prefilled again."""
        if self.running:
            opening = sum(map(self.block_manager.opens_block, self.running))
            return opening <= len(self.block_manager.free_block_ids)
        if not self.waiting:
            return False
        head = self.waiting[0]
        return bool(head.block_table) or self.block_manager.can_allocate(head) >= 0

    def rollback(self, seqs: list[Sequence]) -> None:
        """Undo a step that was scheduled, or launched, and failed: all its sequences wait again,
        in their order. What it may have written to their blocks is forgotten with the blocks."""
        for seq in reversed(seqs):
            if not seq.is_finished:
                self._drop_pending(seq)
                self._leave_queue(seq)
                self.preempt(seq)

    def abort(self, seq: Sequence) -> None:
        """End a live request for its caller's reasons, with finish_reason "abort". One that is
        not live is ignored."""
        if not seq.is_finished:
            self.finish(seq, "abort")

    def _drop_pending(self, seq: Sequence) -> None:
        while seq.last_token == PENDING:  # two, if the next step has been launched as well
            seq.token_ids.pop()

    def _leave_queue(self, seq: Sequence) -> None:
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        if seq in queue:  # a full one has left already
            queue.remove(seq)
