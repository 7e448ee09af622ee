"""A stack of M3 attention layers over the bytes of a text, with a table of what ran and a look at what was selected."""
