"""One driver per engine. Each runs in a process, and perhaps a Python environment, of its own."""
