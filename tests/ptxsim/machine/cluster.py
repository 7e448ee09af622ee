"""What the warps of one cluster share."""

from collections import deque

import numpy as np

from ..formats import i8, u1, u2, u4, u8
from .memory import SMEM_BYTES


class CTA:
    """Shared memory seen in units of 1 to 16 bytes, barriers, tensor memory, and who wrote what when."""

    def __init__(self, cl, rank, ctaid):
        self.cluster, self.rank, self.ctaid = cl, rank, ctaid
        raw = np.zeros(SMEM_BYTES, u1)
        if cl.machine.fill is not None:
            raw[:] = cl.machine.fill
        self.shared = {1: raw, 2: raw.view(u2), 4: raw.view(u4), 8: raw.view(u8), 16: raw.view(u4).reshape(-1, 4)}
        self.mbars = {}
        self.barriers = {}
        self.tmem = None
        self.tmem_used = np.zeros(512, bool)
        self.tmem_allocs = {}
        self.warps = []
        self.written_at = np.zeros(SMEM_BYTES // 16 + 1, i8)  # per 16 bytes: when the generic proxy wrote it last, and which warp
        self.written_by = np.zeros(SMEM_BYTES // 16 + 1, u1)
        self.fenced_at = np.zeros(64, i8)  # per warp: when it last executed fence.proxy.async
        self.tensor_queue = deque()  # tensor-core pipe in issue order (lazy mode)

    def get_tmem(self):
        if self.tmem is None:
            self.tmem = np.zeros((128, 512), u4)
            if self.cluster.machine.fill is not None:
                self.tmem[:] = 0xFFC0FFC0  # NaN-like
        return self.tmem


class Cluster:
    """The CTAs that run together; `events` counts what may let a waiting warp go on, `clock` orders writes and fences."""

    def __init__(self, m, comp, ids, launch):
        self.machine, self.comp, self.launch = m, comp, launch
        self.events = 0
        self.clock = 0
        self.async_queue = []
        self.ctas = [CTA(self, r, c) for r, c in enumerate(ids)]
