"""Many runs: what stands above a single one. Each module is imported by its own name."""
