"""What tests of m3attn, and of implementations and rules registered from outside, are made of: cases, inputs, bounds, poison and rule checks."""

from m3attn.testing.bounds import assert_within
from m3attn.testing.rules import check_rule

__all__ = ["assert_within", "check_rule"]
