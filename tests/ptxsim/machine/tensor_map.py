"""TMA descriptors."""

import numpy as np

from ..errors import SimError
from ..formats import i8, u1, u2, u4, u8
from .memory import HOST_BASE, HOST_BYTES, HOST_VIEWS, reduce_into

# Element types as the driver numbers them: bytes, and the type of a reduction.
ES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
TY = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 9: "bf16", 10: "f32"}


class TensorMap:
    """A tiled map as the hardware reads it: address, sizes, strides, box, swizzle. The first coordinate is the contiguous one."""

    def __init__(self, raw):
        if bytes(raw[:4]) == b"PTXM":
            self.dtype, self.rank, self.inter, sw, _, self.oob = (int(x) for x in raw[4:10])
            n = self.rank
            self.addr = int(raw[16:24].view(u8)[0])
            self.dims = [int(x) + 1 for x in raw[24 : 24 + 4 * n].view(u4)]
            self.box = [int(x) for x in raw[44 : 44 + 2 * n].view(u2)]
            self.estr = [int(x) for x in raw[54 : 54 + n]]
            st = [int(x) for x in raw[64 : 64 + 8 * (n - 1)].view(u8)]
        else:
            # the bit layout that the DSL's host code writes by itself (first 64 bytes)
            w = [int(x) for x in raw[:64].view(u4)]
            if w[2] & 15 != 2:
                raise SimError("not a TMA descriptor: " + " ".join(f"{x:08x}" for x in w))
            self.addr = w[0] | w[1] << 32
            n = self.rank = ((w[2] >> 4) & 7) + 1
            hw = (w[2] >> 7) & 15
            self.dtype = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 10, 9: 8, 10: 9}.get(hw, 99)
            self.inter = (w[2] >> 11) & 3
            sw = (w[2] >> 13) & 3
            self.oob = 0
            self.dims = [x + 1 for x in w[8 : 8 + n]]
            self.box = [(w[13] >> 24) + 1] + [((w[14] >> (8 * k)) & 255) + 1 for k in range(4)]
            self.box = self.box[:n]
            self.estr = [((w[13] >> (3 * k)) & 7) + 1 for k in range(n)]
            st = [(w[3 + k] | ((w[7] >> (4 * k)) & 15) << 32) << 4 for k in range(n - 1)]
        self.swz = {0: 0, 1: 1, 2: 2, 3: 3}.get(sw)
        if self.swz is None or self.inter:
            raise SimError(f"tensor map swizzle {sw} interleave {self.inter}")
        if any(e != 1 for e in self.estr):
            raise SimError("tensor map with element strides")
        if self.dtype not in ES:
            raise SimError("tensor map of an unsupported element type")
        self.es = ES[self.dtype]
        self.strides = [self.es, *st]
        self.box_bytes = self.es * int(np.prod(self.box))
        w = self.box[0] * self.es
        if w % 16 or (self.swz and w > (16 << self.swz)):
            raise SimError(f"tensor map inner box of {w} bytes with swizzle {sw}")
        rows = 1
        for b in self.box[1:]:
            rows *= b
        self.rows = rows
        # outer coordinates of each box row
        idx = np.arange(rows)
        self.row_coordinates = []
        for b in self.box[1:]:
            self.row_coordinates.append(idx % b)
            idx = idx // b

    def _rows(self, c):
        ok = np.ones(self.rows, bool)
        off = np.zeros(self.rows, i8)
        for k in range(1, self.rank):
            x = self.row_coordinates[k - 1] + c[k]
            ok &= (x >= 0) & (x < self.dims[k])
            off += x * self.strides[k]
        lo, hi = max(0, c[0]), min(self.dims[0], c[0] + self.box[0])
        return ok, off + self.addr, lo, hi

    def _check(self, mem, a, n, where):
        lo, hi = int(a.min()), int(a.max()) + n
        if mem.check and not mem.inside(lo, hi):
            raise SimError(f"tensor map reaches {lo:#x}..{hi:#x}, outside every known allocation: {where}")

    def read(self, c, mem, where):
        if len(c) != self.rank:
            raise SimError(f"tensor map of rank {self.rank} used with {len(c)} coordinates: {where}")
        ok, addr, lo, hi = self._rows(c)
        w = self.box[0] * self.es
        out = np.zeros((self.rows, w), u1)
        if self.oob:
            out[:] = 0xFF
        nb = (hi - lo) * self.es
        if ok.any() and nb > 0:
            a = addr[ok] + lo * self.es
            self._check(mem, a, nb, where)
            mem.read(a, nb, lambda: where)
            b0 = (lo - c[0]) * self.es
            if nb % 16 == 0 and not (a & 15).any():
                d = HOST_VIEWS[16][((a - HOST_BASE) >> 4)[:, None] + np.arange(nb // 16)]
                out[ok, b0 : b0 + nb] = d.reshape(len(a), -1).view(u1)
            else:
                out[ok, b0 : b0 + nb] = HOST_BYTES[(a - HOST_BASE)[:, None] + np.arange(nb)]
        return out.reshape(-1).view(u4).reshape(-1, 4)

    def write(self, c, data, red, mem, where):
        ok, addr, lo, hi = self._rows(c)
        w = self.box[0] * self.es
        nb = (hi - lo) * self.es
        if not ok.any() or nb <= 0:
            return
        x = np.ascontiguousarray(data).view(u1).reshape(self.rows, w)[ok]
        b0 = (lo - c[0]) * self.es
        x = x[:, b0 : b0 + nb]
        a = addr[ok] + lo * self.es
        self._check(mem, a, nb, where)
        if red is not None:
            mem.read(a, nb, lambda: where)
        mem.wrote(a, nb)
        idx = (a - HOST_BASE)[:, None] + np.arange(nb)
        if red is None:
            HOST_BYTES[idx] = x
        else:
            g = HOST_BYTES[idx].reshape(-1)
            reduce_into(g, np.ascontiguousarray(x).reshape(-1), red, TY[self.dtype])
            HOST_BYTES[idx] = g.reshape(idx.shape)
