"""Moves, arithmetic, comparisons and conversions."""

from .types import NUMPY_NAME, READ_AS, WIDTH

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


class ArithmeticInstructions:
    """Handlers of what each lane does by itself."""

    def h_mov(self, i, p, a):
        ty = p[-1]
        d, s = a
        if ty == "pred":
            return self.wr(d, self.rd(s, "p"), "p")
        if ty == "b128":
            if d[0] == "v":
                for j, x in enumerate(d[1]):
                    self.wr(x, f"np.ascontiguousarray(R[{s[1].idx}][:,{j}])", "U")
                return
            return self.wr(d, f"np.stack([{self.rd(s[1][0], 'U', True)},{self.rd(s[1][1], 'U', True)}],1)", "Q")
        if d[0] == "v":
            if s[0] == "r":
                st = s[1].storage
                return self.unpack(d, f"R[{s[1].idx}]", st)
            return self.unpack(d, self.rd(s, READ_AS[ty], True), READ_AS[ty])
        want = d[1].storage if d[0] == "r" and WIDTH[d[1].storage] == WIDTH[READ_AS[ty]] else READ_AS[ty]
        self.wr(d, self.rd(s, want, True), want)

    h_cvta_ = None

    def h_cvta(self, i, p, a):
        d, s = a
        to = "to" in p
        sp = p[2] if to else p[1]
        sp = sp.split("::")[0]
        e = self.rd(s, "U", True)
        if sp in ("global", "const"):
            pass
        elif sp == "shared":
            e = f"({e}-u8(SHARED_WIN))" if to else f"({e}+u8(SHARED_WIN))"
        elif sp == "param":
            e = f"({e}-u8(w.param_base))" if to else f"({e}+u8(w.param_base))"
        elif sp == "local":
            e = f"({e}-u8(LOCAL_WIN))" if to else f"({e}+u8(LOCAL_WIN))"
        else:
            self.bad()
        self.wr(d, e, "U")

    def h_isspacep(self, i, p, a):
        sp = p[1].split("::")[0]
        e = self.rd(a[1], "U", True)
        c = {
            "shared": f"({e}>=u8(SHARED_WIN))&({e}<u8(LOCAL_WIN))",
            "local": f"({e}>=u8(LOCAL_WIN))",
            "global": f"({e}<u8(SHARED_WIN))",
            "const": f"({e}!={e})",
            "param": f"({e}!={e})",
        }[sp]
        self.wr(a[0], f"({c})", "p")

    def h_mapa(self, i, p, a):
        # mapa.shared::cluster.u32 d, a, rank ; mapa.u64 for generic
        if p[-1] == "u64" and "shared::cluster" not in p:
            self.wr(a[0], f"((({self.rd(a[1], 'U', True)})&u8({(1 << 64) - 1 - 0xFF000000}))|({self.rd(a[2], 'u', True)}.astype(u8)<<24))", "U")
        else:
            self.wr(a[0], f"((({self.rd(a[1], 'u', True)})&0xFFFFFF)|({self.rd(a[2], 'u', True)}<<24))", "u")

    def h_getctarank(self, i, p, a):
        self.wr(a[0], f"(({self.rd(a[1], 'U', True)}>>24)&255).astype(u4)", "u")

    def _anyreg(self, args):
        return any(x[0] in ("r", "s", "so", "v") for x in args)

    def bin(self, fmt, want, a, have=None, extra=False):
        srcs = a[1:]
        arr = not self._anyreg(srcs)
        e = [self.rd(s, want, arr or (k == 0 and not self._anyreg(srcs[:1]) and False)) for k, s in enumerate(srcs)]
        if arr:
            pass
        self.wr(a[0], fmt.format(*e), have or want)

    def fops(self, p):
        return p[-1] in ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64", "f32x2")

    def rnd(self, p):
        for r in ("rn", "rz", "rm", "rp"):
            if r in p:
                return r
        return "rn"

    def float_bin(self, op, i, p, a):
        ty = p[-1]
        if ty in ("f16", "bf16") and "f32" in p:  # mixed: products of 16-bit values with an f32 addend
            h = ty
            s = [f"unh({self.rd(x, 'h', True)},{h!r})" for x in a[1:-1]] + [self.rd(a[-1], "f", True)]
            r = self.rnd(p)
            e = f"fma_d({s[0]},{s[1]},{s[2]},{r!r})" if op == "fma" else f"bin_d({s[0]},{s[1]},{'+' if op == 'add' else '-'!r},{r!r})"
            if "sat" in p:
                e = f"np.fmin(np.fmax({e},f4(0)),f4(1))"
            return self.wr(a[0], e, "f")
        r = self.rnd(p)
        sat = "sat" in p
        ftz = "ftz" in p
        o = {"add": "+", "sub": "-", "mul": "*", "fma": None}[op]
        if ty in ("f32", "f32x2", "f64"):
            want = READ_AS[ty]
            s = [self.rd(x, want, not self._anyreg(a[1:])) for x in a[1:]]
            if op == "fma":
                e = f"({s[0]}*{s[1]}+{s[2]})" if want == "d" else f"fma({s[0]},{s[1]},{s[2]})" if r == "rn" else f"fma_d({s[0]},{s[1]},{s[2]},{r!r})"
            elif r == "rn" or want == "d":
                e = f"({s[0]}{o}{s[1]})"
            else:
                e = f"bin_d({s[0]},{s[1]},{o!r},{r!r})"
            if ftz:
                e = f"ftz({e})"
            if sat:
                e = f"np.fmin(np.fmax({e},f4(0)),f4(1))"
            return self.wr(a[0], e, want)
        h = "bf16" if "bf" in ty else "f16"
        want = READ_AS[ty]
        s = [f"unh({self.rd(x, want, True)},{h!r})" for x in a[1:]]
        e = f"({s[0]}.astype(f8)*{s[1]}+{s[2]}).astype(f4)" if op == "fma" else f"({s[0]}{o}{s[1]})"
        if "relu" in p:
            e = f"np.maximum({e},f4(0))"
        if sat:
            e = f"np.fmin(np.fmax({e},f4(0)),f4(1))"
        return self.wr(a[0], f"toh({e},{h!r},{WIDTH[want]})", want)

    def h_add(self, i, p, a):
        if self.fops(p):
            return self.float_bin("add", i, p, a)
        if "cc" in p:
            self.bad("carry")
        w = READ_AS[p[-1]]
        w = {"i": "u", "I": "U", "H": "h"}.get(w, w)
        if p[-1] in ("u16x2", "s16x2"):
            self.bad()
        self.bin("({}+{})", w, a)

    def h_sub(self, i, p, a):
        if self.fops(p):
            return self.float_bin("sub", i, p, a)
        w = READ_AS[p[-1]]
        w = {"i": "u", "I": "U", "H": "h"}.get(w, w)
        self.wr(a[0], f"({self.rd(a[1], w, True)}-{self.rd(a[2], w)})", w)

    def h_mul(self, i, p, a):
        if self.fops(p):
            return self.float_bin("mul", i, p, a)
        ty = p[-1]
        w = READ_AS[ty]
        if "wide" in p:
            ww = {"i": "I", "u": "U", "H": "i", "h": "u"}[w]
            self.wr(a[0], f"({self.rd(a[1], w, True)}.astype({NUMPY_NAME[ww]})*{self.rd(a[2], w)})", ww)
        elif "hi" in p:
            if w in ("u", "i"):
                ww = {"i": "I", "u": "U"}[w]
                self.wr(a[0], f"(({self.rd(a[1], w, True)}.astype({NUMPY_NAME[ww]})*{self.rd(a[2], w)})>>32).astype({NUMPY_NAME[w]})", w)
            elif w in ("U", "I"):
                self.wr(a[0], f"mulhi64({self.rd(a[1], w, True)},{self.rd(a[2], w, True)},{w == 'I'})", w)
            else:
                self.bad()
        else:
            w = {"i": "u", "I": "U", "H": "h"}.get(w, w)
            self.wr(a[0], f"({self.rd(a[1], w, True)}*{self.rd(a[2], w)})", w)

    def h_mul24(self, i, p, a):
        self.bad()

    def h_mad(self, i, p, a):
        if self.fops(p):
            return self.float_bin("fma", i, p, a)
        w = READ_AS[p[-1]]
        if "wide" in p:
            ww = {"i": "I", "u": "U", "H": "i", "h": "u"}[w]
            self.wr(a[0], f"({self.rd(a[1], w, True)}.astype({NUMPY_NAME[ww]})*{self.rd(a[2], w)}+{self.rd(a[3], ww)})", ww)
        elif "hi" in p:
            ww = {"i": "I", "u": "U"}[w]
            self.wr(
                a[0], f"((({self.rd(a[1], w, True)}.astype({NUMPY_NAME[ww]})*{self.rd(a[2], w)})>>32).astype({NUMPY_NAME[w]})+{self.rd(a[3], w)})", w
            )
        else:
            w = {"i": "u", "I": "U", "H": "h"}.get(w, w)
            self.wr(a[0], f"({self.rd(a[1], w, True)}*{self.rd(a[2], w)}+{self.rd(a[3], w)})", w)

    def h_fma(self, i, p, a):
        self.float_bin("fma", i, p, a)

    def h_div(self, i, p, a):
        w = READ_AS[p[-1]]
        if self.fops(p):
            return self.wr(a[0], f"fdiv({self.rd(a[1], w, True)},{self.rd(a[2], w)})", w)
        self.wr(a[0], f"idiv({self.rd(a[1], w, True)},{self.rd(a[2], w, True)})", w)

    def h_rem(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"irem({self.rd(a[1], w, True)},{self.rd(a[2], w, True)})", w)

    def _minmax(self, i, p, a, mx):
        ty = p[-1]
        if ty in ("f32", "f64"):
            f = ("np.maximum" if mx else "np.minimum") if "NaN" in p else ("np.fmax" if mx else "np.fmin")
            w = READ_AS[ty]
            xs = [self.rd(x, w, not self._anyreg(a[1:])) for x in a[1:]]
            if "abs" in p:
                xs = [f"np.abs({x})" for x in xs]
                if "xorsign" in p:
                    self.bad()
            e = f"{f}({xs[0]},{xs[1]})"
            if len(xs) == 3:
                e = f"{f}({e},{xs[2]})"
            return self.wr(a[0], e, w)
        if ty in ("f16", "bf16", "f16x2", "bf16x2"):
            f = ("np.maximum" if mx else "np.minimum") if "NaN" in p else ("np.fmax" if mx else "np.fmin")
            h = "bf16" if "bf" in ty else "f16"
            w = READ_AS[ty]
            xs = [f"unh({self.rd(x, w, True)},{h!r})" for x in a[1:]]
            e = f"{f}({xs[0]},{xs[1]})"
            if len(xs) == 3:
                e = f"{f}({e},{xs[2]})"
            return self.wr(a[0], f"toh({e},{h!r},{WIDTH[w]})", w)
        if ty in ("s16x2", "u16x2"):
            return self.wr(a[0], f"mm16({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{ty[0] == 's'},{mx})", "u")
        w = READ_AS[ty]
        e = f"np.{'maximum' if mx else 'minimum'}({self.rd(a[1], w, True)},{self.rd(a[2], w)})"
        if "relu" in p:
            e = f"np.maximum({e},0)"
        self.wr(a[0], e, w)

    def h_min(self, i, p, a):
        self._minmax(i, p, a, False)

    def h_max(self, i, p, a):
        self._minmax(i, p, a, True)

    def h_neg(self, i, p, a):
        ty = p[-1]
        if ty in ("f16x2", "bf16x2"):
            return self.wr(a[0], f"({self.rd(a[1], 'u', True)}^0x80008000)", "u")
        if ty in ("f16", "bf16"):
            return self.wr(a[0], f"({self.rd(a[1], 'h', True)}^0x8000)", "h")
        w = READ_AS[ty]
        self.wr(a[0], f"(-{self.rd(a[1], w, True)})", w)

    def h_abs(self, i, p, a):
        ty = p[-1]
        if ty in ("f16x2", "bf16x2"):
            return self.wr(a[0], f"({self.rd(a[1], 'u', True)}&0x7FFF7FFF)", "u")
        if ty in ("f16", "bf16"):
            return self.wr(a[0], f"({self.rd(a[1], 'h', True)}&0x7FFF)", "h")
        w = READ_AS[ty]
        self.wr(a[0], f"np.abs({self.rd(a[1], w, True)})", w)

    def _logic(self, o, i, p, a):
        if p[-1] == "pred":
            return self.wr(a[0], f"({self.rd(a[1], 'p')}{o}{self.rd(a[2], 'p')})", "p")
        w = READ_AS[p[-1]]
        self.wr(a[0], f"({self.rd(a[1], w, True)}{o}{self.rd(a[2], w)})", w)

    def h_and(self, i, p, a):
        self._logic("&", i, p, a)

    def h_or(self, i, p, a):
        self._logic("|", i, p, a)

    def h_xor(self, i, p, a):
        self._logic("^", i, p, a)

    def h_not(self, i, p, a):
        w = "p" if p[-1] == "pred" else READ_AS[p[-1]]
        self.wr(a[0], f"(~{self.rd(a[1], w, True)})", w)

    def h_cnot(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"({self.rd(a[1], w, True)}==0).astype({NUMPY_NAME[w]})", w)

    def h_shl(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(
            a[0],
            f"shl({self.rd(a[1], w, True)},{self.rd(a[2], 'u')})"
            if a[2][0] != "i"
            else (f"({self.rd(a[1], w, True)}<<{a[2][1]})" if a[2][1] < 8 * WIDTH[w] else f"({self.rd(a[1], w, True)}*0)"),
            w,
        )

    def h_shr(self, i, p, a):
        w = READ_AS[p[-1]]
        bits = 8 * WIDTH[w]
        if a[2][0] == "i":
            n = a[2][1]
            if n >= bits:
                e = f"({self.rd(a[1], w, True)}>>{bits - 1})" if w in "iIH" else f"({self.rd(a[1], w, True)}*0)"
            else:
                e = f"({self.rd(a[1], w, True)}>>{n})"
        else:
            e = f"shr({self.rd(a[1], w, True)},{self.rd(a[2], 'u')})"
        self.wr(a[0], e, w)

    def h_shf(self, i, p, a):
        self.wr(a[0], f"shf({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)},{p[1]!r},{p[2]!r})", "u")

    def h_lop3(self, i, p, a):
        if a[0][0] == "p":
            self.bad()
        self.wr(a[0], f"lop3({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)},{a[4][1]})", "u")

    def h_prmt(self, i, p, a):
        if p[-1] != "b32":
            self.bad()
        if a[3][0] == "i":
            self.wr(a[0], f"prmt_i({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{a[3][1] & 0xFFFF})", "u")
        else:
            self.wr(a[0], f"prmt({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)})", "u")

    def h_bfe(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"bfe({self.rd(a[1], w, True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)})", w)

    def h_bfi(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"bfi({self.rd(a[1], w, True)},{self.rd(a[2], w, True)},{self.rd(a[3], 'u', True)},{self.rd(a[4], 'u', True)})", w)

    def h_bmsk(self, i, p, a):
        self.wr(a[0], f"bmsk({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)})", "u")

    def h_szext(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"szext({self.rd(a[1], w, True)},{self.rd(a[2], 'u', True)})", w)

    def h_popc(self, i, p, a):
        self.wr(a[0], f"np.bitwise_count({self.rd(a[1], READ_AS[p[-1]], True)}).astype(u4)", "u")

    def h_clz(self, i, p, a):
        self.wr(a[0], f"clz({self.rd(a[1], READ_AS[p[-1]], True)})", "u")

    def h_brev(self, i, p, a):
        self.wr(a[0], f"brev({self.rd(a[1], READ_AS[p[-1]], True)})", READ_AS[p[-1]])

    def h_bfind(self, i, p, a):
        self.wr(a[0], f"bfind({self.rd(a[1], READ_AS[p[-1]], True)},{'shiftamt' in p})", "u")

    def h_fns(self, i, p, a):
        self.bad()

    def h_sad(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"({self.rd(a[3], 'u', True)}+np.abs({self.rd(a[1], w, True)}.astype(i8)-{self.rd(a[2], w, True)}).astype(u4))", "u")

    def h_dp4a(self, i, p, a):
        self.wr(a[0], f"dp4a({self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)},{p[1] == 's32'},{p[2] == 's32'})", "u")

    def cmp(self, op, ty, x, y):
        h = None
        if ty in ("f16", "bf16"):
            h = ty
            ex, ey = f"unh({self.rd(x, 'h', True)},{h!r})", f"unh({self.rd(y, 'h', True)},{h!r})"
        else:
            w = READ_AS[ty] if ty != "pred" else "p"
            arr = not self._anyreg([x, y])
            ex, ey = self.rd(x, w, arr), self.rd(y, w)
        fl = ty in ("f16", "bf16", "f32", "f64")
        if op in COMPARISONS:
            if fl and op == "ne":
                return f"(({ex}!={ey})&({ex}=={ex})&({ey}=={ey}))"
            return f"({ex}{COMPARISONS[op]}{ey})"
        if op == "num":
            return f"(({ex}=={ex})&({ey}=={ey}))"
        if op == "nan":
            return f"(({ex}!={ex})|({ey}!={ey}))"
        if op.endswith("u") and op[:-1] in COMPARISONS:
            if op == "neu":
                return f"({ex}!={ey})"
            return f"(({ex}{COMPARISONS[op[:-1]]}{ey})|({ex}!={ex})|({ey}!={ey}))"
        self.bad("comparison " + op)

    def h_setp(self, i, p, a):
        q = [x for x in p[1:] if x != "ftz"]
        ty = q[-1]
        op = q[0]
        if ty in ("f16x2", "bf16x2"):
            h = ty[:-2]
            self.emit(f"t1=unh({self.rd(a[1], 'u', True)},{h!r});t2=unh({self.rd(a[2], 'u', True)},{h!r})")
            o = COMPARISONS.get(op)
            if o is None or len(q) > 2:
                self.bad()
            self.emit(f"t=(t1{o}t2)")
            self.wr(a[0][1], "t[0::2]", "p")
            return self.wr(a[0][2], "t[1::2]", "p")
        e = self.cmp(op, ty, a[1], a[2])
        if len(q) == 3:
            b = {"and": "&", "or": "|", "xor": "^"}[q[1]]
            c = self.rd(a[3], "p")
        if a[0][0] == "p":
            self.emit(f"t={e}")
            if len(q) == 3:
                self.emit(f"t1=t{b}{c};t=(~t){b}{c}")
            else:
                self.emit("t1=t;t=~t")
            self.wr(a[0][1], "t1", "p")
            self.wr(a[0][2], "t", "p")
        else:
            if len(q) == 3:
                e = f"({e}{b}{c})"
            self.wr(a[0], e, "p")

    def h_set(self, i, p, a):
        q = [x for x in p[1:] if x != "ftz"]
        e = self.cmp(q[0], q[-1], a[1], a[2])
        if len(q) == 4:
            e = f"({e}{ {'and': '&', 'or': '|', 'xor': '^'}[q[1]] }{self.rd(a[3], 'p')})"
        if q[-2] == "f32":
            self.wr(a[0], f"{e}.astype(f4)", "f")
        else:
            self.wr(a[0], f"where({e},u4(0xFFFFFFFF),u4(0))", "u")

    def h_selp(self, i, p, a):
        w = READ_AS[p[-1]]
        if a[0][0] == "r" and WIDTH[a[0][1].storage] == WIDTH[w]:
            w = a[0][1].storage
        if w == "x":
            return self.wr(a[0], f"where({self.rd(a[3], 'p')}.repeat(2),{self.rd(a[1], w, True)},{self.rd(a[2], w, True)})", w)
        e1, e2 = self.rd(a[1], w, w not in "f"), self.rd(a[2], w, w not in "f")
        self.wr(a[0], f"where({self.rd(a[3], 'p')},{e1},{e2})", w)

    def h_slct(self, i, p, a):
        w = READ_AS[p[-2]]
        c = f"({self.rd(a[3], READ_AS[p[-1]], True)}>=0)"
        self.wr(a[0], f"where({c},{self.rd(a[1], w, True)},{self.rd(a[2], w, True)})", w)

    def fun(self, f, i, p, a):
        ty = p[-1]
        if ty in ("f16", "bf16", "f16x2", "bf16x2"):
            h = "bf16" if "bf" in ty else "f16"
            w = READ_AS[ty]
            return self.wr(a[0], f"toh({f}(unh({self.rd(a[1], w, True)},{h!r})),{h!r},{WIDTH[w]})", w)
        w = READ_AS[ty]
        e = f"{f}({self.rd(a[1], w, True)})"
        if "ftz" in p:
            e = f"ftz({e})"
        self.wr(a[0], e, w)

    def h_ex2(self, i, p, a):
        self.fun("np.exp2", i, p, a)

    def h_lg2(self, i, p, a):
        self.fun("np.log2", i, p, a)

    def h_rcp(self, i, p, a):
        self.fun("rcp", i, p, a)

    def h_sqrt(self, i, p, a):
        self.fun("np.sqrt", i, p, a)

    def h_rsqrt(self, i, p, a):
        self.fun("rsqrt", i, p, a)

    def h_sin(self, i, p, a):
        self.fun("np.sin", i, p, a)

    def h_cos(self, i, p, a):
        self.fun("np.cos", i, p, a)

    def h_tanh(self, i, p, a):
        self.fun("np.tanh", i, p, a)

    def h_testp(self, i, p, a):
        w = READ_AS[p[-1]]
        f = {"finite": "np.isfinite({0})", "infinite": "np.isinf({0})", "number": "({0}=={0})", "notanumber": "({0}!={0})"}
        if p[1] not in f:
            self.bad()
        self.wr(a[0], f[p[1]].format(self.rd(a[1], w, True)), "p")

    def h_copysign(self, i, p, a):
        w = READ_AS[p[-1]]
        self.wr(a[0], f"np.copysign({self.rd(a[2], w, True)},{self.rd(a[1], w, True)})", w)

    def h_cvt(self, i, p, a):
        st, dt = p[-1], p[-2]
        mods = set(p[1:-2])
        relu = "relu" in mods
        sat = "sat" in mods or "satfinite" in mods
        if dt.startswith("e") and st == "f32":
            x = [self.rd(y, "f", True) for y in a[1:]]
            fn = {"e4m3x2": "f32_to_e4m3", "e5m2x2": "f32_to_e5m2"}.get(dt)
            if fn and len(x) == 2:
                return self.wr(a[0], f"({fn}({x[1]},{relu}).astype(u2)|({fn}({x[0]},{relu}).astype(u2)<<8))", "h")
            self.bad()
        if dt == "ue8m0x2" and st == "f32":
            x = [self.rd(y, "f", True) for y in a[1:]]
            r = "rp" if "rp" in mods else "rz"
            return self.wr(a[0], f"(f32_to_ue8m0({x[1]},{r!r}).astype(u2)|(f32_to_ue8m0({x[0]},{r!r}).astype(u2)<<8))", "h")
        if st in ("e4m3x2", "e5m2x2") and dt in ("f16x2", "bf16x2"):
            t = st[:-2]
            x = self.rd(a[1], "h", True)
            h = dt[:-2]
            return self.wr(a[0], f"toh(dec8x2({x},{t!r}),{h!r},4)", "u")
        if dt in ("e4m3x2", "e5m2x2") and st in ("f16x2", "bf16x2"):
            fn = "f32_to_" + dt[:-2]
            return self.wr(a[0], f"enc8x2(unh({self.rd(a[1], 'u', True)},{st[:-2]!r}),{fn},{relu})", "h")
        if dt in ("bf16x2", "f16x2") and st == "f32":
            h = dt[:-2]
            r = "rz" if "rz" in mods else "rn"
            if "rs" in mods:
                self.bad()
            return self.wr(a[0], f"cvt2({self.rd(a[1], 'f', True)},{self.rd(a[2], 'f', True)},{h!r},{r!r},{relu},{sat})", "u")
        if dt in ("bf16", "f16") and st == "f32":
            r = "rz" if "rz" in mods else "rn"
            e = self.rd(a[1], "f", True)
            if dt == "bf16":
                return self.wr(a[0], f"f32_to_bf16({e},{r!r},{relu})", "h")
            return self.wr(a[0], f"f32_to_f16({e},{r!r},{relu},{sat})", "h")
        if dt == "tf32":
            return self.wr(a[0], f"to_tf32({self.rd(a[1], 'f', True)},{'rna' in mods})", "u")
        FL = {"f32": "f", "f64": "d"}
        if st in ("f16", "bf16"):
            e = f"unh({self.rd(a[1], 'h', True)},{st!r})"
            sw = "f"
        elif st in FL:
            sw = FL[st]
            e = self.rd(a[1], sw, True)
        else:
            sw = READ_AS[st]
            e = self.rd(a[1], sw, True)
        if sw in ("f", "d"):
            if dt in ("f32", "f64"):
                dw = FL[dt]
                for m_, fn in (("rni", "np.rint"), ("rzi", "np.trunc"), ("rmi", "np.floor"), ("rpi", "np.ceil")):
                    if m_ in mods:
                        e = f"{fn}({e})"
                if sw == "d" and dw == "f":
                    r = next((x for x in ("rz", "rm", "rp") if x in mods), "rn")
                    e = f"round_dir({e},{r!r})"
                elif sw == "f" and dw == "d":
                    e = f"{e}.astype(f8)"
                if sat:
                    e = f"np.clip({e},0,1)"
                return self.wr(a[0], e, dw)
            if dt in ("f16", "bf16"):
                for m_, fn in (("rni", "np.rint"), ("rzi", "np.trunc"), ("rmi", "np.floor"), ("rpi", "np.ceil")):
                    if m_ in mods:
                        e = f"{fn}({e})"
                return self.wr(a[0], f"toh({e},{dt!r},2)", "h")
            dw = READ_AS[dt]
            fn = "np.rint" if "rni" in mods else "np.floor" if "rmi" in mods else "np.ceil" if "rpi" in mods else "np.trunc"
            return self.wr(a[0], f"f2i({fn}({e}),{dw!r})", dw)
        # integer source
        if dt in ("f32", "f64"):
            return self.wr(a[0], f"i2f({e},{dt!r},{self.rnd(list(mods))!r})", FL[dt])
        if dt in ("f16", "bf16"):
            return self.wr(a[0], f"toh({e}.astype(f4),{dt!r},2)", "h")
        dw = READ_AS[dt]
        if sat:
            lo, hi = (0, (1 << 8 * WIDTH[dw]) - 1) if dw in "bhuU" else (-(1 << (8 * WIDTH[dw] - 1)), (1 << (8 * WIDTH[dw] - 1)) - 1)
            return self.wr(a[0], f"isat({e},{lo},{hi},{NUMPY_NAME[dw]})", dw)
        # destination register may be wider than dt: sign/zero extend
        e = f"{e}.astype({NUMPY_NAME[dw]})"
        if a[0][0] == "r":
            sto = a[0][1].storage
            if WIDTH[sto] > WIDTH[dw]:
                ext = {"h": "H", "u": "i", "U": "I"}.get(sto, sto) if dw in "BHiI" else sto
                return self.wr(a[0], f"{e}.astype({NUMPY_NAME[ext]})", ext)
        self.wr(a[0], e, dw)
