"""SymmetricAllReduce: sums over GPUs that read each other's memory, by torch's symmetric memory.

In a CUDA graph on two H200s this takes half of NCCL's time: one row of 4,096 in bfloat16 6.8 us
instead of 14.2, 256 rows 13.4 instead of 38.2. Never uses NVLink multicast.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

MAX_BYTES = 8 << 20  # 512 rows of 8,192 in bfloat16; NCCL is as good from there on
ONE_SHOT_BYTES = 64 << 10  # up to here every rank reads all of it, above only its share, twice
# Of `release`: how often, after which pauses (about 50 ms), it passes how many barriers. As many as
# can be queued: a sum has two or three, a step two sums a layer.
RELEASES, PAUSE_CYCLES, PASSES = 40, 80_000_000, 500


class OwnNumbers(dist.Store):
    """The store as torch sees it while ranks exchange their memory. torch numbers that by process,
    in keys "what/number/...": rank 0's second engine would be at another number than its new rank
    1, and both would wait. Here the numbers begin at 0."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        what, number, *rest = key.split("/")
        first = self._first.setdefault(what, int(number))
        return "/".join(["symmetric", what, str(int(number) - first), *rest])


class SymmetricAllReduce:
    """A buffer that every rank's GPU can read; sums are formed from the ranks' buffers."""

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device
    ) -> None:
        """Collective, and another exchange in the current stream must follow before the first sum.
        `name` must be new in this process. Raises what torch raises where it or the GPUs cannot."""
        self.name, self.size, self.device = name, size, device
        store = OwnNumbers(store)  # torch calls its methods as long as the variable lives
        # By this name torch finds who takes part: older ones here, 2.11 in its registry of groups,
        # which keeps none alive. This group exchanges nothing itself.
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._group = dist.ProcessGroup(store, rank, size)
        _register_process_group(name, self._group)
        buffer = _SymmetricMemory.empty_strided_p2p((MAX_BYTES // 4,), (1,), torch.float32, device)
        self.handle = _SymmetricMemory.rendezvous(buffer, name)
        self.buffers = {torch.float32: buffer, torch.bfloat16: buffer.view(torch.bfloat16)}
        count = self.handle.signal_pad_size // (4 * size) * size
        pads = [self.handle.get_signal_pad(i, (count,), torch.int32) for i in range(size)]
        self._signals = signals_to_set(pads, rank)
        # Of high priority: streams of the same one may share a queue, and this must overtake.
        self._stream = torch.cuda.Stream(device, priority=-1)
        for signals, _ in self._signals:
            signals.fill_(0)  # as they are: what is captured must be loaded before
        torch.cuda.synchronize(device)
        self._passes = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._passes, stream=self._stream):
            for _ in range(PASSES):
                for signals, value in self._signals:
                    signals.fill_(value)

    def serves(self, x: torch.Tensor) -> bool:
        """Whether `x` can be summed here; two-shot needs equal, 16-byte aligned shares."""
        return (
            x.dtype in self.buffers
            and x.nbytes <= MAX_BYTES
            and x.nbytes % (16 * self.size) == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in x or in a new tensor."""
        # The operations below end with a barrier, so the buffer is free again when they are done.
        buffer = self.buffers[x.dtype][: x.numel()].copy_(x.view(-1))
        if x.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self.name).view_as(x)
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self.name)
        return x.copy_(buffer.view_as(x))

    def release(self) -> None:
        """Let sums that wait for a dead rank go on, with garbage, for about two seconds; from any
        thread. The memory of a dead process stays while it is mapped here.

        All of it is queued at once. What follows, NCCL's abort, first lets NCCL's own kernels go
        on, between which more such sums may stand, and then frees memory: that waits for the GPU
        and keeps every thread from launching anything meanwhile."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for _ in range(RELEASES):
                torch.cuda._sleep(PAUSE_CYCLES)
                self._passes.replay()

    def close(self) -> None:
        """Wait for the end of what `release` has queued: it writes to memory that goes now."""
        self._stream.synchronize()


def signals_to_set(pads: list[torch.Tensor], rank: int) -> list[tuple[torch.Tensor, int]]:
    """What lets a kernel of `rank` pass a barrier that nobody else comes to, once: (signals, value)
    pairs. pads[i]: rank i's signals, for each block of the kernel one from each rank.

    At a barrier a block sets its signal on every rank, its own as well, when it finds it at 0, and
    takes back to 0 those on its own rank, when it finds them at 1. So its signals on the others
    are set to 0 and theirs here to 1; that from itself must be left to it."""
    signals = [pad.view(-1, len(pads)) for pad in pads]
    others = [i for i in range(len(pads)) if i != rank]
    return [(signals[i][:, rank], 0) for i in others] + [(signals[rank][:, i], 1) for i in others]
