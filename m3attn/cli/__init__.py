"""The `m3attn` command, one file a subcommand."""
