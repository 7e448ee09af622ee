"""`python -m m3attn …` is the `m3attn` command."""

import sys

from m3attn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
