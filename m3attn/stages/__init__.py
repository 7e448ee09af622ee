"""The public functions, one file a stage: check what the host can see, choose an implementation, run it."""
