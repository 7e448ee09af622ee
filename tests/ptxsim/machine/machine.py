"""Launches and the scheduler."""

import random
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from .. import ops
from ..errors import Deadlock, SimError
from ..formats import u1
from ..translate.blocks import Compiled
from ..translate.ptx import Module
from ..translate.types import ZERO
from .capture import Capture
from .cluster import Cluster
from .layout import Launch, Layout, Shape
from .memory import HOST_BASE, HOST_BYTES, SMEM_BYTES, Memory
from .tensor_map import TensorMap
from .warp import Warp

_compiled = {}  # translated kernels, shared by all devices of the process


class Machine:
    """What all launches of one simulated device share. `found` lists the hazards seen, `stats` has an entry for each launch.

    relay_fences: let a third warp's fence.proxy.async count for what it has waited for."""

    def __init__(
        self,
        sms: int = 148,
        order: str = "eager",
        seed: int = 0,
        fill: int | None = None,
        check_bounds: bool = True,
        verbose: bool = False,
        hazards: str = "warn",
        capture: Capture | None = None,
        relay_fences: bool = False,
    ) -> None:
        self.sms, self.order, self.fill = sms, order, fill
        self.hazards, self.capture, self.relay_fences = hazards, capture, relay_fences
        self.rng = random.Random(seed)
        self.mem = Memory()
        self.mem.check = check_bounds
        self.verbose = verbose
        self._tick = 0
        self.tensor_maps = {}
        self.warnings = set()
        self.stats = []
        self.found = []

    def warn(self, text: str) -> None:
        """Print this once."""
        if text not in self.warnings:
            self.warnings.add(text)
            print("ptxsim:", text)

    def report(self, kind: str, text: str, key: tuple) -> None:
        """A mistake that does not change the numbers here but may on a device; once for each key."""
        if self.hazards == "error":
            raise SimError(text)
        if key not in self.warnings:
            self.warnings.add(key)
            self.found.append((kind, text))
            if self.hazards == "warn":
                print("ptxsim:", text)

    def tick(self):
        self._tick += 1000
        return self._tick

    def tensor_map(self, addr, w):
        if addr & 63:
            raise SimError(f"tensor map at a misaligned address {addr:#x}: {w.where()}")
        raw = HOST_BYTES[addr - HOST_BASE : addr - HOST_BASE + 128]
        key = raw.tobytes()
        t = self.tensor_maps.get(key)
        if t is None:
            t = self.tensor_maps[key] = TensorMap(np.frombuffer(key, u1))
        return t

    def compile(self, mod, name):
        key = (id(mod), name)
        c = _compiled.get(key)
        if c is None:
            static = []
            k = mod.kernels[name]
            lay = Layout(mod, k)
            for nm, (space, size, al, _ext, init) in mod.symbols.items():
                if space in ("global", "const"):
                    buf = np.zeros(size + al, u1)
                    a = -(-buf.ctypes.data // al) * al
                    if init:
                        buf[a - buf.ctypes.data : a - buf.ctypes.data + len(init)] = np.frombuffer(init, u1)
                    static.append(buf)
                    lay.glob[nm] = a
            c = Compiled(k, mod, lay)
            c.zero = {s: f() for s, f in ZERO.items()}
            c.static = static
            _compiled[key] = c
        self.mem.static = [(b.ctypes.data, b.ctypes.data + len(b)) for b in c.static]
        return c

    def launch(
        self,
        mod: Module,
        name: str,
        grid: Shape,
        block: Shape,
        cluster: Shape = (1, 1, 1),
        smem: int = 0,
        params: bytes = b"",
        ranges: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Run a kernel to its end.

        smem: bytes of dynamic shared memory. params: laid out as the kernel declares them. ranges: [start, end) of the host memory that
        the kernel may touch, besides its own symbols.

        Raises:
            SimError: the first mistake found; Deadlock when no warp can go on."""
        t0 = time.time()
        ranges = list(ranges)
        c = self.compile(mod, name)
        nb = max(64, len(params))
        buf = np.zeros(nb + 128, u1)
        a = -(-buf.ctypes.data // 64) * 64
        o = a - buf.ctypes.data
        buf[o : o + len(params)] = np.frombuffer(params, u1)
        L = Launch(grid, block, cluster, smem, param_raw=buf[o : o + nb], param_base=a, smem_end=c.layout.dyn_base + smem)
        if L.smem_end > SMEM_BYTES:
            raise SimError(f"{smem} bytes of dynamic shared memory do not fit")
        nthreads = block[0] * block[1] * block[2]
        if c.kernel.reqntid and nthreads != int(np.prod(c.kernel.reqntid)):
            raise SimError(f"block {block}, kernel requires {c.kernel.reqntid}")
        self.mem.set([*ranges, (a, a + nb)])
        for k in range(3):
            if grid[k] % cluster[k]:
                raise SimError(f"grid {grid} is not a multiple of the cluster {cluster}")
        captured = self.capture.before(L, mod, name, params, ranges) if self.capture else None
        nblk = 0
        gx, gy, gz = (grid[k] // cluster[k] for k in range(3))
        self.queue = deque(
            [
                (cx * cluster[0] + x, cy * cluster[1] + y, cz * cluster[2] + z)
                for z in range(cluster[2])
                for y in range(cluster[1])
                for x in range(cluster[0])
            ]
            for cz in range(gz)
            for cy in range(gy)
            for cx in range(gx)
        )
        # clusters that cluster launch control may cancel: on a device those that found no SM free; to reach that code
        # with small grids, all that are not running yet unless the order is eager
        ncta = cluster[0] * cluster[1] * cluster[2]
        self.unstealable = self.sms // ncta if self.order == "eager" else 0
        with np.errstate(all="ignore"):
            while self.queue:
                ids = self.queue.popleft()
                self.unstealable -= 1
                nblk += self.run_cluster(c, ids, L, nthreads)
        if self.capture:
            self.capture.after(*captured)
        dt = time.time() - t0
        self.stats.append(dict(kernel=name, grid=grid, block=block, seconds=dt, blocks=nblk))
        if self.verbose:
            print(f"ptxsim: {name[:60]} grid {grid} cluster {cluster} block {block} smem {smem}: {dt:.2f} s, {nblk} warp blocks")

    def steal(self):
        n = len(self.queue)
        if n > max(0, self.unstealable):
            k = n - 1 if self.unstealable > 0 else 0
            ids = self.queue[k]
            del self.queue[k]
            return ids[0]
        return None

    def run_cluster(self, comp, ids, L, nthreads):
        cl = Cluster(self, comp, ids, L)
        cl.desperate = False
        for cta in cl.ctas:
            cta.warps = [Warp(cta, w, nthreads) for w in range(-(-nthreads // 32))]
        warps = [w for c in cl.ctas for w in c.warps]
        live = list(warps)
        idle = 0
        last_events = -1
        prio, budget, p_async = None, 4000, 0.0
        try:
            while live:
                progress = False
                if self.order == "random":
                    # random priorities: the first warp in the order runs until it blocks; now and then a new order
                    if prio is None or self.rng.random() < 0.03:
                        prio = live[:]
                        self.rng.shuffle(prio)
                        budget = self.rng.choice([1, 5, 40, 4000])
                        p_async = self.rng.choice([0.0, 0.02, 0.3])
                    if self.rng.random() < p_async:
                        self._async_one(cl)
                    for w in prio:
                        if w.done:
                            continue
                        cl.cur = w
                        ev = cl.events
                        if w.run(budget):
                            progress = True
                            if cl.events != ev:
                                break
                else:
                    for w in live:
                        cl.cur = w
                        if w.run(4000):
                            progress = True
                live = [w for w in live if not w.done]
                if not live:
                    break
                if progress and cl.events != last_events:
                    last_events = cl.events
                    idle = 0
                    cl.desperate = False
                    continue
                if self._async_one(cl):
                    idle = 0
                    continue
                if progress:
                    # only spinning: bounded
                    idle += 1
                    if idle > 2000:
                        self.deadlock(cl, live, "spinning without effect")
                # let waits that may return false do so
                for w in live:
                    if w.soft_blocked:
                        w.give_false = True
                idle += 1
                if idle > 20:
                    cl.desperate = True
                if (idle > 60 and not progress) or idle > 2000:
                    self.deadlock(cl, live, "deadlock")
            while self._async_one(cl):
                pass
        except SimError:
            raise
        except Exception as e:
            raise SimError(f"{type(e).__name__}: {e} [{cl.cur.where()}]") from e
        for cta in cl.ctas:
            if cta.tmem_allocs:
                self.warn(f"tensor memory not freed by {comp.kernel.name[:50]}")
        return sum(w.blocks_run for w in warps)

    def _async_one(self, cl):
        """run one pending asynchronous operation; in-order within a CTA's tensor pipe"""
        pool = []
        if cl.async_queue:
            pool.append(cl.async_queue)
        for c in cl.ctas:
            if c.tensor_queue:
                pool.append(c.tensor_queue)
        if not pool:
            return False
        q = self.rng.choice(pool) if self.order == "random" else pool[-1]
        if q is cl.async_queue:
            k = self.rng.randrange(len(q)) if self.order == "random" else len(q) - 1
            fn = q.pop(k)
        else:
            fn = q.popleft()
        fn()
        cl.events += 1
        return True

    def deadlock(self, cl, live, what):
        lines = [f"{what}; {len(live)} warps stand at:"]
        for w in live:
            lines.append(
                f"  cta {w.cta.ctaid} warp {w.index} line {w.line} "
                + (f"bar {w.waiting_barrier[2]} ({w.waiting_barrier[0].n}/{w.waiting_barrier[0].need}) " if w.waiting_barrier else "")
                + (f"{w.blocked_on[0]} parity {w.blocked_on[1]} " if w.blocked_on else "")
                + next((i.text[:90] for b in w.comp.blocks for i in b if i.line == w.line), "")
            )
            if len(w.groups) > 1:
                for pc, m in w.groups:
                    i = w.comp.blocks[pc][0]
                    lines.append(f"    lanes {int(ops.ballot(np.ones(32, bool) if m is None else m)):08x} at line {i.line}: {i.text[:90]}")
        raise Deadlock("\n".join(lines))
