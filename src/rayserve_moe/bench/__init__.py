"""Load on a running server, and its latencies: a client of any OpenAI-compatible server."""
