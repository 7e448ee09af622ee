"""ldmatrix, mma.sync, wgmma, tcgen05."""


class MatrixInstructions:
    """Handlers of instructions on matrices."""

    def vecregs(self, a):
        return a[1] if a[0] == "v" else [a]

    def h_ldmatrix(self, i, p, a):
        self.conv_check(i)
        n = {"x1": 1, "x2": 2, "x4": 4}[next(x for x in p if x in ("x1", "x2", "x4"))]
        if "m8n8" not in p or p[-1] != "b16":
            self.bad()
        self.emit(f"t=w.ldmatrix({self.saddr_any(a[1])},{n},{'trans' in p})")
        for j, d in enumerate(self.vecregs(a[0])):
            self.wr(d, f"t[{j}]", "u")

    def h_stmatrix(self, i, p, a):
        self.conv_check(i)
        if p[-1] != "b16":
            self.bad()
        v = "(" + "".join(self.rd(x, "u", True) + "," for x in self.vecregs(a[1])) + ")"
        self.guard(f"w.stmatrix({self.saddr_any(a[0])},{v},{'trans' in p})")

    def h_movmatrix(self, i, p, a):
        self.conv_check(i)
        self.wr(a[0], f"movmatrix({self.rd(a[1], 'u', True)})", "u")

    def h_mma(self, i, p, a):
        self.conv_check(i)
        shape = next(x for x in p if x.startswith("m") and x[1:2].isdigit())
        tys = p[-4:]
        if shape not in ("m16n8k16", "m16n8k8", "m16n8k32") or tys[0] not in ("f32", "f16") or "sp" in p:
            self.bad()
        A = "(" + "".join(self.rd(x, "u", True) + "," for x in self.vecregs(a[1])) + ")"
        B = "(" + "".join(self.rd(x, "u", True) + "," for x in self.vecregs(a[2])) + ")"
        cw = "f" if tys[3] == "f32" else "u"
        Cc = "(" + "".join(self.rd(x, cw, True) + "," for x in self.vecregs(a[3])) + ")"
        self.emit(f"t=mma_sync({shape!r},{tys!r},{A},{B},{Cc})")
        for j, d in enumerate(self.vecregs(a[0])):
            self.wr(d, f"t[{j}]", "f" if tys[0] == "f32" else "u")

    def h_wgmma(self, i, p, a):
        if p[1] == "fence":
            return self.conv_check(i)
        if p[1] == "commit_group":
            return self.emit("w.wgmma_commit()")
        if p[1] == "wait_group":
            return self.emit(f"w.wgmma_wait({a[0][1]},R)")
        self.conv_check(i)
        shape = next(x for x in p if x.startswith("m64n"))
        N = int(shape[4 : shape.index("k")])
        dt, at, bt = p[-3:]
        if dt not in ("f32", "f16") or "sp" in p:
            self.bad()
        regs = self.vecregs(a[0])
        didx = [r[1].idx for r in regs]
        dst = [r[1].storage for r in regs]
        A = "(" + "".join(self.rd(x, "u", True) + "," for x in a[1][1]) + ")" if a[1][0] == "v" else self.rd(a[1], "U", True)
        B = self.rd(a[2], "U", True)
        sd = self.rd(a[3], "p")
        imm = [x[1] for x in a[4:]]
        key = self.c.const((didx, dst, N, dt, at, bt, imm, a[1][0] == "v"), ("wg", i.line, self.masked))
        self.emit(f"w.wgmma(R,{key},{A},{B},{sd})")

    def h_tcgen05(self, i, p, a):
        k = p[1].split("::")[0]
        if k == "wait":
            return self.conv_check(i)
        if k in ("fence", "relinquish_alloc_permit"):
            return
        cg = 2 if "cta_group::2" in p else 1
        if k == "alloc":
            self.conv_check(i)
            return self.emit(f"w.tmem_alloc({self.saddr_any(a[0])},{self.rd(a[1], 'u', True)},{cg})")
        if k == "dealloc":
            self.conv_check(i)
            return self.emit(f"w.tmem_dealloc({self.rd(a[0], 'u', True)},{self.rd(a[1], 'u', True)},{cg})")
        if k in ("ld", "st"):
            self.conv_check(i)
            shape = next(x for x in p if x in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"))
            n = int(next(x for x in p if x[0] == "x" and x[1:].isdigit())[1:])
            if "red" in p:
                self.bad()
            pk = any(x in ("pack::16b", "unpack::16b") for x in p)
            if k == "ld":
                regs = self.vecregs(a[0])
                half = a[2][1] if len(a) > 2 else 0
                self.emit(f"t=w.tmem_ld({self.addr(a[1])[0]},{shape!r},{n},{pk},{half})")
                for j, d in enumerate(regs):
                    self.wr(d, f"t[{j}]", "u")
            else:
                v = "(" + "".join(self.rd(x, "u", True) + "," for x in self.vecregs(a[-1])) + ")"
                half = a[1][1] if len(a) > 2 else 0
                self.guard(f"w.tmem_st({self.addr(a[0])[0]},{shape!r},{n},{v},{pk},{half})")
            return
        if k == "commit":
            mc = self.rd(a[1], "u", True) if "multicast::cluster" in p else "None"
            return self.guard(f"w.tc_commit({self.saddr_any(a[0])},{mc},{cg},%M)")
        if k == "cp":
            shape = p[3] if p[2].startswith("cta_group") else p[2]
            return self.guard(f"w.tc_cp({self.addr(a[0])[0]},{self.rd(a[1], 'U', True)},{list(p[2:])!r},{cg},%M)")
        if k == "mma":
            kind = next(x for x in p if x.startswith("kind::"))[6:]
            if kind not in ("f16", "f8f6f4", "tf32") or "sp" in p or "block_scale" in p:
                self.bad()
            ws = "ws" in p
            D = self.addr(a[0])[0]
            ts = a[1][0] == "m"
            A = self.addr(a[1])[0] if ts else self.rd(a[1], "U", True)
            B = self.rd(a[2], "U", True)
            idesc = self.rd(a[3], "u", True)
            rest = a[4:]
            dis = "None"
            if rest and rest[0][0] == "v":
                dis = "(" + "".join(self.rd(x, "u", True) + "," for x in rest[0][1]) + ")"
                rest = rest[1:]
            en = self.rd(rest[0], "p") if rest else "np.ones(32,bool)"
            if len(rest) > 1 and not ws:
                self.bad("scale-input-d")
            return self.guard(f"w.tc_mma({D},{A},{B},{idesc},{en},{ts},{kind!r},{cg},{ws},{dis},%M)")
        self.bad()
