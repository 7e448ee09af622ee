"""Blackwell's tensor memory and MMAs."""

import numpy as np

from .. import ops
from ..errors import SimError
from ..formats import DEC, EBYTES, f2, f4, u1, u2, u4
from ..ops import LANE

_tm_cache = {}


class Tcgen05:
    """Part of Warp: tensor memory, its loads, stores, copies and products."""

    def tmem_alloc(self, addr, ncols, cg):
        n = int(ncols[0])
        if n < 32 or n > 512 or n & (n - 1):
            raise SimError(f"tcgen05.alloc of {n} columns: {self.where()}")
        ctas = [self.cta]
        for cta in ctas:
            u = cta.tmem_used
            for c in range(0, 512 - n + 1, 32):
                if not u[c : c + n].any():
                    break
            else:
                raise SimError(f"tensor memory exhausted: {self.where()}")
            u[c : c + n] = True
            cta.tmem_allocs[c] = n
            c0, off = self._sm(addr, None, 4, "tcgen05.alloc")
            c0.shared[4][int(off[0]) >> 2] = c
        self.cluster.events += 1

    def tmem_dealloc(self, taddr, ncols, cg):
        c = int(taddr[0]) & 0xFFFF
        n = self.cta.tmem_allocs.pop(c, None)
        if n != int(ncols[0]):
            raise SimError(f"tcgen05.dealloc of {int(ncols[0])} columns at {c}, allocated {n}: {self.where()}")
        self.cta.tmem_used[c : c + n] = False

    def _tcheck(self, col, n, what):
        if col + n > 512 or not self.cta.tmem_used[col : col + n].all():
            raise SimError(f"{what}: tensor memory columns {col}..{col + n - 1} are not allocated: {self.where()}")

    def _tm_map(self, shape, n, half=0):
        """-> rows [R,32], cols [R,32] relative, for the R registers of each thread"""
        key = (shape, n, half)
        r = _tm_cache.get(key)
        if r is None:
            t = LANE
            rows, cols = [], []
            if shape == "32x32b":
                for j in range(n):
                    rows.append(t)
                    cols.append(np.full(32, j))
            elif shape == "16x256b":
                for j in range(n):
                    for h in range(2):
                        for e in range(2):
                            rows.append(t // 4 + 8 * h)
                            cols.append(8 * j + (t % 4) * 2 + e)
            elif shape == "16x128b":
                for j in range(n):
                    for h in range(2):
                        rows.append(t // 4 + 8 * h)
                        cols.append(4 * j + t % 4)
            elif shape == "16x64b":
                for j in range(n):
                    rows.append(t // 4 + 8 * (t % 2))
                    cols.append(2 * j + (t // 2) % 2)
            elif shape == "16x32bx2":
                for j in range(n):
                    rows.append(t % 16)
                    cols.append(j + (t // 16) * half)
            else:
                raise SimError(f"unsupported instruction: tcgen05 shape {shape}: {self.where()}")
            r = _tm_cache[key] = (np.stack(rows), np.stack(cols))
        return r

    def tmem_ld(self, taddr, shape, n, pack, half):
        ta = int(taddr[0])
        row0, col0 = ta >> 16, ta & 0xFFFF
        T = self.cta.get_tmem()
        sub = (self.index % 4) * 32
        if not (sub <= row0 < sub + 32):
            raise SimError(f"tcgen05.ld of lane {row0} by warp {self.index} (may read {sub}..{sub + 31}): {self.where()}")
        if pack:
            raise SimError(f"unsupported instruction: pack::16b: {self.where()}")
        if shape == "32x32b":
            self._tcheck(col0, n, "tcgen05.ld")
            return T[row0 : row0 + 32, col0 : col0 + n].T.copy()
        rows, cols = self._tm_map(shape, n, half)
        self._tcheck(col0, int(cols.max()) + 1, "tcgen05.ld")
        return T[rows + row0, cols + col0]

    def tmem_st(self, taddr, shape, n, vals, pack, half):
        ta = int(taddr[0])
        row0, col0 = ta >> 16, ta & 0xFFFF
        T = self.cta.get_tmem()
        sub = (self.index % 4) * 32
        if not (sub <= row0 < sub + 32):
            raise SimError(f"tcgen05.st of lane {row0} by warp {self.index}: {self.where()}")
        if pack:
            raise SimError(f"unsupported instruction: unpack::16b: {self.where()}")
        v = np.stack(vals)
        if shape == "32x32b":
            self._tcheck(col0, n, "tcgen05.st")
            T[row0 : row0 + 32, col0 : col0 + n] = v.T
        else:
            rows, cols = self._tm_map(shape, n, half)
            self._tcheck(col0, int(cols.max()) + 1, "tcgen05.st")
            T[rows + row0, cols + col0] = v
        self.cluster.events += 1

    def tc_issue(self, fn):
        if self.machine.order == "eager":
            fn()
        else:
            self.cta.tensor_queue.append(fn)

    def tc_commit(self, addr, mc, cg, q):
        for lane in self._lanes(q):
            a = int(addr[lane])
            if mc is None:
                targets = [a if len(self.cluster.ctas) == 1 or a >> 24 else (int(self.shared_base[0]) | a)]
            else:
                mk = int(mc[lane])
                targets = [(r << 24) | (a & 0xFFFFFF) for r in range(len(self.cluster.ctas)) if mk >> r & 1]

            def fn(targets=targets):
                for x in targets:
                    b = self._mb(x, "tcgen05.commit")
                    if b.pend < 1:
                        raise SimError(f"too many arrivals on {b}: {self.where()}")
                    b.pend -= 1
                    b.check(self.cluster)
                self.cluster.events += 1

            self.tc_issue(fn)

    def tc_cp(self, taddr, desc, mods, cg, q):
        shape = next(x for x in mods if "x" in x and x.endswith("b"))
        mult = next((x for x in mods if x.startswith("warpx")), None)
        if any(x.startswith("b") for x in mods):
            raise SimError(f"unsupported instruction: tcgen05.cp with decompression: {self.where()}")
        rows, bits = (int(x) for x in shape[:-1].split("x"))
        place = {
            None: [(0, 0, rows)],
            "warpx4": [(32 * k, 0, 32) for k in range(4)],
            "warpx2::02_13": [(0, 0, 32), (64, 0, 32), (32, 32, 32), (96, 32, 32)],
            "warpx2::01_23": [(0, 0, 32), (32, 0, 32), (64, 32, 32), (96, 32, 32)],
        }[mult]
        for lane in self._lanes(q):
            d, ds, line = int(taddr[lane]), int(desc[lane]), self.line

            def fn(d=d, ds=ds, line=line):
                self.line = line
                pair = [self.cta] if cg == 1 else [self.cluster.ctas[self.cta.rank & ~1], self.cluster.ctas[self.cta.rank | 1]]
                for cta in pair:
                    base, lbo, sbo, s = self._desc100(ds)
                    n = max(rows, 8)
                    idx = ops.swizzle(ops.rel_chunks(s, False, n, bits // 8, lbo, sbo, 1)[:rows] + base, s)
                    self.async_read(cta, idx)
                    x = np.ascontiguousarray(cta.shared[16][idx]).reshape(rows, bits // 32)
                    r0, c0 = d >> 16, d & 0xFFFF
                    self._tcheck(c0, bits // 32, "tcgen05.cp")
                    T = cta.get_tmem()
                    for dst, src, k in place:
                        T[r0 + dst : r0 + dst + k, c0 : c0 + bits // 32] = x[src : src + k]
                self.cluster.events += 1

            self.tc_issue(fn)

    def _desc100(self, desc):
        lay = (desc >> 61) & 7
        s = {0: 0, 2: 3, 4: 2, 6: 1, 1: 4}.get(lay)
        if s is None:
            raise SimError(f"tcgen05 descriptor layout {lay}: {self.where()}")
        if (desc >> 46) & 7 != 1:
            raise SimError(f"tcgen05 descriptor version bits are not 001 ({desc:#x}): {self.where()}")
        if (desc >> 49) & 15:
            raise SimError(f"descriptor base offset: {self.where()}")
        return desc & 0x3FFF, (desc >> 16) & 0x3FFF, (desc >> 32) & 0x3FFF, s

    def _opnd100(self, cta, desc, trans, rows, K, ty, es):
        base, lbo, sbo, s = self._desc100(desc)
        rel = ops.rel_chunks(s, trans, rows, K * es, lbo, sbo, es)
        return self._gather(cta, rel, base, s, trans, ty, es)

    def tc_mma(self, D, A, B, idesc, en, ts, kind, cg, ws, dis, q):
        for lane in self._lanes(q):
            args = (
                int(D[lane]),
                int(A[lane]),
                int(B[lane]),
                int(idesc[lane]),
                bool(en[lane]),
                ts,
                kind,
                cg,
                ws,
                None if dis is None else [int(x[lane]) for x in dis],
                self.line,
            )
            self.tc_issue(lambda args=args: self._tc_mma(*args))

    def _tc_mma(self, d, a, b, idesc, en, ts, kind, cg, ws, dis, line):
        self.line = line
        N = ((idesc >> 17) & 63) * 8
        M = ((idesc >> 24) & 31) * 16
        at, bt = (idesc >> 7) & 7, (idesc >> 10) & 7
        if kind == "f16":
            tt = {0: "f16", 1: "bf16"}
        elif kind == "f8f6f4":
            tt = {0: "e4m3", 1: "e5m2"}
        else:
            tt = {2: "tf32"}
        if at not in tt or bt not in tt:
            raise SimError(f"unsupported instruction: tcgen05.mma types {at},{bt} kind {kind}: {self.where()}")
        at, bt = tt[at], tt[bt]
        es = EBYTES[at]
        K = 32 // es
        dfmt = (idesc >> 4) & 3
        if idesc & 7 or dfmt not in (0, 1):
            raise SimError(f"unsupported instruction: tcgen05.mma idesc {idesc:#x}: {self.where()}")
        ta, tb = (idesc >> 15) & 1, (idesc >> 16) & 1
        sgn = -1.0 if ((idesc >> 13) ^ (idesc >> 14)) & 1 else 1.0
        if dis is not None and any(dis):
            raise SimError(f"unsupported instruction: disable-output-lane: {self.where()}")
        if cg == 1:
            self._mma_part(self.cta, M, N, K, d, a, b, at, bt, es, ta, tb, ts, ws, dfmt, en, sgn)
        else:
            pair = [self.cluster.ctas[self.cta.rank & ~1], self.cluster.ctas[self.cta.rank | 1]]
            if ws or M not in (128, 256):
                raise SimError(f"unsupported instruction: cta_group::2 M={M}: {self.where()}")
            bm = np.concatenate([self._opnd100(c, b, tb, N // 2, K, bt, es) for c in pair])
            for c in pair:
                self._mma_part(c, M // 2, N, K, d, a, b, at, bt, es, ta, tb, ts, ws, dfmt, en, sgn, bm, M == 128)

    def _mma_part(self, cta, M, N, K, d, a, b, at, bt, es, ta, tb, ts, ws, dfmt, en, sgn, bm=None, split=False):
        T = cta.get_tmem()
        if M not in (32, 64, 128) or (M == 32 and not ws) or N % 8 or not 8 <= N <= 256:
            raise SimError(f"tcgen05.mma M={M} N={N}: {self.where()}")
        if ts:
            # each group of lanes multiplies its own rows of A: where N is folded over groups, A is there once a group
            r0, c0 = a >> 16, a & 0xFFFF

            def dec(x):
                return DEC[at](np.ascontiguousarray(x).view({1: u1, 2: u2, 4: u4}[es]))

            if c0 + 8 > 512:
                raise SimError(f"tcgen05.mma: A columns {c0}..{c0 + 7}: {self.where()}")
            if M == 128:
                am = dec(T[0:128, c0 : c0 + 8])
            elif M == 64 and (ws or split):
                am = [dec(T[0:64, c0 : c0 + 8]), dec(T[64:128, c0 : c0 + 8])]
            elif M == 64:
                am = dec(np.concatenate([T[r0 + 32 * k : r0 + 32 * k + 16, c0 : c0 + 8] for k in range(4)]))
            else:
                am = [dec(T[32 * k : 32 * k + 32, c0 : c0 + 8]) for k in range(4)]
        else:
            am = self._opnd100(cta, a, ta, M, K, at, es)
        if bm is None:
            bm = self._opnd100(cta, b, tb, N, K, bt, es)
        if isinstance(am, list):
            h = N // len(am)
            acc = np.concatenate([x @ bm[h * k : h * k + h].T for k, x in enumerate(am)], 1)
        else:
            acc = am @ bm.T
        if sgn < 0:
            acc = -acc
        r0, c0 = d >> 16, d & 0xFFFF
        # where row i, column j of D lives
        if M == 128:
            views = [(slice(0, 128), slice(c0, c0 + N), slice(0, 128), slice(0, N))]
        elif split:  # cta_group::2 M=128: 64 rows a CTA, columns folded
            views = [
                (slice(0, 64), slice(c0, c0 + N // 2), slice(0, 64), slice(0, N // 2)),
                (slice(64, 128), slice(c0, c0 + N // 2), slice(0, 64), slice(N // 2, N)),
            ]
        elif M == 64 and not ws:
            views = [(slice(r0 + 32 * k, r0 + 32 * k + 16), slice(c0, c0 + N), slice(16 * k, 16 * k + 16), slice(0, N)) for k in range(4)]
        elif M == 64:
            views = [
                (slice(0, 64), slice(c0, c0 + N // 2), slice(0, 64), slice(0, N // 2)),
                (slice(64, 128), slice(c0, c0 + N // 2), slice(0, 64), slice(N // 2, N)),
            ]
        else:
            q = N // 4
            views = [(slice(32 * k, 32 * k + 32), slice(c0, c0 + q), slice(0, 32), slice(q * k, q * k + q)) for k in range(4)]
        ncol = views[0][1].stop - c0
        if c0 + ncol > 512 or not cta.tmem_used[c0 : c0 + (ncol if dfmt == 1 else ncol // 2)].all():
            raise SimError(f"tcgen05.mma: accumulator columns {c0}..{c0 + ncol - 1} are not allocated: {self.where()}")
        for tr, tc, mr, mc_ in views:
            if dfmt == 1:
                v = acc[mr, mc_]
                if en:
                    v = v + T[tr, tc].view(f4)
                T[tr, tc] = np.ascontiguousarray(v, f4).view(u4)
            else:
                # f16 accumulators: one per 32-bit column cell, low half
                v = acc[mr, mc_]
                if en:
                    v = v + (T[tr, tc] & 0xFFFF).astype(u2).view(f2).astype(f4)
                T[tr, tc] = v.astype(f2).view(u2).astype(u4)
        self.cluster.events += 1
