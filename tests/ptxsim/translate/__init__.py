"""From PTX text to Python functions over arrays of 32 lanes."""
