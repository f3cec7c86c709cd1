"""When a device has come to a point of its work, without waiting for it."""

from __future__ import annotations

import time

import torch


class Moment:
    """Now, or when the device will have done what it was told so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: Moment) -> float:
        """Seconds from the other, earlier on the same device."""
        self.wait()
        if self._event is None or other._event is None:
            return self._time - other._time
        return float(other._event.elapsed_time(self._event)) / 1e3
