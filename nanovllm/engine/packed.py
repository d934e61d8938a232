"""PackedBuffer: small arrays that a CUDA graph reads, filled from the host by one copy."""

from math import prod

import numpy as np
import torch

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> (4 or 8 byte dtype, shape)


class PackedBuffer:
    """One allocation on the device, with a view of it per field: `buffer["name"]`.

    On the host there are two of it in pinned memory, used in turn: a copy that has not ended yet
    reads one while the other is filled. That suffices while at most one step is in flight.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        # The widest first, which keeps every view aligned.
        self.fields = dict(sorted(fields.items(), key=lambda item: -item[1][0].itemsize))
        size = sum(dtype.itemsize * prod(shape) for dtype, shape in fields.values())
        self._packed = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._views = self._split(self._packed)
        self._host_views = [
            {name: view.numpy() for name, view in self._split(host).items()} for host in self._hosts
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def host(self) -> dict[str, np.ndarray]:
        """The arrays to fill for the next `upload`; what they hold is two uploads old."""
        self._hosts.reverse()
        self._host_views.reverse()
        return self._host_views[0]

    def upload(self) -> None:
        """Start the copy of what `host` gave, without waiting for it."""
        self._packed.copy_(self._hosts[0], non_blocking=True)

    def _split(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, (dtype, shape) in self.fields.items():
            end = offset + dtype.itemsize * prod(shape)
            views[name] = packed[offset:end].view(dtype).view(shape)
            offset = end
        return views
