"""Asynchronous copies: cp.async, bulk and tensor copies, st.async, cluster launch control."""

import numpy as np

from .. import ops
from ..errors import SimError
from ..formats import u4
from .memory import HOST_BASE, HOST_BYTES, SMEM_BASE, reduce_into


class Copies:
    """Part of Warp: copies are run when issued (eager) or queued for the scheduler (lazy, random)."""

    def st_async(self, addr, sz, vals, bar, q):
        for lane in self._lanes(q):
            v = np.array([x[lane] for x in vals])

            def fn(a=int(addr[lane]), b=int(bar[lane]), v=v):
                cta = self._ctas_of(a)
                o = (a & 0xFFFFFF) // sz
                cta.shared[sz][o : o + len(v)] = v
                self._complete(b, sz * len(v))

            self.defer(fn, "st.async")

    def cp_async(self, dst, src, sz, srcsz, q):
        cta, off = self._sm(dst, q, sz, "cp.async")
        self.generic_write(cta, off if q is None else off[q])
        for lane in self._lanes(q):
            n = sz if srcsz is None else int(srcsz[lane])
            d = int(off[lane])
            if n:
                a = int(src[lane])
                if self.machine.mem.check and not self.machine.mem.inside(a, a + n):
                    raise SimError(f"cp.async out of bounds at {a:#x}: {self.where()}")
                self.machine.mem.read(a, n, self.where)
                cta.shared[1][d : d + n] = HOST_BYTES[a - HOST_BASE : a - HOST_BASE + n]
            if n < sz:
                cta.shared[1][d + n : d + sz] = 0

    def defer(self, fn, kind):
        """TMA-style operation: run now (eager) or later (lazy/random)"""
        if self.machine.order == "eager":
            fn()
        else:
            self.cluster.async_queue.append(fn)

    def bulk_commit(self):
        if self.machine.order != "eager":
            self.bulk_groups.append(self.bulk_open)
            self.bulk_open = []

    def bulk_wait(self, n):
        if self.machine.order != "eager":
            while len(self.bulk_groups) > n:
                for fn in self.bulk_groups.pop(0):
                    fn()

    def store_async(self, fn):
        if self.machine.order == "eager":
            fn()
        else:
            self.bulk_open.append(fn)

    def _ctas_of(self, addr):
        return self.cluster.ctas[addr >> 24] if len(self.cluster.ctas) > 1 else self.cta

    def _complete(self, bar_addr, n):
        b = self._mb(bar_addr, "complete_tx")
        b.tx -= n
        b.check(self.cluster)
        self.cluster.events += 1

    def tma_load(self, dst, desc, co, bar, mc, g2, q):
        for lane in self._lanes(q):
            d, ds, c, ba = int(dst[lane]), int(desc[lane]), [int(x[lane]) for x in co], int(bar[lane])
            masks = None if mc is None else int(mc[lane])
            tm = self.machine.tensor_map(ds, self)
            where = self.where()
            self.defer(lambda d=d, tm=tm, c=c, ba=ba, masks=masks, where=where: self._tma_load(d, tm, c, ba, masks, where), "tma")

    def _tma_load(self, d, tm, c, ba, masks, where, gather=False):
        data = (
            np.concatenate([tm.read([c[0], r], self.machine.mem, where) for r in c[1:]]) if gather else tm.read(c, self.machine.mem, where)
        )  # [n16, 4] u4, dense box order
        n = data.shape[0]
        targets = (
            [(d, ba)]
            if masks is None
            else [((r << 24) | (d & 0xFFFFFF), (r << 24) | (ba & 0xFFFFFF)) for r in range(len(self.cluster.ctas)) if masks >> r & 1]
        )
        for dd, bb in targets:
            cta = self._ctas_of(dd)
            off = dd & 0xFFFFFF
            if off % 128 or off < SMEM_BASE or off + n * 16 > self.cluster.launch.smem_end:
                raise SimError(f"TMA destination {off:#x} ({n * 16} bytes): {where}")
            idx = ops.swizzle(np.arange(n) + (off >> 4), tm.swz)
            cta.shared[16][idx] = data
            self._complete(bb, n * 16)

    def tma_store(self, desc, co, src, red, q, scatter=False):
        for lane in self._lanes(q):
            s, ds, c = int(src[lane]) & 0xFFFFFF, int(desc[lane]), [int(x[lane]) for x in co]
            tm = self.machine.tensor_map(ds, self)
            where = self.where()

            def fn(s=s, tm=tm, c=c, where=where):
                n = tm.box_bytes // 16 * (4 if scatter else 1)
                if s + n * 16 > self.cluster.launch.smem_end:
                    raise SimError(f"TMA store source {s:#x}: {where}")
                idx = ops.swizzle(np.arange(n) + (s >> 4), tm.swz)
                self.async_read(self.cta, idx)
                x = self.cta.shared[16][idx]
                if scatter:
                    for k in range(4):
                        tm.write([c[0], c[1 + k]], x[n // 4 * k : n // 4 * (k + 1)], red, self.machine.mem, where)
                else:
                    tm.write(c, x, red, self.machine.mem, where)
                self.cluster.events += 1

            self.store_async(fn)

    def tma_gather4(self, dst, desc, co, bar, mc, g2, q):
        """four rows of a 2d map (box of one row), one after the other in shared memory"""
        for lane in self._lanes(q):
            d, c, ba = int(dst[lane]), [int(x[lane]) for x in co], int(bar[lane])
            masks = None if mc is None else int(mc[lane])
            tm = self.machine.tensor_map(int(desc[lane]), self)
            if tm.rank != 2 or tm.rows != 1 or len(c) != 5:
                raise SimError(f"gather4 needs a 2d map with a box of one row and five coordinates: {self.where()}")
            where = self.where()
            self.defer(lambda d=d, tm=tm, c=c, ba=ba, masks=masks, where=where: self._tma_load(d, tm, c, ba, masks, where, True), "tma")

    def bulk_g2s(self, dst, src, size, bar, mc, q):
        for lane in self._lanes(q):
            d, s, n, ba = int(dst[lane]), int(src[lane]), int(size[lane]), int(bar[lane])
            where = self.where()

            def fn(d=d, s=s, n=n, ba=ba, mm=None if mc is None else int(mc[lane]), where=where):
                if self.machine.mem.check and not self.machine.mem.inside(s, s + n):
                    raise SimError(f"bulk copy out of bounds: {where}")
                self.machine.mem.read(s, n, lambda: where)
                for r in [None] if mm is None else [r for r in range(len(self.cluster.ctas)) if mm >> r & 1]:
                    dd, bb = (d, ba) if r is None else ((r << 24) | (d & 0xFFFFFF), (r << 24) | (ba & 0xFFFFFF))
                    o = dd & 0xFFFFFF
                    self._ctas_of(dd).shared[1][o : o + n] = HOST_BYTES[s - HOST_BASE : s - HOST_BASE + n]
                    self._complete(bb, n)

            self.defer(fn, "bulk")

    def bulk_s2s(self, dst, src, size, bar, q):
        for lane in self._lanes(q):
            d, s, n, ba = int(dst[lane]), int(src[lane]), int(size[lane]), int(bar[lane])

            def fn(d=d, s=s, n=n, ba=ba):
                o, so = d & 0xFFFFFF, s & 0xFFFFFF
                self.async_read(self.cta, np.arange(so >> 4, (so + n) >> 4))
                self._ctas_of(d).shared[1][o : o + n] = self.cta.shared[1][so : so + n]
                self._complete(ba, n)

            self.defer(fn, "bulk")

    def bulk_s2g(self, dst, src, size, red, ty, q):
        for lane in self._lanes(q):
            d, s, n = int(dst[lane]), int(src[lane]) & 0xFFFFFF, int(size[lane])
            where = self.where()

            def fn(d=d, s=s, n=n, where=where):
                if self.machine.mem.check and not self.machine.mem.inside(d, d + n):
                    raise SimError(f"bulk store out of bounds: {where}")
                if red is not None:
                    self.machine.mem.read(d, n, lambda: where)
                self.machine.mem.wrote(d, n)
                g = HOST_BYTES[d - HOST_BASE : d - HOST_BASE + n]
                x = self.cta.shared[1][s : s + n]
                self.async_read(self.cta, np.arange(s >> 4, (s + n) >> 4))
                if red is None:
                    g[:] = x
                else:
                    reduce_into(g, x, red, ty)
                self.cluster.events += 1

            self.store_async(fn)

    def clc_try(self, addr, bar, mc, q):
        for lane in self._lanes(q):
            a, ba = int(addr[lane]), int(bar[lane])
            nxt = self.machine.steal()

            def fn(a=a, ba=ba, nxt=nxt):
                r = np.array([*nxt, 1] if nxt is not None else [0, 0, 0, 0], u4)
                for k in range(len(self.cluster.ctas)) if mc else [None]:
                    aa, bb = (a, ba) if k is None else ((k << 24) | (a & 0xFFFFFF), (k << 24) | (ba & 0xFFFFFF))
                    self._ctas_of(aa).shared[16][(aa & 0xFFFFFF) >> 4] = r
                    self._complete(bb, 16)

            self.defer(fn, "clc")
