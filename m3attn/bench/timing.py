"""How a call is timed: alone with a cold L2, or among others in a CUDA graph over data that L2 cannot hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Call = Callable[[], object]

MIN_GRAPH_CALLS = 4
FLUSH_BYTES = 256 << 20
SPIN_CYCLES_PER_SECOND = 2e9
MAX_SPIN_SECONDS = 2e-3


class Timer(Protocol):
    def cold(self, call: Call) -> float:
        """Median microseconds of one call that finds nothing of its data in L2."""
        ...

    def captured(self, calls: Sequence[Call]) -> Call:
        """A CUDA graph that runs `calls` in turn, as one call that leaves the host little to do."""
        ...

    def replay(self, calls: Sequence[Call]) -> float:
        """Median microseconds of one of `calls` when a CUDA graph runs all of them in turn; together they must outgrow L2."""
        ...


class CudaTimer:
    """Times on one GPU with events.

    Args:
        device: the GPU.
        rep_ms: GPU time that the measured repetitions of one figure may take, at least `min_reps` of them.
    """

    def __init__(self, device: torch.device, *, rep_ms: float = 100.0, min_reps: int = 5, max_reps: int = 1000) -> None:
        self.device, self.rep_ms, self.min_reps, self.max_reps = device, rep_ms, min_reps, max_reps
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def cold(self, call: Call) -> float:
        call()
        torch.cuda.synchronize(self.device)
        estimate, host = self._estimate(call)
        # The GPU spins while the host prepares the launches, so that events see the kernels and not the host.
        cycles = int(min(1.5 * host + 20e-6, MAX_SPIN_SECONDS) * SPIN_CYCLES_PER_SECOND)

        def once(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
            self._flush.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            call()
            end.record()

        return self._median_ms(once, estimate) * 1e3

    def captured(self, calls: Sequence[Call]) -> Call:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def replay(self, calls: Sequence[Call]) -> float:
        calls = list(calls) * max(1, -(-MIN_GRAPH_CALLS // len(calls)))
        all_of_them = self.captured(calls)
        all_of_them()
        torch.cuda.synchronize(self.device)
        estimate, _ = self._estimate(all_of_them)

        def once(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
            start.record()
            all_of_them()
            end.record()

        return self._median_ms(once, estimate) * 1e3 / len(calls)

    def _estimate(self, call: Call, runs: int = 3) -> tuple[float, float]:
        """(GPU milliseconds, host seconds) of one call, roughly."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter()
        for _ in range(runs):
            call()
        host = (time.perf_counter() - begin) / runs
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / runs, host

    def _median_ms(self, once: Callable[[torch.cuda.Event, torch.cuda.Event], None], estimate_ms: float) -> float:
        reps = min(self.max_reps, max(self.min_reps, int(self.rep_ms / max(estimate_ms, 1e-3))))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
        for start, end in events:
            once(start, end)
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in events)
