"""``tellin bench``: load for a server, and throughput and latency of an engine in this process.

Needs nothing beyond tellin itself; plots need the extra ``plot``.
"""
