"""What each column becomes: one contract, and a file for each target."""
