"""ProgressBar: what `generate` shows: finished requests, speed, use of the KV pool, preemptions."""

from time import perf_counter

from tqdm import tqdm

from nanovllm.engine.scheduler import Scheduler


class ProgressBar:
    """A tqdm bar over `total` requests; shows nothing unless `enabled`."""

    def __init__(self, total: int, scheduler: Scheduler, enabled: bool) -> None:
        self.scheduler = scheduler
        self.preemptions_before = scheduler.num_preemptions
        self.speed = {True: 0.0, False: 0.0}  # tok/s of the latest prefill and decode step
        # Without miniters tqdm would wait for as many ends at once as it has seen before.
        self.bar = tqdm(total=total, desc="Generating", disable=not enabled, miniters=0)
        self.since = perf_counter()

    def close(self) -> None:
        """Leave it on the screen as it is."""
        self.bar.close()

    def update(self, num_finished: int, num_tokens: int) -> None:
        """After a step of num_tokens positions, negative in decode; 0: none was taken in."""
        if self.bar.disable or not num_tokens:
            return
        now = perf_counter()
        self.speed[num_tokens > 0] = abs(num_tokens) / max(now - self.since, 1e-9)
        self.since = now
        manager = self.scheduler.block_manager
        shown = {
            "Prefill": f"{self.speed[True]:.0f}tok/s",
            "Decode": f"{self.speed[False]:.0f}tok/s",
            "KV": f"{len(manager.used_block_ids) / len(manager.blocks):.0%}",
        }
        if preemptions := self.scheduler.num_preemptions - self.preemptions_before:
            shown["preemptions"] = str(preemptions)
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(num_finished)
