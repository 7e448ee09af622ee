"""A warp: registers, divergent groups of lanes, special registers."""

import numpy as np

from ..errors import SimError
from ..formats import u4, u8
from ..ops import LANE
from ..translate.types import BLOCK, CONV, EXIT
from .barriers import Barriers
from .copies import Copies
from .memory import MemoryAccess
from .tcgen05 import Tcgen05
from .wgmma import Wgmma


class Warp(MemoryAccess, Barriers, Copies, Wgmma, Tcgen05):
    """32 lanes. `groups` holds [block, mask or None] for each set of lanes that stand together."""

    def __init__(self, cta, wid, nthreads):
        self.cta, self.cluster, self.machine = cta, cta.cluster, cta.cluster.machine
        self.index = wid
        self.line = 0
        comp = self.cluster.comp
        self.comp = comp
        L = self.cluster.launch
        self.R = [comp.zero[r.storage] for r in comp.kernel.regs]
        alive = np.arange(32) + wid * 32 < nthreads
        self.alive = alive
        self.groups = [[0, None if alive.all() else alive]]
        self.done = False
        self.sleep = False
        self.waiting_barrier = None
        self.cluster_arrivals = self.cluster_waits = 0
        self.bulk_open, self.bulk_groups = [], []
        self.wgmma_open, self.wgmma_groups = [], []
        self.soft_blocked = False
        self.give_false = False
        self.blocked_on = None
        self.param_base = L.param_base
        self.shared_base = np.full(32, cta.rank << 24, u4)
        self.local = None
        self.blocks_run = 0
        bx, by, _bz = L.block
        t = np.arange(32) + wid * 32
        S = self.special = {}

        def f(v):
            return np.full(32, v, u4)

        S["%tid.x"], S["%tid.y"], S["%tid.z"] = (t % bx).astype(u4), (t // bx % by).astype(u4), (t // (bx * by)).astype(u4)
        for k, c in enumerate("xyz"):
            S["%ntid." + c] = f(L.block[k])
            S["%ctaid." + c] = f(cta.ctaid[k])
            S["%nctaid." + c] = f(L.grid[k])
            S["%cluster_nctaid." + c] = f(L.cluster[k])
            S["%cluster_ctaid." + c] = f(cta.ctaid[k] % L.cluster[k])
            S["%clusterid." + c] = f(cta.ctaid[k] // L.cluster[k])
            S["%nclusterid." + c] = f(-(-L.grid[k] // L.cluster[k]))
        S["%laneid"] = LANE.astype(u4)
        S["%warpid"] = f(wid)
        S["%nwarpid"] = f(64)
        S["%cluster_ctarank"] = f(cta.rank)
        S["%cluster_nctarank"] = f(L.cluster[0] * L.cluster[1] * L.cluster[2])
        lin = cta.ctaid[0] + L.grid[0] * (cta.ctaid[1] + L.grid[1] * cta.ctaid[2])
        S["%smid"] = f(lin % self.machine.sms)
        S["%nsmid"] = f(self.machine.sms)
        S["%gridid"] = np.full(32, 1, u8)
        S["%is_explicit_cluster"] = np.full(32, len(self.cluster.ctas) > 1)
        S["%dynamic_smem_size"] = f(L.smem)
        S["%total_smem_size"] = f(L.smem + comp.layout.static_bytes)
        S["%aggr_smem_size"] = f(L.smem + comp.layout.static_bytes)
        S["WARP_SZ"] = f(32)
        one = np.uint64(1)
        l8 = LANE.astype(u8)
        S["%lanemask_eq"] = (one << l8).astype(u4)
        S["%lanemask_lt"] = ((one << l8) - one).astype(u4)
        S["%lanemask_le"] = ((one << (l8 + one)) - one).astype(u4)
        S["%lanemask_gt"] = ~S["%lanemask_le"]
        S["%lanemask_ge"] = ~S["%lanemask_lt"]

    def where(self):
        txt = next((i.text[:110] for b in self.comp.blocks for i in b if i.line == self.line), "")
        return f"kernel {self.comp.kernel.name[:60]} cta {self.cta.ctaid} warp {self.index} line {self.line}: {txt}"

    def run(self, budget):
        comp, R = self.comp, self.R
        full, masked = comp.full, comp.masked
        gs = self.groups
        progress = False
        self.soft_blocked = False
        held = set()
        while budget > 0:
            budget -= 1
            if len(gs) == 1:
                g = gs[0]
            else:
                cand = [x for x in gs if id(x) not in held]
                if not cand:
                    if any(x[0] >= 0 for x in gs) and not self.hardblock:
                        raise SimError(f"lanes of a warp cannot meet at a .sync instruction: {self.where()}")
                    return progress
                g = min(cand, key=lambda x: x[0])
            pc, m = g
            self.blocks_run += 1
            if m is None:
                f = full[pc] or comp.get(pc, False)
                r = f(self, R)
            else:
                f = masked[pc] or comp.get(pc, True)
                r = f(self, R, m)
            if r.__class__ is tuple:
                c, t, n = r
                if m is None:
                    k = np.count_nonzero(c)
                    r = t if k == 32 else n if k == 0 else None
                    if r is None:
                        tm, nm = c, ~c
                else:
                    tm = c & m
                    nm = ~c & m
                    r = t if not nm.any() else n if not tm.any() else None
                if r is None:
                    progress = True
                    gs.remove(g)
                    for pc2, mm in ((t, tm), (n, nm)):
                        self.enter(pc2, mm)
                    if not gs:
                        self.finish()
                        return True
                    continue
            if r >= 0:
                progress = True
                if len(gs) == 1:
                    g[0] = r
                else:
                    gs.remove(g)
                    self.enter(r, m)
                    held.clear()
                if self.sleep:
                    self.sleep = False
                    return progress
                continue
            if r == BLOCK:
                self.hardblock = True
                if len(gs) == 1 or not self.cluster.desperate:
                    return progress
                held.add(id(g))
                continue
            if r == CONV:
                if len(gs) == 1:
                    raise SimError(f".sync instruction names lanes that are not here: {self.where()}")
                self.hardblock = False
                held.add(id(g))
                continue
            if r == EXIT:
                progress = True
                gs.remove(g)
                mm = np.ones(32, bool) if m is None else m
                self.alive = self.alive & ~mm
                if not gs:
                    self.finish()
                    return True
                continue
        return progress

    hardblock = False

    def enter(self, pc, mm):
        if pc == EXIT:
            self.alive = self.alive & ~mm
            return
        for g in self.groups:
            if g[0] == pc:
                mm = mm | (g[1] if g[1] is not None else True)
                self.groups.remove(g)
                break
        self.groups.append([pc, None if mm.all() else mm])

    def finish(self):
        self.done = True
        self.cluster.events += 1
        for gidx in (self.bulk_open, *self.bulk_groups):
            for fn in gidx:
                fn()
        self.bulk_open, self.bulk_groups = [], []

    def missing(self, m, mask):
        """are lanes named by mask (None: all) absent, though alive?"""
        want = self.alive
        if mask is not None:
            mk = int(mask[int(m.argmax())])
            if mk != 0xFFFFFFFF:
                want = want & ((mk >> LANE) & 1).astype(bool)
        return bool((want & ~m).any())

    def trap(self, line):
        self.line = line
        raise SimError(f"trap / assertion: {self.where()}")

    def warn(self, s):
        self.machine.warn(s)

    def clock64(self):
        return np.full(32, self.machine.tick(), u8)
