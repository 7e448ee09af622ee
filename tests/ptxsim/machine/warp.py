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
        self.cta, self.cl, self.m = cta, cta.cl, cta.cl.m
        self.wid = wid
        self.line = 0
        comp = self.cl.comp
        self.comp = comp
        L = self.cl.launch
        self.R = [comp.zero[r.storage] for r in comp.k.regs]
        alive = np.arange(32) + wid * 32 < nthreads
        self.alive = alive
        self.groups = [[0, None if alive.all() else alive]]
        self.full_alive = bool(alive.all())
        self.done = False
        self.sleep = False
        self.waiting_bar = None
        self.cl_arr = self.cl_waits = 0
        self.bulk_open, self.bulk_groups = [], []
        self.wg_open, self.wg_groups = [], []
        self.soft_blocked = False
        self.give_false = False
        self.blocked_on = None
        self.param_base = L.param_base
        self.sbase = u4(cta.rank << 24)
        self.local = None
        self.nblk = 0
        self.state = "run"
        bx, by, _bz = L.block
        t = np.arange(32) + wid * 32
        S = self.sreg = {}

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
        S["%smid"] = f(lin % self.m.sms)
        S["%nsmid"] = f(self.m.sms)
        S["%gridid"] = np.full(32, 1, u8)
        S["%is_explicit_cluster"] = np.full(32, len(self.cl.ctas) > 1)
        S["%dynamic_smem_size"] = f(L.smem)
        S["%total_smem_size"] = f(L.smem + comp.lay.static_bytes)
        S["%aggr_smem_size"] = f(L.smem + comp.lay.static_bytes)
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
        return f"kernel {self.comp.k.name[:60]} cta {self.cta.ctaid} warp {self.wid} line {self.line}: {txt}"

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
            self.nblk += 1
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
                if len(gs) == 1 or not self.cl.desperate:
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
                self.full_alive = False
                if not gs:
                    self.finish()
                    return True
                continue
        return progress

    hardblock = False

    def enter(self, pc, mm):
        if pc == EXIT:
            self.alive = self.alive & ~mm
            self.full_alive = False
            return
        for g in self.groups:
            if g[0] == pc:
                mm = mm | (g[1] if g[1] is not None else True)
                self.groups.remove(g)
                break
        self.groups.append([pc, None if mm.all() else mm])

    def finish(self):
        self.done = True
        self.cl.events += 1
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
        self.m.warn(s)

    def clock64(self):
        return np.full(32, self.m.tick(), u8)
