"""`m3attn report`: one self-contained HTML page from the files of `m3attn demo --json` and `m3attn bench --json`."""
