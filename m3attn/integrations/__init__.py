"""Others' programs on m3attn's stages, and others' kernels behind its keys; what they need is imported when it is used."""
