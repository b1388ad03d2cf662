"""What agents learn: the commands that run the rows of `rows.py`, and their results in `records`."""
