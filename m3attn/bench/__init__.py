"""Timing of registered implementations on named shapes, beside public peers; `m3attn bench` is its command line."""
