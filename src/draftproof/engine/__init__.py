"""The engine: a batch of requests, advanced round by round. The only layer with mutable state."""
