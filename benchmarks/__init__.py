"""How fast `bridge` is, beside what a person would use without it."""
