"""A faster forward for decoder layers that are understood, applied to a loaded target from outside."""
