"""ld, st, atom, mbarrier, cp and their relatives."""

from .ptx import TYPE_SIZE
from .types import BLOCK, NUMPY_NAME, WIDTH


class MemoryInstructions:
    """Handlers of memory instructions: `h_<name>(instruction, parts, operands)`."""

    def addr(self, m):
        """-> (expr, width 'u' or 'U')"""
        base, off = m[1], m[2]
        if base[0] == "r":
            w = "u" if WIDTH[base[1].storage] == 4 else "U"
            e = self.rd(base, w)
        elif base[0] in ("s", "so"):
            e, w = self.sym(base[1], base[2] if base[0] == "so" else 0)
        elif base[0] == "i":
            w = "U"
            e = self.rd(base, "U", True)
        else:
            self.bad("address")
        if off:
            e = f"({e}+{off & (0xFFFFFFFF if w == 'u' else (1 << 64) - 1)})"
        return e, w

    def space(self, p):
        for x in p:
            b = x.split("::")[0]
            if b in ("global", "shared", "local", "const", "param"):
                return b
        return "generic"

    def saddr(self, m):
        """shared-space address as uint32 expr"""
        e, w = self.addr(m)
        return e if w == "u" else f"{e}.astype(u4)"

    def h_ld(self, i, p, a):
        if "b128" in p:
            self.bad()
        ty = p[-1]
        sp = self.space(p[1:])
        dst = a[0][1] if a[0][0] == "v" else [a[0]]
        n = len(dst)
        sz = TYPE_SIZE[ty]
        e, w = self.addr(a[1])
        signed = ty[0] == "s"
        q = self.lanes or "None"
        if sp == "param":
            if a[1][1][0] == "s":
                off = self.c.kernel.param_offsets.get(a[1][1][1])
                if off is None:
                    self.bad("param symbol")
                self.emit(f"t=w.ldparam({off + a[1][2]},{sz},{n})")
            else:
                self.emit(f"t=w.ld_global({e}+u8(w.param_base),{sz},{n},{q})")
        elif sp == "shared":
            e = e if w == "u" else f"{e}.astype(u4)"
            self.emit(f"t=w.ld_shared({e},{sz},{n},{q})")
        elif sp in ("global", "const"):
            self.emit(f"t=w.ld_global({e},{sz},{n},{q})")
        elif sp == "local":
            self.emit(f"t=w.ld_local({e},{sz},{n},{q})")
        else:
            self.emit(f"t=w.ld_generic({e},{sz},{n},{q})")
        uw = {1: "b", 2: "h", 4: "u", 8: "U"}[sz]
        for j, d in enumerate(dst):
            if d[0] == "_":
                continue
            x = f"t[{j}]"
            have = uw
            sto = d[1].storage
            if WIDTH[sto] > sz and signed:
                sg = {1: "i1", 2: "i2", 4: "i4"}[sz]
                ext = {"h": "H", "u": "i", "U": "I"}[sto]
                x, have = f"{x}.view({sg}).astype({NUMPY_NAME[ext]})", ext
            self.wr(d, x, have)

    h_ldu = h_ld

    def h_st(self, i, p, a):
        if "async" in p:
            src = a[1][1] if a[1][0] == "v" else [a[1]]
            sz = TYPE_SIZE[p[-1]]
            uw = {4: "u", 8: "U"}[sz]
            vals = "(" + "".join(self.rd(x, uw, True) + "," for x in src) + ")"
            return self.guard(f"w.st_async({self.saddr_any(a[0])},{sz},{vals},{self.saddr_any(a[2])},%M)")
        ty = p[-1]
        sp = self.space(p[1:])
        src = a[1][1] if a[1][0] == "v" else [a[1]]
        sz = TYPE_SIZE[ty]
        uw = {1: "b", 2: "h", 4: "u", 8: "U"}[sz]
        vals = "(" + "".join(self.rd(s, uw, True) + "," for s in src) + ")"
        e, w = self.addr(a[0])
        f = {"shared": "st_shared", "global": "st_global", "local": "st_local", "generic": "st_generic"}.get(sp)
        if f is None:
            self.bad()
        if sp == "shared" and w != "u":
            e = f"{e}.astype(u4)"
        if sp != "shared" and w == "u":
            e = f"{e}.astype(u8)"
        self.guard(f"w.{f}({e},{sz},{vals},%M)")

    def h_atom(self, i, p, a, red=False):
        ty = p[-1]
        sp = self.space(p[1:])
        ops = [x for x in p if x in ("add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec")]
        if not ops:
            self.bad()
        o = 0 if red else 1
        e, w = self.addr(a[o])
        if w == "u":
            e = f"({e}.astype(u8)+u8({'SHARED_WIN' if sp == 'shared' else 0}))"
        elif sp == "shared":
            e = f"({e}+u8(SHARED_WIN))"
        vec = a[o + 1][0] == "v"
        srcs = a[o + 1][1] if vec else [a[o + 1]]
        sz = TYPE_SIZE[ty]
        uw = {2: "h", 4: "u", 8: "U"}[sz]
        vals = "(" + "".join(self.rd(s, uw, True) + "," for s in srcs) + ")"
        cmp_ = self.rd(a[o + 2], uw, True) if ops[0] == "cas" else "None"
        # cas operands: [addr], compare, new
        call = f"w.atomic({e},{ops[0]!r},{ty!r},{vals},{cmp_},%M)"
        if red:
            self.guard(call)
        else:
            q = self.lanes or "None"
            self.emit("t=" + call.replace("%M", q))
            dsts = a[0][1] if a[0][0] == "v" else [a[0]]
            for j, d in enumerate(dsts):
                self.wr(d, f"t[{j}]", uw)

    def h_red(self, i, p, a):
        if "async" in p:
            self.bad()
        self.h_atom(i, p, a, red=True)

    def h_prefetch(self, i, p, a):
        pass

    h_prefetchu = h_discard = h_applypriority = h_createpolicy_ = h_prefetch
    h_membar = h_griddepcontrol = h_setmaxnreg = h_prefetch

    def h_fence(self, i, p, a):
        if ("proxy" in p and any(x.startswith("async") for x in p)) or "proxy.async" in i.op:
            self.emit("w.fence_proxy()")

    def h_createpolicy(self, i, p, a):
        self.wr(a[0], self.rd(("i", 0), "U", True), "U")

    def h_mbarrier(self, i, p, a):
        k = p[1]
        if k == "init":
            self.guard(f"w.mbar_init({self.saddr_any(a[0])},{self.rd(a[1], 'u', True)},%M)")
        elif k == "inval":
            self.guard(f"w.mbar_inval({self.saddr_any(a[0])},%M)")
        elif k in ("arrive", "arrive_drop"):
            # forms: d, [addr] {,count} ; _, [addr]{,count}; [addr]{, count}
            if a[0][0] == "m":
                d, ad, rest = None, a[0], a[1:]
            else:
                d, ad, rest = a[0], a[1], a[2:]
            tx = "expect_tx" in p
            cnt, txb = "None", "None"
            if tx:
                txb = self.rd(rest[0], "u", True)
                if len(rest) > 1:
                    self.bad()
            elif rest:
                cnt = self.rd(rest[0], "u", True)
            q = self.lanes
            call = f"w.mbar_arrive({self.saddr_any(ad)},{cnt},{txb},{k == 'arrive_drop'},%M)"
            if d is not None and d[0] == "r":
                self.emit("t=" + call.replace("%M", q or "None"))
                self.wr(d, "t", "U")
            else:
                self.guard(call)
        elif k == "expect_tx":
            self.guard(f"w.mbar_tx({self.saddr_any(a[0])},{self.rd(a[1], 'u', True)},%M)")
        elif k == "complete_tx":
            self.guard(f"w.mbar_tx({self.saddr_any(a[0])},-({self.rd(a[1], 'u', True)}.astype(i8)),%M)")
        elif k in ("try_wait", "test_wait"):
            par = "parity" in p
            st = self.rd(a[2], "u" if par else "U", True)
            q = self.lanes or "None"
            self.emit(f"t=w.mbar_wait({self.saddr_any(a[1])},{st},{par},{k == 'try_wait'},{q})")
            self.emit(f"if t is None: return {BLOCK}")
            self.wr(a[0], "t", "p")
        elif k == "pending_count":
            self.bad()
        else:
            self.bad()

    def saddr_any(self, m):
        e, w = self.addr(m)
        return e if w == "u" else f"({e}&u8(0xFFFFFFFF)).astype(u4)"

    def h_cp(self, i, p, a):
        if "bulk" in p:
            return self.bulk(i, p, a)
        if p[1] == "async":
            if "wait_group" in p or "wait_all" in p or "commit_group" in p:
                return
            if "mbarrier" in i.op and "arrive" in i.op:
                return self.guard(f"w.cpasync_arrive({self.saddr_any(a[0])},{'noinc' in p},%M)")
            sz = a[2][1]
            src = "None"
            if len(a) > 3 and a[3][0] in ("r", "i"):
                if a[3][0] == "r" and a[3][1].storage == "p":
                    self.bad("ignore-src")
                src = self.rd(a[3], "u", True)
            ge, _gw = self.addr(a[1])
            return self.guard(f"w.cp_async({self.saddr_any(a[0])},{ge},{sz},{src},%M)")
        if p[1] == "reduce":
            return self.bulk(i, p, a)
        self.bad()

    def bulk(self, i, p, a):
        op = i.op
        if "commit_group" in p:
            return self.emit("w.bulk_commit()")
        if "wait_group" in p:
            return self.emit(f"w.bulk_wait({a[0][1]})")
        if "prefetch" in p:
            return
        red = None
        if p[1] == "reduce":
            red = next((x for x in ("add", "min", "max", "inc", "dec", "and", "or", "xor") if x in p), None)
        if "tensor" in p:
            k = p.index("tensor")
            load = p[k + 2].startswith("shared")
            mc = "None"
            g2 = "cta_group::2" in p
            if load:
                dst, src, bar = a[0], a[1], a[2]
                rest = a[3:]
                if "multicast::cluster" in p:
                    mc = self.rd(rest[0], "u", True)
                ge, _ = self.addr(src)
                co = "[" + ",".join(self.rd(c, "i", True) for c in src[3][0][1]) + "]"
                f = "tma_gather4" if "gather4" in op else "tma_load"
                return self.guard(f"w.{f}({self.saddr_any(dst)},{ge},{co},{self.saddr_any(bar)},{mc},{g2},%M)")
            # store: [tensorMap, coords], [smem]
            dst, src = a[0], a[1]
            ge, _gw = self.addr(dst)
            co = "[" + ",".join(self.rd(c, "i", True) for c in dst[3][0][1]) + "]"
            return self.guard(f"w.tma_store({ge},{co},{self.saddr_any(src)},{red!r},%M,{'tile::scatter4' in p})")
        # non-tensor bulk copy
        dsp = next(x for x in p if x.split("::")[0] in ("shared", "global"))
        if dsp.startswith("shared"):
            if a[1][0] == "m" and "global" in p:
                ge, _ = self.addr(a[1])
                mc = self.rd(a[4], "u", True) if "multicast::cluster" in p else "None"
                return self.guard(f"w.bulk_g2s({self.saddr_any(a[0])},{ge},{self.rd(a[2], 'u', True)},{self.saddr_any(a[3])},{mc},%M)")
            return self.guard(f"w.bulk_s2s({self.saddr_any(a[0])},{self.saddr_any(a[1])},{self.rd(a[2], 'u', True)},{self.saddr_any(a[3])},%M)")
        ge, _ = self.addr(a[0])
        return self.guard(f"w.bulk_s2g({ge},{self.saddr_any(a[1])},{self.rd(a[2], 'u', True)},{red!r},{p[-1]!r},%M)")

    def h_clusterlaunchcontrol(self, i, p, a):
        if p[1] == "try_cancel":
            mc = any(x.startswith("multicast") for x in p)
            return self.guard(f"w.clc_try({self.saddr_any(a[0])},{self.saddr_any(a[1])},{mc},%M)")
        # response of 16 bytes: x, y, z of the first CTA, then 1 when a cluster was cancelled
        h = f"R[{a[1][1].idx}]"
        if p[2] == "is_canceled":
            return self.wr(a[0], f"(({h}[:,1]>>u8(32))==1)", "p")
        k = p[2].split("::")
        if k[0] != "get_first_ctaid":
            self.bad()
        if len(k) == 2 and k[1] in "xyz":
            e = {"x": f"{h}[:,0].astype(u4)", "y": f"({h}[:,0]>>u8(32)).astype(u4)", "z": f"{h}[:,1].astype(u4)"}[k[1]]
            return self.wr(a[0], e, "u")
        for d, e in zip(a[0][1], (f"{h}[:,0].astype(u4)", f"({h}[:,0]>>u8(32)).astype(u4)", f"{h}[:,1].astype(u4)"), strict=False):
            self.wr(d, e, "u")

    def h_tensormap(self, i, p, a):
        self.bad()

    def h_tex(self, i, p, a):
        self.bad()
