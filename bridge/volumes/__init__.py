"""Places: where volumes are, how files on them become visible, and how their bytes are checked."""
