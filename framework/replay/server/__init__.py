"""What serves tables to other processes: messages, operations on tables, and what clients hold."""
