"""mbarriers, named barriers and cluster barriers."""

import numpy as np

from ..errors import SimError
from ..formats import u8
from .memory import SMEM_BASE


class Mbar:
    """An mbarrier: arrivals expected a phase (`count`), still pending in this one, bytes outstanding (`tx`), phases completed."""

    __slots__ = ("addr", "count", "pend", "phase", "tx")

    def __init__(self, count, addr):
        self.count = self.pend = count
        self.tx = 0
        self.phase = 0
        self.addr = addr

    def check(self, cl):
        """Complete the phase if nothing is outstanding."""
        if self.pend == 0 and self.tx == 0:
            self.phase += 1
            self.pend = self.count
            cl.events += 1

    def __repr__(self):
        return f"mbar@{self.addr:#x}(count {self.count} pending {self.pend} tx {self.tx} phase {self.phase})"


class Bar:
    """A named barrier: threads that have arrived (`n`) of those awaited (`need`), generations completed."""

    __slots__ = ("gen", "n", "need")

    def __init__(self):
        self.n = self.gen = 0
        self.need = None


class Barriers:
    """Part of Warp: arriving at barriers and waiting for them. A wait that must go on returns False or None."""

    def _bid(self, bid, q):
        return int(bid[0] if q is None else bid[int(q.argmax())])

    def _bar(self, bid, cnt, q):
        k = self._bid(bid, q)
        if k > 15:
            raise SimError(f"barrier {k}: {self.where()}")
        b = self.cta.barriers.setdefault(k, Bar())
        need = int(cnt[0 if q is None else int(q.argmax())]) if cnt is not None else len(self.cta.warps) * 32
        if b.n and b.need != need:
            raise SimError(f"barrier {k} used with {need} threads while {b.need} are awaited: {self.where()}")
        b.need = need
        return b, k

    def _bar_in(self, b):
        b.n += 32
        self.cluster.events += 1
        if b.n > b.need:
            raise SimError(f"barrier over-subscribed: {self.where()}")
        if b.n == b.need:
            b.n = 0
            b.gen += 1

    def bar_arrive(self, bid, cnt, q):
        b, _ = self._bar(bid, cnt, q)
        self._bar_in(b)

    def bar_sync(self, bid, cnt, q):
        wb = self.waiting_barrier
        if wb is not None:
            b, gen, k = wb
            if b.gen == gen:
                return False
            self.waiting_barrier = None
            return True
        b, k = self._bar(bid, cnt, q)
        gen = b.gen
        self._bar_in(b)
        if b.gen != gen:
            return True
        self.waiting_barrier = (b, gen, k)
        return False

    def cluster_arrive(self):
        """the k-th arrival of a warp counts for the k-th phase; a phase is complete when every warp has arrived in it"""
        if self.cluster_arrivals > self.cluster_waits:
            self.machine.report(
                "cluster barrier",
                f"barrier.cluster.arrive again before barrier.cluster.wait (undefined in PTX): {self.where()}",
                (self.comp.kernel.name, self.line),
            )
        self.cluster_arrivals += 1
        self.cluster.events += 1

    def cluster_wait(self):
        if self.cluster_waits >= self.cluster_arrivals:
            raise SimError(f"barrier.cluster.wait without arrive: {self.where()}")
        k = self.cluster_waits + 1
        for c in self.cluster.ctas:
            for w in c.warps:
                if w.cluster_arrivals < k and not w.done:
                    return False
        self.cluster_waits = k
        return True

    def _mb(self, addr, what="mbarrier"):
        addr = int(addr)
        cta = self.cluster.ctas[addr >> 24] if len(self.cluster.ctas) > 1 else self.cta
        b = cta.mbars.get(addr & 0xFFFFFF)
        if b is None:
            raise SimError(f"{what} on an uninitialised mbarrier at {addr:#x}: {self.where()}")
        return b

    def _lanes(self, q):
        return range(32) if q is None else np.nonzero(q)[0]

    def mbar_init(self, addr, cnt, q):
        for lane in self._lanes(q):
            a = int(addr[lane]) & 0xFFFFFF
            if a % 8 or a < SMEM_BASE or a + 8 > self.cluster.launch.smem_end:
                raise SimError(f"mbarrier.init address {a:#x}: {self.where()}")
            self.cta.mbars[a] = Mbar(int(cnt[lane]), a)
            self.cta.shared[8][a >> 3] = 0
        self.cluster.events += 1

    def mbar_inval(self, addr, q):
        for lane in self._lanes(q):
            self.cta.mbars.pop(int(addr[lane]) & 0xFFFFFF, None)

    def mbar_arrive(self, addr, cnt, tx, drop, q):
        out = np.zeros(32, u8)
        for lane in self._lanes(q):
            b = self._mb(addr[lane], "arrive")
            out[lane] = b.phase
            if tx is not None:
                b.tx += int(tx[lane])
            n = 1 if cnt is None else int(cnt[lane])
            if n > b.pend:
                raise SimError(f"too many arrivals on {b}: {self.where()}")
            b.pend -= n
            if drop:
                b.count -= 1
            b.check(self.cluster)
        self.cluster.events += 1
        return out

    def mbar_tx(self, addr, n, q):
        for lane in self._lanes(q):
            b = self._mb(addr[lane], "expect_tx")
            b.tx += int(n[lane])
            b.check(self.cluster)

    def mbar_wait(self, addr, st, par, may_wait, q):
        lanes = self._lanes(q)
        a0 = addr[lanes[0]]
        res = np.zeros(32, bool)
        if not ((addr if q is None else addr[q]) == a0).all():
            ok = True
            for lane in lanes:
                b = self._mb(addr[lane], "wait")
                res[lane] = ((b.phase & 1) != (int(st[lane]) & 1)) if par else b.phase != int(st[lane])
                ok = ok and res[lane]
        else:
            b = self._mb(a0, "wait")
            r = b.phase & 1 != st & 1 if par else b.phase != st
            res = r if q is None else (r & q)
            ok = bool(r.all() if q is None else r[q].all())
        if ok or not may_wait:
            if not ok:
                self.sleep = True
            self.soft_blocked = False
            self.blocked_on = None
            return res
        if self.give_false:
            self.give_false = False
            return res
        self.soft_blocked = True
        self.blocked_on = (b, int(st[lanes[0]]))
        return None

    def cpasync_arrive(self, addr, noinc, q):
        for lane in self._lanes(q):
            b = self._mb(addr[lane], "cp.async.mbarrier.arrive")
            if not noinc:
                b.pend += 1
            b.pend -= 1
            b.check(self.cluster)
        self.cluster.events += 1
