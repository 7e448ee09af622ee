"""Runs CuTe DSL kernels for sm_90a and sm_100a on a CPU, by interpreting their PTX. Import it before cutlass."""

from .device import device, register
from .errors import Deadlock, SimError
from .translate.operands import Unsupported

__all__ = ["Deadlock", "SimError", "Unsupported", "device", "register"]
