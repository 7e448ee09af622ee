"""M3's attention layers as torch modules, on the public stage functions."""
