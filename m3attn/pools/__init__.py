"""Pools of cache pages, on the device and on the host."""

from m3attn.pools.host import HostKVPool, HostPoolGroup, PageTransfer
from m3attn.pools.latent import LatentKVPool
from m3attn.pools.paged import PagedKVPool
from m3attn.pools.pages import OutOfPages, PageAllocator
from m3attn.pools.parts import PageSource, PoolPart, SubPool
from m3attn.pools.transfer import Transfer

__all__ = [
    "HostKVPool",
    "HostPoolGroup",
    "LatentKVPool",
    "OutOfPages",
    "PageAllocator",
    "PageSource",
    "PageTransfer",
    "PagedKVPool",
    "PoolPart",
    "SubPool",
    "Transfer",
]
