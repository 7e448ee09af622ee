"""PTX basic blocks -> Python functions over 32-lane numpy arrays.

Every block has two forms: full (all lanes of the warp are active) and masked.
A block returns the next block's number, or a tuple (cond, taken, not_taken),
or one of the negative codes in types.py."""

import numpy as np

from .. import formats, ops
from .arithmetic import ArithmeticInstructions
from .matrix import MatrixInstructions
from .memory import MemoryInstructions
from .modifiers import ALLOWED, may_fail
from .operands import Operands
from .ptx import PtxError
from .types import EXIT, STORAGE
from .warp import WarpInstructions


def _starts_block(i):
    """Does this instruction wait, or need its lanes together?"""
    p = i.parts
    if p[0] in ("bar", "barrier", "nanosleep") or i.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return True
    if "sync" in p and p[0] in ("shfl", "vote", "match", "redux", "elect", "mma", "ldmatrix", "stmatrix", "tcgen05", "wgmma", "activemask"):
        return True
    return bool(p[0] == "cp" and ("wait_group" in p or "wait_all" in p))


class Compiled:
    """One kernel, ready to run."""

    def __init__(self, kernel, module, layout):
        self.kernel, self.mod, self.layout = kernel, module, layout
        self.consts = []
        self.const_key = {}
        self._storage()
        self._blocks()
        self.full = [None] * len(self.blocks)
        self.masked = [None] * len(self.blocks)
        self.namespace = None

    def _storage(self):
        for r in self.kernel.regs:
            r.storage = STORAGE.get(r.type)
            r.fvotes = r.ivotes = 0
        for i in self.kernel.instrs:
            ty = i.parts[-1]
            base = i.parts[0]
            if base in ("mov", "ld", "st", "ldu", "tcgen05", "shfl", "wgmma", "mma", "elect"):
                if base in ("wgmma",):
                    pass
                if not (base in ("ld", "st") and ty in ("f32",)):
                    continue
            for j, a in enumerate(i.args):
                for b in a[1] if a[0] == "v" else a[1:] if a[0] == "p" else [a]:
                    if b[0] != "r":
                        continue
                    r = b[1]
                    t = ty
                    if base == "cvt":
                        t = i.parts[-2] if j == 0 else ty
                    elif base in ("setp", "set"):
                        t = ty if j else "b32"
                    elif base == "slct":
                        t = i.parts[-2]
                    if t in ("f32", "f32x2"):
                        r.fvotes += 1
                    else:
                        r.ivotes += 1
        for r in self.kernel.regs:
            if r.fvotes > r.ivotes:
                if r.storage == "u":
                    r.storage = "f"
                elif r.storage == "U":
                    r.storage = "x"

    def _blocks(self):
        ins = self.kernel.instrs
        starts = {0}
        for _, n in self.kernel.labels.items():
            starts.add(n)
        for n, i in enumerate(ins):
            if i.parts[0] in ("bra", "ret", "exit", "trap", "brx"):
                starts.add(n + 1)
            if _starts_block(i):
                starts.add(n)
                if i.pred is not None:
                    starts.add(n + 1)
        st = sorted(s for s in starts if s <= len(ins))
        self.block_starts = [s for s in st if s < len(ins)]
        self.block_at = {s: b for b, s in enumerate(self.block_starts)}
        self.blocks = []
        for b, s in enumerate(self.block_starts):
            e = self.block_starts[b + 1] if b + 1 < len(self.block_starts) else len(ins)
            self.blocks.append(ins[s:e])
        self.end_block = len(self.blocks)

    def target(self, i, name):
        for sc in reversed(i.scopes):
            n = self.kernel.labels.get((sc, name))
            if n is not None:
                return self.block_at.get(n, -2)
        raise PtxError(f"unknown label {name} at line {i.line}")

    def const(self, arr, key):
        n = self.const_key.get(key)
        if n is None:
            n = len(self.consts)
            self.consts.append(arr)
            self.const_key[key] = n
        return f"C[{n}]"

    def get(self, b, masked):
        tab = self.masked if masked else self.full
        f = tab[b]
        if f is None:
            g = Generator(self, b, masked)
            src = g.source()
            if self.namespace is None:
                self.namespace = {**vars(formats), **vars(ops), "np": np, "where": np.where, "C": self.consts}
            name = f"_{'m' if masked else 'f'}{b}"
            exec(compile(src, f"<ptx {self.kernel.name[:40]} block {b}>", "exec"), self.namespace)
            f = tab[b] = self.namespace[name]
        return f


class Generator(Operands, ArithmeticInstructions, MemoryInstructions, WarpInstructions, MatrixInstructions):
    """One block of PTX as the source of one Python function."""

    def source(self):
        body = self.c.blocks[self.b]
        nxt = self.b + 1 if self.b + 1 < len(self.c.blocks) else EXIT
        self.term = None
        for i in body:
            self.i = i
            self.emit(f"w.line={i.line}") if (may_fail(i)) else None
            self.instr(i)
            if self.term:
                break
        name = f"_{'m' if self.masked else 'f'}{self.b}"
        hdr = f"def {name}(w,R,m):" if self.masked else f"def {name}(w,R):"
        if not self.term:
            self.emit(f"return {nxt}")
        return hdr + "\n" + "\n".join(" " + x for x in self.out) + "\n"

    def instr(self, i):
        allowed = ALLOWED.get(i.parts[0])
        if allowed is not None:
            for x in i.parts[1:]:
                if x not in allowed:
                    self.bad(f"modifier .{x}")
        h = getattr(self, "h_" + i.parts[0].split("::")[0], None)
        if h is None:
            self.bad()
        self.lanes = None if i.parts[0] in ("bra", "ret", "exit", "trap") else self.mask()
        h(i, i.parts, i.args)
