"""Other people's programs on m3attn's stages. Nothing here is imported by m3attn itself, and each module imports the package it serves."""
