"""Control flow, barriers, and collectives of a warp."""

from .types import BLOCK, CONV, EXIT, READ_AS


class WarpInstructions:
    """Handlers of instructions that end a block or need several lanes."""

    def h_bra(self, i, p, a):
        t = self.c.target(i, a[-1][1])
        nxt = self.b + 1 if self.b + 1 < len(self.c.blocks) else EXIT
        self.term = True
        if i.pred is None:
            self.emit(f"return {t}")
            return
        e = f"R[{i.pred.idx}]"
        if i.pneg:
            e = "~" + e
        self.emit(f"return ({e},{t},{nxt})")

    def h_ret(self, i, p, a):
        nxt = self.b + 1 if self.b + 1 < len(self.c.blocks) else EXIT
        self.term = True
        if i.pred is None:
            self.emit(f"return {EXIT}")
        else:
            e = f"R[{i.pred.idx}]"
            self.emit(f"return ({'~' if i.pneg else ''}{e},{EXIT},{nxt})")

    h_exit = h_ret

    def h_trap(self, i, p, a):
        if i.pred is None:
            self.emit(f"w.trap({i.line})")
        else:
            e = f"R[{i.pred.idx}]"
            e = f"({'~' if i.pneg else ''}{e}){'&m' if self.masked else ''}"
            self.emit(f"if ({e}).any(): w.trap({i.line})")

    def h_call(self, i, p, a):
        t = a[0][1]
        if "vprintf" in t:
            self.emit("w.warn('printf ignored')")
            return
        if "assertfail" in t:
            self.guard(f"w.trap({i.line})")
            return
        self.bad()

    def h_nanosleep(self, i, p, a):
        self.emit("w.sleep=True")

    def h_pmevent(self, i, p, a):
        pass

    def conv_check(self, i, maskop=None):
        """collective: in masked form the lanes named must be here"""
        if self.masked:
            mk = self.rd(maskop, "u", True) if maskop is not None else "None"
            self.emit(f"if w.missing(m,{mk}): return {CONV}")

    def h_shfl(self, i, p, a):
        self.conv_check(i, a[4])
        d = a[0]
        dd, pp = (d[1], d[2]) if d[0] == "p" else (d, ("_",))
        self.emit(f"t,t1=shfl({p[2]!r},{self.rd(a[1], 'u', True)},{self.rd(a[2], 'u', True)},{self.rd(a[3], 'u', True)})")
        if pp[0] != "_":
            self.wr(pp, "t1", "p")
        self.wr(dd, "t", "u")

    def h_vote(self, i, p, a):
        self.conv_check(i, a[2])
        c = self.rd(a[1], "p")
        act = self.lanes or "True"
        mode = p[2]
        if mode == "ballot":
            self.wr(a[0], f"np.full(32,ballot({c}&{act}),u4)", "u")
        elif mode == "any":
            self.wr(a[0], f"np.full(32,({c}&{act}).any())", "p")
        elif mode == "all":
            self.wr(a[0], f"np.full(32,({c}|~np.asarray({act})).all())", "p")
        elif mode == "uni":
            self.wr(a[0], f"np.full(32,({c}|~np.asarray({act})).all() or not ({c}&{act}).any())", "p")

    def h_activemask(self, i, p, a):
        self.wr(a[0], f"np.full(32,ballot({self.lanes or 'np.ones(32,bool)'}),u4)", "u")

    def h_match(self, i, p, a):
        self.conv_check(i, a[2])
        w = READ_AS[p[-1]]
        act = self.lanes or "np.ones(32,bool)"
        d = a[0]
        dd, pp = (d[1], d[2]) if d[0] == "p" else (d, ("_",))
        self.emit(f"t,t1=match_({p[1]!r},{self.rd(a[1], w, True)},{act})")
        self.wr(dd, "t", "u")
        if pp[0] != "_":
            self.wr(pp, "t1", "p")

    def h_elect(self, i, p, a):
        self.conv_check(i, a[1])
        act = self.lanes
        self.emit(f"t=first_lane({act})" if act else "t=0")
        self.wr(a[0][1], "np.full(32,t,u4)", "u")
        self.wr(a[0][2], "(LANE==t)", "p")

    def h_redux(self, i, p, a):
        self.conv_check(i, a[2])
        act = self.lanes or "None"
        w = READ_AS[p[-1]]
        self.wr(a[0], f"redux({p[2]!r},{self.rd(a[1], w, True)},{act},{'NaN' in p},{'abs' in p})", w)

    def h_bar(self, i, p, a):
        if "warp" in p:
            return self.conv_check(i, a[0])
        if p[0] == "barrier" and "cluster" in p:
            self.conv_check(i)
            if "arrive" in p:
                self.emit("w.cluster_arrive()")
            else:
                self.emit(f"if not w.cluster_wait(): return {BLOCK}")
            return
        if "red" in p:
            self.bad()
        bid = self.rd(a[0], "u", True)
        cnt = self.rd(a[1], "u", True) if len(a) > 1 else "None"
        if i.pred is not None:
            self.emit(f"if {self.lanes}.any():")
            pre = " "
        else:
            pre = ""
        if self.masked and "arrive" not in p and i.pred is None:
            self.emit(f"if w.missing(m,None): return {CONV}")
        mm = self.lanes or "None"
        if "arrive" in p:
            self.emit(pre + f"w.bar_arrive({bid},{cnt},{mm})")
        else:
            self.emit(pre + f"if not w.bar_sync({bid},{cnt},{mm}): return {BLOCK}")

    h_barrier = h_bar
