"""Where a kernel's symbols and parameters stand."""

import dataclasses

import numpy as np

from .memory import SMEM_BASE

Shape = tuple[int, int, int]


class Layout:
    """Addresses of a module's symbols for one kernel: shared ones within a CTA, local ones within a lane, global ones in host memory."""

    def __init__(self, mod, k):
        self.shared, self.local, self.glob = {}, {}, {}
        off = SMEM_BASE
        dyn = []
        for table in (mod.symbols, k.symbols):
            for name, (space, size, al, ext, _init) in table.items():
                if space == "shared":
                    if ext or size == 0:
                        dyn.append((name, al))
                        continue
                    off = -(-off // al) * al
                    self.shared[name] = off
                    off += size
                elif space == "local":
                    lo = getattr(self, "local_bytes", 0)
                    lo = -(-lo // al) * al
                    self.local[name] = lo
                    self.local_bytes = lo + size
        self.local_bytes = -(-getattr(self, "local_bytes", 0) // 16) * 16
        self.static_bytes = off - SMEM_BASE
        al = max([a for _, a in dyn] + [16])
        off = -(-off // al) * al
        self.dyn_base = off
        for name, _ in dyn:
            self.shared[name] = off


@dataclasses.dataclass
class Launch:
    """What all CTAs of one launch share."""

    grid: Shape
    block: Shape
    cluster: Shape
    smem: int  # bytes of dynamic shared memory
    param_raw: np.ndarray  # the parameters' bytes
    param_base: int  # and their address
    smem_end: int  # first offset in shared memory that a CTA may not touch
    param_cache: dict = dataclasses.field(default_factory=dict)
