"""Reading and writing PTX operands in generated Python."""

import numpy as np

from ..formats import f4, f8, u4, u8
from .ptx import PtxError
from .types import NUMPY_NAME, WIDTH


class Unsupported(PtxError):
    """An instruction or a modifier that is not interpreted, by name."""


class Operands:
    """Builds one block's source: `rd` gives an expression, `wr` emits an assignment, `mask` the lanes that take part."""

    def __init__(self, comp, b, masked):
        self.c, self.b, self.masked = comp, b, masked
        self.out = []
        self.lanes = None

    def emit(self, s):
        self.out.append(s)

    def bad(self, why=""):
        raise Unsupported(f"unsupported instruction: {self.i.text[:200]} (line {self.i.line}) {why}")

    def rd(self, a, want, arr=False):
        k = a[0]
        if k == "r":
            r = a[1]
            s, e = r.storage, f"R[{r.idx}]"
            return self.conv(e, s, want)
        if k == "n":
            return "(~" + self.rd(a[1], "p") + ")"
        if k == "i":
            v = a[1]
            if want == "p":
                return self.const(np.full(32, bool(v)), ("p", bool(v)))
            if want in ("f", "x", "d"):
                if want == "f":
                    v = np.array([v & 0xFFFFFFFF], u4).view(f4)[0]
                    return self.fconst(v, arr)
                if want == "d":
                    return self.const(np.full(32, np.array([v & (2**64 - 1)], u8).view(f8)[0]), ("d", v))
                return self.const(np.full(32, v & (2**64 - 1), u8).view(f4), ("x", v))
            w = WIDTH[want] * 8
            v &= (1 << w) - 1
            if want in ("i", "I", "H", "B") and v >> (w - 1):
                v -= 1 << w
            if arr:
                return self.const(np.full(32, v, NUMPY_NAME[want]), (want, v))
            return repr(v) if v >= 0 else f"({v})"
        if k == "f":
            if a[2] == 32:
                v = np.array([a[1]], u4).view(f4)[0]
                if want == "f":
                    return self.fconst(v, arr)
                if want in ("u", "i"):
                    return self.rd(("i", a[1]), want, arr)
                if want == "d":
                    return self.const(np.full(32, f8(v)), ("d32", a[1]))
            if a[2] == 64:
                if want == "d":
                    return self.const(np.full(32, np.array([a[1]], u8).view(f8)[0]), ("d", a[1]))
                return self.rd(("i", a[1]), want, arr)
        if k in ("s", "so"):
            off = a[2] if k == "so" else 0
            e = self.sym(a[1], off)
            return self.conv(e[0], e[1], want)
        if k == "v" and want in ("U", "I", "u", "x", "i"):
            return self.pack(a, want)
        self.bad(f"operand {a[0]} as {want}")

    def const(self, arr, key):
        return self.c.const(arr, key)

    def fconst(self, v, arr):
        key = ("f", np.array([v], f4).view(u4)[0].item(), arr)
        return self.const(np.full(32, v, f4) if arr else f4(v), key)

    def sym(self, name, off=0):
        """symbol or special register -> (expr, storage)"""
        lay = self.c.layout
        if name.startswith("%") or name in ("WARP_SZ",):
            if name in ("%clock64", "%globaltimer"):
                return "w.clock64()", "U"
            if name in ("%clock", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi"):
                return "w.clock64().astype(u4)", "u"
            if name == "%is_explicit_cluster":
                return "w.special['%is_explicit_cluster']", "p"
            if name in ("%gridid",) or name.startswith("%lanemask"):
                return f"w.special[{name!r}]", "u" if "mask" in name else "U"
            return f"w.special[{name!r}]", "u"
        if name in self.c.kernel.param_offsets:
            v = self.c.kernel.param_offsets[name] + off
            return self.const(np.full(32, v, u8), ("U", v)), "U"
        if name in lay.shared:
            v = lay.shared[name] + off
            return f"(w.shared_base+u4({v}))", "u"
        if name in lay.local:
            return self.const(np.full(32, lay.local[name] + off, u8), ("U", lay.local[name] + off)), "U"
        if name in lay.glob:
            v = lay.glob[name] + off
            return self.const(np.full(32, v, u8), ("U", v)), "U"
        self.bad(f"unknown symbol {name}")

    def conv(self, e, s, want):
        """expression of storage s as type want (bit reinterpretation; width change by zero extension/truncation)"""
        if s == want:
            return e
        if s == "p" or want == "p":
            if want == "p":
                self.bad("predicate expected")
            return f"{e}.astype({NUMPY_NAME[want]})"
        a, b = WIDTH[s], WIDTH[want]
        if a == b:
            return f"{e}.view({NUMPY_NAME[want]})"
        # width change through unsigned
        us = {1: "b", 2: "h", 4: "u", 8: "U"}
        e = self.conv(e, s, us[a])
        if want == "x":
            self.bad("width")
        e = f"{e}.astype({NUMPY_NAME[us[b]]})"
        return self.conv(e, us[b], want)

    def pack(self, a, want):
        parts = a[1]
        n = len(parts)
        tot = WIDTH[want]
        per = tot // n
        if per == 4:
            if want == "x":
                return f"packf({self.rd(parts[0], 'f', True)},{self.rd(parts[1], 'f', True)})"
            e = f"pack2({self.rd(parts[0], 'u', True)},{self.rd(parts[1], 'u', True)})"
            return e if want == "U" else self.conv(e, "U", want)
        if per == 2 and n == 2:
            e = f"packh({self.rd(parts[0], 'h', True)},{self.rd(parts[1], 'h', True)})"
            return self.conv(e, "u", want)
        if per == 2 and n == 4:
            e = f"packh4({','.join(self.rd(p, 'h', True) for p in parts)})"
            return self.conv(e, "U", want)
        if per == 1 and n == 4:
            e = f"packb4({','.join(self.rd(p, 'b', True) for p in parts)})"
            return self.conv(e, "u", want)
        self.bad("pack")

    # mask expression for this instruction: None, or a name
    def mask(self):
        i = self.i
        if i.pred is None:
            return "m" if self.masked else None
        e = f"R[{i.pred.idx}]"
        if i.pneg:
            e = "~" + e
        if self.masked:
            e = f"({e})&m"
        self.emit(f"q={e}")
        return "q"

    def wr(self, a, e, have):
        if a[0] == "_":
            return
        if a[0] == "v":
            return self.unpack(a, e, have)
        if a[0] != "r":
            self.bad("destination")
        r = a[1]
        e = self.conv(e, have, r.storage) if have != r.storage else e
        q = self.lanes
        if q is None:
            self.emit(f"R[{r.idx}]={e}")
        elif r.storage == "x":
            self.emit(f"R[{r.idx}]=where({q}.repeat(2),{e},R[{r.idx}])")
        elif r.storage == "Q":
            self.emit(f"R[{r.idx}]=where({q}[:,None],{e},R[{r.idx}])")
        else:
            self.emit(f"R[{r.idx}]=where({q},{e},R[{r.idx}])")

    def unpack(self, a, e, have):
        parts = a[1]
        n = len(parts)
        w = WIDTH[have]
        per = w // n
        self.emit(f"t={e}")
        if per == 4:
            if have == "x":
                for j, p in enumerate(parts):
                    self.wr(p, f"t[{j}::2]", "f")
            else:
                self.emit("t=np.ascontiguousarray(t).view(u4)")
                for j, p in enumerate(parts):
                    self.wr(p, f"t[{j}::2]", "u")
            return
        if per == 2:
            self.emit("t=np.ascontiguousarray(t).view(u2)")
            for j, p in enumerate(parts):
                self.wr(p, f"t[{j}::{n}]", "h")
            return
        if per == 1:
            self.emit("t=np.ascontiguousarray(t).view(u1)")
            for j, p in enumerate(parts):
                self.wr(p, f"t[{j}::{n}]", "b")
            return
        self.bad("unpack")

    def guard(self, s):
        """side-effecting call: s takes the mask as its last argument"""
        q = self.lanes
        if q is None:
            self.emit(s.replace("%M", "None"))
        else:
            self.emit(f"if {q}.any(): " + s.replace("%M", q))
