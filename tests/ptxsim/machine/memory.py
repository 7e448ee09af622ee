"""Host memory as kernels see it, and a warp's loads and stores."""

import bisect
import ctypes

import numpy as np

from .. import ops
from ..errors import SimError
from ..formats import f4, f8, i4, i8, u1, u2, u4, u8
from ..ops import LANE, LOCAL_WIN, SHARED_WIN

SMEM_BASE = 1024  # the system's own share stands before it
SMEM_BYTES = SMEM_BASE + 232448 + 1024
HOST_BASE = 4096


def _host_view():
    """All of the process's address space as bytes, from HOST_BASE on."""
    buf = (ctypes.c_uint8 * (1 << 47)).from_address(HOST_BASE)
    return np.frombuffer(buf, dtype=u1)


HOST_BYTES = _host_view()


HOST_VIEWS = {1: HOST_BYTES, 2: HOST_BYTES.view(u2), 4: HOST_BYTES.view(u4), 8: HOST_BYTES.view(u8), 16: HOST_BYTES.view(u4).reshape(-1, 4)}


SIZE_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


UINT_OF_SIZE = {1: u1, 2: u2, 4: u4, 8: u8}


class Memory:
    """Host memory with a table of what kernels may touch."""

    def __init__(self):
        self.check = True
        self.static = []
        self.watched = []  # (start, end, for each byte whether it was written)
        self.set([])

    def set(self, ranges):
        r = sorted(set(list(ranges) + self.static))
        merged = []
        for s, e in r:
            if merged and s <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], e)
            else:
                merged.append([s, e])
        self.starts = [x[0] for x in merged]
        self.ends = [x[1] for x in merged]
        self.cached_start, self.cached_end = 1, 0

    def inside(self, lo, hi):
        k = bisect.bisect_right(self.starts, lo) - 1
        if k >= 0 and hi <= self.ends[k]:
            self.cached_start, self.cached_end = self.starts[k], self.ends[k]
            return True
        return False

    def verify(self, w, addr, n, q, what):
        a = addr if q is None else addr[q]
        lo, hi = int(a.min()), int(a.max()) + n
        if lo >= self.cached_start and hi <= self.cached_end:
            pass
        elif self.check and not self.inside(lo, hi):
            for lane, x in enumerate(addr):
                if q is not None and not q[lane]:
                    continue
                if not self.inside(int(x), int(x) + n):
                    raise SimError(f"{what} of {n} bytes out of bounds at {int(x):#x}, lane {lane}: {w.where()}")
        if (a & u8((n & -n) - 1)).any():
            raise SimError(f"misaligned {what} of {n} bytes: {w.where()}")
        if self.watched:
            if what != "global store":
                self.read(a, n, w.where)
            if what != "global load":
                self.wrote(a, n)

    def watch(self, start, size):
        self.watched.append((start, start + size, np.zeros(size, bool)))

    def _watched(self, addr, n):
        """For every watched range that has some of the n bytes at each address: its start, its flags, where in them those bytes are."""
        for start, end, written in self.watched:
            places = (np.asarray(addr, u8).reshape(-1, 1) + np.arange(n, dtype=u8)).astype(i8) - start
            places = places[(places >= 0) & (places < end - start)]
            if places.size:
                yield start, written, places

    def read(self, addr, n, where):
        """where: a function"""
        for start, written, places in self._watched(addr, n):
            fresh = places[~written[places]]
            if fresh.size:
                raise SimError(f"read of {fresh.size} bytes that nobody wrote, the first at {start + int(fresh[0]):#x}: {where()}")

    def wrote(self, addr, n):
        for _, written, places in self._watched(addr, n):
            written[places] = True


def reduce_into(g, x, red, ty):
    """g (uint8 view) op= x"""
    t = {"f32": f4, "s32": i4, "u32": u4, "u64": u8, "s64": i8, "b32": u4, "b64": u8, "f64": f8}.get(ty)
    f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[red]
    if t is not None:
        v = g.view(t)
        v[...] = f(v, np.ascontiguousarray(x).view(t))
        return
    a, b = ops.unh(g.copy().view(u2), ty), ops.unh(np.ascontiguousarray(x).view(u2), ty)
    g.view(u2)[...] = ops.toh(f(a, b), ty, 2)


class MemoryAccess:
    """Part of Warp: loads, stores and atomics of all spaces, with their checks."""

    def fence_proxy(self):
        self.cluster.clock += 1
        for c in self.cluster.ctas:
            c.fenced_at[self.index + (32 if c is not self.cta else 0)] = self.cluster.clock

    def generic_write(self, cta, off):
        """generic-proxy store to shared memory; off: byte offsets"""
        self.cluster.clock += 1
        c = off >> 4
        cta.written_at[c] = self.cluster.clock
        cta.written_by[c] = self.index + (32 if cta is not self.cta else 0)

    def async_read(self, cta, chunks):
        """asynchronous proxy reads these 16-byte chunks: their last generic writer, or the warp that issues the reading
        operation, must have executed fence.proxy.async since"""
        t = cta.written_at[chunks]
        bad = (t > cta.fenced_at[cta.written_by[chunks]]) & (t > cta.fenced_at[self.index])
        if bad.any() and self.machine.relay_fences:  # a third warp may have waited for the writer and fenced on its behalf
            bad &= t > cta.fenced_at.max()
        if bad.any():
            self.machine.report(
                "proxy",
                f"shared memory written by warp {int(cta.written_by[chunks][bad].flat[0])} is read by an asynchronous "
                f"operation without fence.proxy.async in between: {self.where()}",
                (self.comp.kernel.name, "proxy"),
            )

    def ldparam(self, off, sz, n):
        key = (off, sz, n)
        c = self.cluster.launch.param_cache
        r = c.get(key)
        if r is None:
            raw = self.cluster.launch.param_raw
            r = [np.full(32, raw[off + sz * j : off + sz * (j + 1)].view(UINT_OF_SIZE[sz])[0], UINT_OF_SIZE[sz]) for j in range(n)]
            c[key] = r
        return r

    def _sm(self, addr, q, nb, what):
        """-> (cta, offsets) for shared addresses"""
        a = addr if q is None else np.where(q, addr, addr[int(q.argmax())])
        r = int(a[0]) >> 24
        if len(self.cluster.ctas) == 1:
            cta, off = self.cta, a
            if int(a.max()) + nb > SMEM_BYTES:
                raise SimError(f"shared {what} out of bounds at {int(a.max()):#x}: {self.where()}")
        else:
            if ((a >> 24) != r).any() or r >= len(self.cluster.ctas):
                raise SimError(f"shared::cluster {what} over several CTAs in one instruction: {self.where()}")
            cta, off = self.cluster.ctas[r], a & 0xFFFFFF
            if int(off.max()) + nb > SMEM_BYTES:
                raise SimError(f"shared {what} out of bounds: {self.where()}")
        lim = self.cluster.launch.smem_end
        if int(off.max()) + nb > lim or int(off.min()) < SMEM_BASE:
            raise SimError(f"shared {what} outside the CTA's {lim - SMEM_BASE} bytes at {int(off.max()):#x}: {self.where()}")
        if (off & u4((nb & -nb) - 1)).any():
            raise SimError(f"misaligned shared {what} of {nb} bytes: {self.where()}")
        return cta, off

    def ld_shared(self, addr, sz, n, q):
        nb = sz * n
        cta, off = self._sm(addr, q, nb, "load")
        if n == 1:
            return (cta.shared[sz].take(off >> SIZE_SHIFT[sz]),)
        if nb == 16:
            v = cta.shared[16][off >> 4]
            if sz == 4:
                return v.T.copy()
            return np.ascontiguousarray(v).view(UINT_OF_SIZE[sz]).T.copy()
        base = off >> SIZE_SHIFT[sz]
        return [cta.shared[sz].take(base + j) for j in range(n)]

    def st_shared(self, addr, sz, vals, q):
        n = len(vals)
        cta, off = self._sm(addr, q, sz * n, "store")
        self.cluster.events += 1
        self.generic_write(cta, off if q is None else off[q])
        if sz * n > 16:
            self.generic_write(cta, (off if q is None else off[q]) + 16)
        base = off >> SIZE_SHIFT[sz]
        if q is None:
            if sz * n == 16 and sz == 4:
                cta.shared[16][off >> 4] = np.stack(vals, 1)
                return
            for j, v in enumerate(vals):
                cta.shared[sz][base + j] = v
        else:
            for j, v in enumerate(vals):
                cta.shared[sz][base[q] + j] = v[q]

    def ld_global(self, addr, sz, n, q):
        nb = sz * n
        self.machine.mem.verify(self, addr, nb, q, "global load")
        a = addr if q is None else np.where(q, addr, addr[int(q.argmax())])
        base = ((a - u8(HOST_BASE)) >> u8(SIZE_SHIFT[sz])).astype(i8)
        if n == 1:
            return (HOST_VIEWS[sz].take(base),)
        return [HOST_VIEWS[sz].take(base + j) for j in range(n)]

    def st_global(self, addr, sz, vals, q):
        n = len(vals)
        self.machine.mem.verify(self, addr, sz * n, q, "global store")
        self.cluster.events += 1
        base = ((addr - u8(HOST_BASE)) >> u8(SIZE_SHIFT[sz])).astype(i8)
        g = HOST_VIEWS[sz]
        if q is None:
            for j, v in enumerate(vals):
                g[base + j] = v
        else:
            b = base[q]
            for j, v in enumerate(vals):
                g[b + j] = v[q]

    def _local(self):
        if self.local is None:
            self.local = np.zeros((32, max(16, self.comp.layout.local_bytes)), u1)
        return self.local

    def ld_local(self, addr, sz, n, q):
        L = self._local().view(UINT_OF_SIZE[sz])
        a = (addr.astype(i8) if q is None else np.where(q, addr, u8(0)).astype(i8)) // sz
        return [L[LANE, a + j] for j in range(n)]

    def st_local(self, addr, sz, vals, q):
        L = self._local().view(UINT_OF_SIZE[sz])
        a = addr.astype(i8) // sz
        for j, v in enumerate(vals):
            if q is None:
                L[LANE, a + j] = v
            else:
                L[LANE[q], a[q] + j] = v[q]

    def _kind(self, addr, q):
        a = int(addr[0] if q is None else addr[int(q.argmax())])
        return "s" if SHARED_WIN <= a < LOCAL_WIN else "l" if a >= LOCAL_WIN else "g"

    def ld_generic(self, addr, sz, n, q):
        if addr.dtype != u8:
            addr = addr.astype(u8)
        k = self._kind(addr, q)
        if k == "g":
            return self.ld_global(addr, sz, n, q)
        if k == "s":
            return self.ld_shared((addr & u8(0xFFFFFFFF)).astype(u4), sz, n, q)
        return self.ld_local(addr - u8(LOCAL_WIN), sz, n, q)

    def st_generic(self, addr, sz, vals, q):
        k = self._kind(addr, q)
        if k == "g":
            return self.st_global(addr, sz, vals, q)
        if k == "s":
            return self.st_shared((addr & u8(0xFFFFFFFF)).astype(u4), sz, vals, q)
        return self.st_local(addr - u8(LOCAL_WIN), sz, vals, q)

    def atomic(self, addr, op, ty, vals, cmp_, q):
        sh = self._kind(addr, q) == "s"
        sz = {"2": 2, "4": 4, "8": 8}[str(vals[0].dtype.itemsize)]
        n = len(vals)
        if sh:
            cta, off = self._sm((addr & u8(0xFFFFFFFF)).astype(u4), q, sz * n, "atomic")
            arr, idx = cta.shared[sz], (off >> SIZE_SHIFT[sz]).astype(i8)
        else:
            self.machine.mem.verify(self, addr, sz * n, q, "atomic")
            arr, idx = HOST_VIEWS[sz], ((addr - u8(HOST_BASE)) >> u8(SIZE_SHIFT[sz])).astype(i8)
        self.cluster.events += 1
        nt = {"s32": i4, "u32": u4, "b32": u4, "f32": f4, "u64": u8, "s64": i8, "b64": u8, "f64": f8}.get(ty)
        old = [np.zeros(32, vals[0].dtype) for _ in range(n)]
        for lane in range(32) if q is None else np.nonzero(q)[0]:
            for j in range(n):
                k = int(idx[lane]) + j
                o = arr[k]
                old[j][lane] = o
                v = vals[j][lane]
                if ty in ("f16x2", "bf16x2", "f16", "bf16"):
                    h = "bf16" if "bf" in ty else "f16"
                    a = ops.unh(np.array([o]), h)
                    b = ops.unh(np.array([v]), h)
                    r = {"add": np.add, "min": np.fmin, "max": np.fmax}[op](a, b)
                    arr[k] = ops.toh(r, h, sz)[0]
                    continue
                ov, vv = np.array([o]).view(nt)[0], np.array([v]).view(nt)[0]
                if op == "add":
                    r = np.add(ov, vv, dtype=nt)
                elif op == "exch":
                    r = vv
                elif op == "cas":
                    # operands: [a], b (compare), c (new): vals holds b, cmp_ holds c
                    r = np.array([cmp_[lane]]).view(nt)[0] if ov == vv else ov
                elif op == "min":
                    r = min(ov, vv)
                elif op == "max":
                    r = max(ov, vv)
                elif op == "and":
                    r = ov & vv
                elif op == "or":
                    r = ov | vv
                elif op == "xor":
                    r = ov ^ vv
                elif op == "inc":
                    r = nt(0) if ov >= vv else nt(ov + nt(1))
                else:
                    r = vv if (ov == 0 or ov > vv) else nt(ov - nt(1))
                arr[k] = np.array([r], nt).view(arr.dtype)[0]
        return old

    def ldmatrix(self, addr, n, trans):
        cta, off = self._sm(addr, None if n == 4 else 8 * n > LANE, 16, "ldmatrix")
        rows = cta.shared[16][off[: 8 * n] >> 4]  # [8n, 4]
        m = np.ascontiguousarray(rows).view(u2).reshape(n, 8, 8)
        if trans:
            m = m.transpose(0, 2, 1)
        return np.ascontiguousarray(m).view(u4).reshape(n, 32)

    def stmatrix(self, addr, vals, trans):
        n = len(vals)
        cta, off = self._sm(addr, None if n == 4 else 8 * n > LANE, 16, "stmatrix")
        m = np.stack([np.ascontiguousarray(v).view(u2).reshape(8, 8) for v in vals])
        if trans:
            m = m.transpose(0, 2, 1)
        cta.shared[16][off[: 8 * n] >> 4] = np.ascontiguousarray(m).view(u4).reshape(8 * n, 4)
        self.generic_write(cta, off[: 8 * n])
        self.cluster.events += 1
