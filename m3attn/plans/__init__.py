"""Plans: what the layers of one step share, in buffers that keep their addresses from step to step."""
