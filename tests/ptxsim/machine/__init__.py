"""The simulated device: memory, warps, barriers, asynchronous engines, scheduler."""
