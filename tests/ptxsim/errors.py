"""What a simulated kernel can fail with."""


class SimError(Exception):
    """A mistake of the kernel, with kernel, CTA, warp and PTX line in the text."""


class Deadlock(SimError):
    """No warp can go on; the text lists where each one stands and what it waits for."""
