"""Hopper's warpgroup MMA."""

import numpy as np

from .. import ops
from ..errors import SimError
from ..formats import DEC, EBYTES, f4, u1, u2, u4
from .memory import SMEM_BASE


class Wgmma:
    """Part of Warp: each warp computes its own 16 rows of the 64."""

    def wgmma(self, R, key, A, B, sd):
        _didx, _dst, _N, _dt, _at, _bt, _imm, ra = key
        A = [np.array(x) for x in A] if ra else int(A[0])
        B = int(B[0])
        acc = bool(sd[0])
        if self.machine.order == "eager":
            self._wgmma(R, key, A, B, acc)
        else:
            self.wgmma_open.append((key, A, B, acc))

    def wgmma_commit(self):
        self.wgmma_groups.append(self.wgmma_open)
        self.wgmma_open = []

    def wgmma_wait(self, n, R):
        while len(self.wgmma_groups) > n:
            for k, A, B, acc in self.wgmma_groups.pop(0):
                self._wgmma(R, k, A, B, acc)

    def _wgmma(self, R, key, A, B, acc):
        didx, dst, N, dt, at, bt, imm, ra = key
        s16 = self.cta.shared[16]
        es = EBYTES[at]
        K = 32 // es
        sa, sb_ = (imm[0], imm[1])
        ta = tb = 0
        if ra:
            a = ops.frag_a(A, at)
            if len(imm) > 2:
                tb = imm[2]
        else:
            if len(imm) > 2:
                ta, tb = imm[2], imm[3]
            a = self._opnd90(s16, A, ta, 16, K, at, es, self.index % 4)
        b = self._opnd90(s16, B, tb, N, K, bt, es, 0)
        d = a @ b.T
        if sa * sb_ < 0:
            d = -d
        # registers: [N/8 j][h][e] x [g][t]
        if dt == "f32":
            d = d.reshape(2, 8, N // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(N // 2, 32)
            for k, (r, st) in enumerate(zip(didx, dst, strict=False)):
                v = d[k]
                if acc:
                    o = R[r]
                    v = v + (o if st == "f" else o.view(f4))
                R[r] = v if st == "f" else v.view(u4)
        else:
            d = d.reshape(2, 8, N // 8, 4, 2).transpose(2, 0, 1, 3, 4).reshape(N // 4, 64)
            for k, r in enumerate(didx):
                v = d[k]
                if acc:
                    v = v + ops.unh(R[r], "f16")
                R[r] = ops.toh(v, "f16", 4)

    def _opnd90(self, s16, desc, trans, rows, K, ty, es, quarter):
        base = desc & 0x3FFF
        lbo, sbo = (desc >> 16) & 0x3FFF, (desc >> 32) & 0x3FFF
        s = {0: 0, 1: 3, 2: 2, 3: 1}[(desc >> 62) & 3]
        if (desc >> 49) & 7:
            raise SimError(f"descriptor base offset: {self.where()}")
        if quarter:  # rows 16q..16q+15 of a 64-row operand
            full = ops.rel_chunks(s, trans, 64, K * es, lbo, sbo, es)
            if not trans:
                rel = full[16 * quarter : 16 * quarter + 16]
            else:
                c = 16 * es // 16
                rel = full[:, c * quarter : c * (quarter + 1)]
        elif rows == 16 and quarter == 0:
            full = ops.rel_chunks(s, trans, 64, K * es, lbo, sbo, es)
            rel = full[:16] if not trans else full[:, :es]
        else:
            rel = ops.rel_chunks(s, trans, rows, K * es, lbo, sbo, es)
        return self._gather(self.cta, rel, base, s, trans, ty, es)

    def _gather(self, cta, rel, base, s, trans, ty, es):
        s16 = cta.shared[16]
        idx = ops.swizzle(rel + base, s)
        if int(idx.max()) * 16 + 16 > self.cluster.launch.smem_end or int(idx.min()) * 16 < SMEM_BASE:
            raise SimError(f"matrix descriptor reaches outside shared memory: {self.where()}")
        self.async_read(cta, idx)
        x = s16[idx].reshape(idx.shape[0], -1).view({1: u1, 2: u2, 4: u4}[es])
        f = DEC[ty](x)
        return f.T if trans else f
