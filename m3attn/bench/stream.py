"""A plain streaming read: what the fewest bytes of a decode step cost when nothing is computed with them."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3attn.bench.timing import Timer
from m3attn.triton_kernels.launch import launch

WORDS_PER_PROGRAM = 8192
MAX_SETS = 128


@triton.jit
def stream_read_kernel(words_ptr, sums_ptr, num_words, WORDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offs = program * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + offs, mask=offs < num_words, other=0)  # [WORDS]
    # The sum keeps the compiler from dropping the loads.
    tl.store(sums_ptr + program, tl.sum(words, axis=0))


def stream_read(words: torch.Tensor, sums: torch.Tensor) -> None:
    """Read int32 `words` [N] once; `sums` [ceil(N / WORDS_PER_PROGRAM)] int32 receives one sum a program."""
    grid = (-(-words.numel() // WORDS_PER_PROGRAM),)
    launch(stream_read_kernel, grid, words, sums, words.numel(), device=words.device, num_warps=8, num_stages=1, WORDS=WORDS_PER_PROGRAM)


class StreamTimer:
    """Microseconds of a plain read of so many bytes that are not in L2, remembered by size."""

    def __init__(self, device: torch.device, timer: Timer, l2_bytes: int) -> None:
        self.device, self.timer, self.l2_bytes = device, timer, l2_bytes
        self._known: dict[int, float] = {}

    def __call__(self, num_bytes: int) -> float:
        if num_bytes not in self._known:
            self._known[num_bytes] = self._measure(num_bytes)
        return self._known[num_bytes]

    def _measure(self, num_bytes: int) -> float:
        words = max(1, num_bytes // 4)
        num_sets = 1 if num_bytes > 2 * self.l2_bytes else min(MAX_SETS, 2 * self.l2_bytes // max(1, num_bytes) + 1)
        data = torch.ones(num_sets, words, dtype=torch.int32, device=self.device)
        sums = torch.empty(-(-words // WORDS_PER_PROGRAM), dtype=torch.int32, device=self.device)
        return self.timer.replay([partial(stream_read, part, sums) for part in data])
