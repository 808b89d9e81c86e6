"""Row groups into batches: the order of rows, and the loader that gives them."""
