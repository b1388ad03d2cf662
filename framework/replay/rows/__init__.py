"""Rows: the store that holds them, and how items refer to them."""
