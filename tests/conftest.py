"""Where tests run: on the GPU if there is one, else on the CPU with Triton's interpreter, which must be on before any kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
