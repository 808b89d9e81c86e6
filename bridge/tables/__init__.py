"""load_table, export_table, open_export: decide, explain, fetch, hand over."""
