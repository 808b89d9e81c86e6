"""Checkpoints that are complete or absent: torch's distributed checkpoints on volumes, and single files."""
