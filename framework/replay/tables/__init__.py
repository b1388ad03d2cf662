"""Tables: items, the selectors that sample and remove them, and the rate limiter."""
